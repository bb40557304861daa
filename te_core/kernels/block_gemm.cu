// out [M, N] = a [M, K] b [N, K]^T of FP8 with scales for blocks: a in 1x128 pieces, b in 1x128 pieces or 128x128 tiles.
//
// -D A_TYPE=e4m3|e5m2  B_TYPE=e4m3|e5m2  OUT=bf16|float  TILED=0|1  ACCUMULATE=0|1
// compile-check: A_TYPE=e4m3 B_TYPE=e4m3 OUT=bf16 TILED=1 ACCUMULATE=0
#include "common/numeric.cuh"

#ifndef BN
#define BN 256
#endif
#ifndef NI
#define NI 64
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef CLUSTER
#define CLUSTER 2
#endif
#ifndef GROUP
#define GROUP 8
#endif
#ifndef RS
#define RS 1
#endif
#ifndef EPI
#define EPI 0
#endif
#ifndef BUFS
#define BUFS 1
#endif
#ifndef SKEW
#define SKEW 0
#endif
#ifndef ORDER
#define ORDER 0
#endif
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

typedef unsigned long long u64;
constexpr int BM = 128, BK = 128, PARTS = BN / NI, TEMPS = NI == 64 ? 2 : 1, HELD = NI / 2;
constexpr int A_BYTES = BM * BK, B_BYTES = BN * BK;
constexpr int THREADS = 384;

struct alignas(64) Map {
    unsigned char bytes[128];
};
struct Arguments {
    Map a, b;
#if EPI
    Map result;
#endif
    const float* a_scale;
    const float* b_scale;
    OUT* out;
    int m, n, k;
};

struct alignas(1024) Shared {
    unsigned char a[STAGES][A_BYTES];
    unsigned char b[STAGES][B_BYTES];
#if EPI
    unsigned char out[8][BUFS][2048];
#endif
    float a_scale[STAGES][BM];
    float b_scale[TILED ? 1 : STAGES][TILED ? 4 : BN];
    u64 full[STAGES], empty[STAGES];
};

__device__ __forceinline__ u32 address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    u32 done;
    do {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (!done);
}

__device__ __forceinline__ void arrive_at(u32 barrier, u32 rank) {
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
                 "r"(rank)
                 : "memory");
}

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void load_tile(u32 to, const Map* map, int x, int y, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(map), "r"(x), "r"(y), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void load_tile_for_both(u32 to, const Map* map, int x, int y, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
                 "l"(map), "r"(x), "r"(y), "r"(barrier), "h"((unsigned short)3)
                 : "memory");
}

__device__ __forceinline__ void load_floats(u32 to, const float* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ u64 descriptor(u32 at) {  // rows of 128 bytes, 8 of them swizzled together
    return (u64(1) << 62) | (u64(1024 >> 4) << 32) | (u64(1) << 16) | u64((at & 0x3ffff) >> 4);
}

#define FOUR(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define SIXTEEN(x, i) FOUR(x, i), FOUR(x, i + 4), FOUR(x, i + 8), FOUR(x, i + 12)
#define SET4(x, i) "=f"(x[i]), "=f"(x[i + 1]), "=f"(x[i + 2]), "=f"(x[i + 3])
#define SET16(x, i) SET4(x, i), SET4(x, i + 4), SET4(x, i + 8), SET4(x, i + 12)
#define NAMES32 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
    "%30,%31"
#define NAMES64 \
    NAMES32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56," \
            "%57,%58,%59,%60,%61,%62,%63"
#define OPERATION "wgmma.mma_async.sync.aligned.m64n" TEXT(NI) "k32.f32." TEXT(A_TYPE) "." TEXT(B_TYPE)
#if NI == 64
#define STEP(a, b, keep) OPERATION " {" NAMES32 "}, " a ", " b ", " keep ", 1, 1;\n"
#define OUTS(t) SET16(t, 0), SET16(t, 16)
#define HOLD(t) SIXTEEN(t, 0), SIXTEEN(t, 16)
#define R0 "{%32,%33,%34,%35}"
#define R1 "{%36,%37,%38,%39}"
#define R2 "{%40,%41,%42,%43}"
#define R3 "{%44,%45,%46,%47}"
#define RB "%48"
#define WAITED "32"
#define SA "%32"
#define SB "%33"
#else
#define STEP(a, b, keep) OPERATION " {" NAMES64 "}, " a ", " b ", " keep ", 1, 1;\n"
#define OUTS(t) SET16(t, 0), SET16(t, 16), SET16(t, 32), SET16(t, 48)
#define HOLD(t) SIXTEEN(t, 0), SIXTEEN(t, 16), SIXTEEN(t, 32), SIXTEEN(t, 48)
#define R0 "{%64,%65,%66,%67}"
#define R1 "{%68,%69,%70,%71}"
#define R2 "{%72,%73,%74,%75}"
#define R3 "{%76,%77,%78,%79}"
#define RB "%80"
#define WAITED "64"
#define SA "%64"
#define SB "%65"
#endif

// t = 64 rows of a (in registers) times NI of b, over 128 of K: begins.
__device__ __forceinline__ void multiply(float (&t)[HELD], const u32 (&a)[16], u64 b) {
    asm volatile("{\n.reg .pred no, yes;\n.reg .b64 b1, b2, b3;\nsetp.ne.b32 no, 0, 0;\nsetp.eq.b32 yes, 0, 0;\n"
                 "add.s64 b1, " RB ", 2;\nadd.s64 b2, " RB ", 4;\nadd.s64 b3, " RB ", 6;\n"
                 "wgmma.fence.sync.aligned;\n" STEP(R0, RB, "no") STEP(R1, "b1", "yes") STEP(R2, "b2", "yes")
                     STEP(R3, "b3", "yes") "wgmma.commit_group.sync.aligned;\n}"
                 : HOLD(t)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(a[8]),
                   "r"(a[9]), "r"(a[10]), "r"(a[11]), "r"(a[12]), "r"(a[13]), "r"(a[14]), "r"(a[15]), "l"(b)
                 : "memory");
}

__device__ __forceinline__ void multiply(float (&t)[HELD], u64 a, u64 b) {
    asm volatile("{\n.reg .pred no, yes;\n.reg .b64 a1, a2, a3, b1, b2, b3;\nsetp.ne.b32 no, 0, 0;\nsetp.eq.b32 yes, 0, 0;\n"
                 "add.s64 b1, " SB ", 2;\nadd.s64 b2, " SB ", 4;\nadd.s64 b3, " SB ", 6;\n"
                 "add.s64 a1, " SA ", 2;\nadd.s64 a2, " SA ", 4;\nadd.s64 a3, " SA ", 6;\n"
                 "wgmma.fence.sync.aligned;\n" STEP(SA, SB, "no") STEP("a1", "b1", "yes") STEP("a2", "b2", "yes")
                     STEP("a3", "b3", "yes") "wgmma.commit_group.sync.aligned;\n}"
                 : HOLD(t)
                 : "l"(a), "l"(b)
                 : "memory");
}

template <int PENDING> __device__ __forceinline__ void finish(float (&t)[HELD]) {
    asm volatile("wgmma.wait_group.sync.aligned %" WAITED ";" : HOLD(t) : "n"(PENDING) : "memory");
}

__device__ __forceinline__ void fetch_a(u32 (&a)[16], u32 base, int lane) {
    const int row = lane & 15, half = lane >> 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const u32 at = base + row * 128 + (((2 * j + half) ^ (row & 7)) << 4);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(a[4 * j]), "=r"(a[4 * j + 1]), "=r"(a[4 * j + 2]), "=r"(a[4 * j + 3])
                     : "r"(at)
                     : "memory");
    }
}

__device__ __forceinline__ void promote(float* sum, const float (&t)[HELD], float s0, float s1, const float* b_scale) {
#pragma unroll
    for (int j = 0; j < NI / 8; ++j) {
        float2 c = make_float2(1.f, 1.f);
        if constexpr (!TILED) c = *reinterpret_cast<const float2*>(b_scale + 8 * j);
        sum[4 * j] = fmaf(t[4 * j], TILED ? s0 : s0 * c.x, sum[4 * j]);
        sum[4 * j + 1] = fmaf(t[4 * j + 1], TILED ? s0 : s0 * c.y, sum[4 * j + 1]);
        sum[4 * j + 2] = fmaf(t[4 * j + 2], TILED ? s1 : s1 * c.x, sum[4 * j + 2]);
        sum[4 * j + 3] = fmaf(t[4 * j + 3], TILED ? s1 : s1 * c.y, sum[4 * j + 3]);
    }
}

__device__ __forceinline__ u32 pair(float x, float y) {
    u32 v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(y), "f"(x));
    return v;
}

#if EPI
// 16 rows of a warp leave through shared memory, 64 columns at a time.
__device__ __forceinline__ void send(const Map* map, unsigned char (&room)[BUFS][2048], const float (&sum)[BN / 2], int row,
                                     int col, int lane) {
    const int r = (lane & 7) + (lane & 8), right = lane >> 4;
#pragma unroll
    for (int c = 0; c < BN / 64; ++c) {
        const u32 base = address(room[c % BUFS]);
        if (lane == 0) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(BUFS - 1) : "memory");
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            const float* v = sum + 32 * c + 4 * j;
            const u32 at = base + r * 128 + (((j + right) ^ (r & 7)) << 4);
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                         "r"(pair(v[0], v[1])), "r"(pair(v[2], v[3])), "r"(pair(v[4], v[5])), "r"(pair(v[6], v[7]))
                         : "memory");
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) {
            asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\n"
                         "cp.async.bulk.commit_group;" ::"l"(map),
                         "r"(col + 64 * c), "r"(row), "r"(base)
                         : "memory");
        }
    }
}
#endif

struct Tile {
    int m, n;
};

// Cluster tiles in the order in which blocks take them: GROUP of them below one another, then to the right.
__device__ __forceinline__ Tile tile_at(int number, int down, int across) {
    const int group = number / (GROUP * across), first = group * GROUP;
    const int height = min(GROUP, down - first), inside = number - first * across;
    return {first + inside % height, inside / height};
}

// Four registers of four lanes side by side change places: lane i then has those of number i.
__device__ __forceinline__ void turn(u32 (&v)[4], int lane) {
    const bool right = lane & 1, low = lane & 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 got = __shfl_xor_sync(~0u, low ? v[i] : v[i + 2], 2);
        if (low) v[i] = got; else v[i + 2] = got;
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 got = __shfl_xor_sync(~0u, right ? v[i] : v[i + 1], 1);
        if (right) v[i] = got; else v[i + 1] = got;
    }
}

__device__ __forceinline__ void store(bf16* out, const float (&sum)[BN / 2], int row, int col, int m, int n, int lane) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        const int r = row + 8 * side;
#pragma unroll
        for (int j = 0; j < BN / 8; j += 4) {
            u32 v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) v[i] = pair(sum[4 * (j + i) + 2 * side], sum[4 * (j + i) + 2 * side + 1]);
            turn(v, lane);
            const int c = col + 8 * (j + (lane & 3));
            if (r < m && c < n) *reinterpret_cast<uint4*>(out + i64(r) * n + c) = make_uint4(v[0], v[1], v[2], v[3]);
        }
    }
}

__device__ __forceinline__ void store(float* out, const float (&sum)[BN / 2], int row, int col, int m, int n, int lane) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        const int r = row + 8 * side;
#pragma unroll
        for (int j = 0; j < BN / 8; ++j) {
            const int c = col + 8 * j + 2 * (lane & 3);
            if (r < m && c < n) {
                float2* at = reinterpret_cast<float2*>(out + i64(r) * n + c);
                float2 v = make_float2(sum[4 * j + 2 * side], sum[4 * j + 2 * side + 1]);
                if constexpr (ACCUMULATE) {
                    const float2 old = *at;
                    v.x += old.x;
                    v.y += old.y;
                }
                *at = v;
            }
        }
    }
}

__device__ __forceinline__ void cluster_sync() {
    if constexpr (CLUSTER > 1) {
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    } else {
        __syncthreads();
    }
}

__device__ __forceinline__ void produce(const Arguments& args, Shared& shared, int rank, int down, int across) {
    const int blocks = (args.k + BK - 1) / BK;
    int stage = 0;
    u32 phase = 1;
    for (int at = blockIdx.x / CLUSTER; at < down * across; at += gridDim.x / CLUSTER) {
        const Tile tile = tile_at(at, down, across);
        const int m = (tile.m * CLUSTER + rank) * BM, n = tile.n * BN;
        const int rows = 4 * max(0, min(BM, args.m - m)), cols = TILED ? 0 : 4 * min(BN, args.n - n);
        for (int i = 0; i < blocks; ++i) {
            const u32 full = address(&shared.full[stage]);
            wait(address(&shared.empty[stage]), phase);
            expect(full, A_BYTES + B_BYTES + rows + cols);
            load_tile(address(shared.a[stage]), &args.a, i * BK, m, full);
            if constexpr (CLUSTER > 1) {
                constexpr int PART = BN / CLUSTER;
                load_tile_for_both(address(shared.b[stage]) + rank * PART * BK, &args.b, i * BK, n + rank * PART, full);
            } else {
                load_tile(address(shared.b[stage]), &args.b, i * BK, n, full);
            }
            if (rows) load_floats(address(shared.a_scale[stage]), args.a_scale + i64(i) * args.m + m, rows, full);
            if constexpr (!TILED) {
                load_floats(address(shared.b_scale[stage]), args.b_scale + i64(i) * args.n + n, cols, full);
            }
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
    }
}

__device__ __forceinline__ void my_turn(int group) {
    if constexpr (ORDER) asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory");
}
__device__ __forceinline__ void your_turn(int group) {
    if constexpr (ORDER) asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory");
}

__device__ __forceinline__ void consume(const Arguments& args, Shared& shared, int rank, int down, int across) {
    const int thread = threadIdx.x - 128, group = thread / 128, warp = thread / 32 % 4, lane = thread % 32;
    const int blocks = (args.k + BK - 1) / BK, wide = (blocks + 3) / 4 * 4, own = 64 * group + 16 * warp;
    int stage = 0;
    u32 phase = 0;
    if (group == 1) your_turn(1);
    if (SKEW && group == 1) __nanosleep(SKEW);
    float t[TEMPS][HELD];
#pragma unroll
    for (int i = 0; i < TEMPS * HELD; ++i) t[i / HELD][i % HELD] = 0.f;
    for (int at = blockIdx.x / CLUSTER; at < down * across; at += gridDim.x / CLUSTER) {
        const Tile tile = tile_at(at, down, across);
        const int m = (tile.m * CLUSTER + rank) * BM, n = tile.n * BN;
        const float* tiles[BN / 128];
        float b_next[BN / 128];
        if constexpr (TILED) {
#pragma unroll
            for (int h = 0; h < BN / 128; ++h) {
                tiles[h] = args.b_scale + i64(min(n / 128 + h, (args.n - 1) / 128)) * wide;
                b_next[h] = __ldg(tiles[h]);
            }
        }
        float sum[BN / 2];
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) sum[i] = 0.f;
        for (int i = 0; i < blocks; ++i) {
            float b_now[BN / 128];
            if constexpr (TILED) {
#pragma unroll
                for (int h = 0; h < BN / 128; ++h) {
                    b_now[h] = b_next[h];
                    b_next[h] = __ldg(tiles[h] + min(i + 1, blocks - 1));
                }
            }
            wait(address(&shared.full[stage]), phase);
            const u64 b = descriptor(address(shared.b[stage]));
#if RS
            u32 a[16];
            fetch_a(a, address(shared.a[stage]) + own * BK, lane);
#else
            const u64 a = descriptor(address(shared.a[stage]) + 64 * group * BK);
#endif
            const float s0 = shared.a_scale[stage][own + lane / 4], s1 = shared.a_scale[stage][own + lane / 4 + 8];
            const float* b_scale = shared.b_scale[TILED ? 0 : stage] + 2 * (lane & 3);
            if constexpr (TEMPS == 2) {
                my_turn(group);
                multiply(t[0], a, b);
#pragma unroll
                for (int p = 0; p < PARTS; ++p) {
                    if (p + 1 < PARTS) {
                        multiply(t[(p + 1) % 2], a, b + (p + 1) * (NI * BK / 16));
                        if (p + 2 == PARTS) your_turn(group);
                        finish<1>(t[p % 2]);
                    } else {
                        finish<0>(t[p % 2]);
                    }
                    if (TILED && p + 1 == PARTS && lane < CLUSTER) arrive_at(address(&shared.empty[stage]), lane);
                    const float f = TILED ? b_now[p * NI / 128] : 1.f;
                    promote(sum + p * HELD, t[p % 2], s0 * f, s1 * f, b_scale + p * NI);
                }
            } else {
#pragma unroll
                for (int p = 0; p < PARTS; ++p) {
                    my_turn(group);
                    multiply(t[0], a, b + p * (NI * BK / 16));
                    your_turn(group);
                    finish<0>(t[0]);
                    if (TILED && p + 1 == PARTS && lane < CLUSTER) arrive_at(address(&shared.empty[stage]), lane);
                    const float f = TILED ? b_now[p * NI / 128] : 1.f;
                    promote(sum + p * HELD, t[0], s0 * f, s1 * f, b_scale + p * NI);
                }
            }
            if constexpr (!TILED) {
                __syncwarp();
                if (lane < CLUSTER) arrive_at(address(&shared.empty[stage]), lane);
            }
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
#if EPI
        send(&args.result, shared.out[4 * group + warp], sum, m + own, n, lane);
#else
        store(args.out, sum, m + own + lane / 4, n, args.m, args.n, lane);
#endif
    }
#if EPI
    if (lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if CLUSTER > 1
    __cluster_dims__(CLUSTER, 1, 1)
#endif
        block_gemm(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0;
    const int down = (args.m + BM * CLUSTER - 1) / (BM * CLUSTER), across = (args.n + BN - 1) / BN;
    if (threadIdx.x == 0) {
        if (address(memory) % 1024) __trap();
        for (int i = 0; i < STAGES; ++i) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(&shared.full[i])) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(&shared.empty[i])), "r"(8 * CLUSTER)
                         : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_sync();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) produce(args, shared, rank, down, across);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        consume(args, shared, rank, down, across);
    }
    cluster_sync();
}
