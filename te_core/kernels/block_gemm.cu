// out [M, N] = a [M, K] b [N, K]^T of FP8 with a scale for each block: a in 1x128 pieces, b in pieces or 128x128 tiles.
//
// Scales lie as te_core/quantized.py has them: of pieces [K / 128, rows], of tiles [rows / 128, K / 128 up to 4]. M is
// a multiple of 8, N and K of 16: beyond the edges the copy engine reads zeros, and what is computed is not stored.
//
// Blocks are persistent and come in clusters of two, one tile of a above the other; a block's tile is 128 x 256. One
// thread loads: 128 of K at a time into one of STAGES places, each block half of b, for both. Two groups of 128 threads
// multiply 64 rows each. Tensor cores sum the products of 128 of K only, 64 columns at a time in one of two sets of
// registers; while they fill one, the other is multiplied by its scales and added to the sums in float32. Rows of a
// come through registers, which saves the tensor cores three of four readings of them. With tiles the groups take turns
// in giving the tensor cores work, so that both do not add at once; with pieces that is slower.
// Measured 2026-11-28, H100, 8192 x 28672 x 4096 in bf16, TFLOP/s, 25 ms of each in turns: tiles 1123, pieces 815, of
// cuBLASLt's speed 0.97 and 0.93; into float32, which is stored eight bytes at a time, 0.47. In rows of 20 products
// (2026-11-27): 128 columns an instruction and one set of registers 1043 and 895, with two sets 1149 and 877 (cuBLASLt
// 1077 and 814); tiles of 128 x 128 998 and 834. Nothing hides the end of a tile.
//
// -D A_TYPE=e4m3|e5m2  B_TYPE=e4m3|e5m2  OUT=bf16|float  TILED=0|1  ACCUMULATE=0|1 (into float)
// architecture: sm_90a
// compile-check: A_TYPE=e4m3 B_TYPE=e4m3 OUT=bf16 TILED=1 ACCUMULATE=0
// compile-check: A_TYPE=e5m2 B_TYPE=e4m3 OUT=bf16 TILED=0 ACCUMULATE=0
// compile-check: A_TYPE=e4m3 B_TYPE=e5m2 OUT=float TILED=0 ACCUMULATE=1
// compile-check: A_TYPE=e4m3 B_TYPE=e4m3 OUT=float TILED=1 ACCUMULATE=0
#include "common/fp8_product.cuh"

constexpr int BM = 128, BN = 256, BK = 128, STAGES = 4, CLUSTER = 2, THREADS = 384, PARTS = BN / NI;
constexpr int GROUP = 8;                                // tiles of a cluster below one another that share b in L2

struct Arguments {
    Map a, b;
    const float* a_scale;
    const float* b_scale;
    OUT* out;
    int m, n, k;
};

struct alignas(1024) Shared {
    u8 a[STAGES][BM * BK];
    u8 b[STAGES][BN * BK];
    float a_scale[STAGES][BM];
    float b_scale[TILED ? 1 : STAGES][BN];
    u64 full[STAGES], empty[STAGES];
};

struct Tile {
    int m, n;  // its first row and column
};

// Who a thread is: its block's rank in the cluster, its group (-1 loads), the first of its warp's 16 rows in a tile.
// And how many tiles of a cluster there are.
struct Place {
    int rank, group, lane, row, down, across;
};

// Group 0 before group 1, and again.
__device__ __forceinline__ void take_turn(int group) {
    if constexpr (TILED) asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory");
}
__device__ __forceinline__ void give_turn(int group) {
    if constexpr (TILED) asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory");
}

// ---- tensor cores ------------------------------------------------------------------------------------------

// sum += t times the scales of two rows and, of pieces, of each column.
__device__ __forceinline__ void add(float* sum, const float (&t)[HELD], float top, float low, const float* columns) {
#pragma unroll
    for (int j = 0; j < HELD; j += 4) {
        const float2 c = TILED ? make_float2(1.f, 1.f) : *reinterpret_cast<const float2*>(columns + 2 * j);
        sum[j] = fmaf(t[j], TILED ? top : top * c.x, sum[j]);
        sum[j + 1] = fmaf(t[j + 1], TILED ? top : top * c.y, sum[j + 1]);
        sum[j + 2] = fmaf(t[j + 2], TILED ? low : low * c.x, sum[j + 2]);
        sum[j + 3] = fmaf(t[j + 3], TILED ? low : low * c.y, sum[j + 3]);
    }
}

// ---- results -----------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 pair(float x, float y) {
    u32 v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(y), "f"(x));
    return v;
}

// A row's columns: 16 bytes a lane.
__device__ __forceinline__ void store(bf16* row, const float* sum, int col, int n, int lane) {
#pragma unroll
    for (int j = 0; j < BN / 8; j += 4) {
        u32 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = pair(sum[4 * (j + i)], sum[4 * (j + i) + 1]);
        turn(v, lane);
        const int c = col + 8 * (j + (lane & 3));
        if (c < n && row) *reinterpret_cast<uint4*>(row + c) = make_uint4(v[0], v[1], v[2], v[3]);
    }
}

__device__ __forceinline__ void store(float* row, const float* sum, int col, int n, int lane) {
#pragma unroll
    for (int j = 0; j < BN / 8; ++j) {
        const int c = col + 8 * j + 2 * (lane & 3);
        if (c < n && row) {
            float2* at = reinterpret_cast<float2*>(row + c);
            const float2 old = ACCUMULATE ? *at : make_float2(0.f, 0.f);
            *at = make_float2(old.x + sum[4 * j], old.y + sum[4 * j + 1]);
        }
    }
}

// ---- the parts of a block ----------------------------------------------------------------------------------

// Tiles in the order in which clusters take them: GROUP below one another, then to the right.
__device__ __forceinline__ Tile tile_of(int number, const Place& at) {
    const int first = number / (GROUP * at.across) * GROUP, height = min(GROUP, at.down - first);
    const int inside = number - first * at.across;
    return {((first + inside % height) * CLUSTER + at.rank) * BM, inside / height * BN};
}

__device__ __forceinline__ void produce(const Arguments& args, Shared& shared, const Place& at) {
    const int blocks = (args.k + BK - 1) / BK;
    int stage = 0;
    u32 parity = 1;
    for (int number = blockIdx.x / CLUSTER; number < at.down * at.across; number += gridDim.x / CLUSTER) {
        const Tile tile = tile_of(number, at);
        const u32 rows = 4 * max(0, min(BM, args.m - tile.m)), cols = TILED ? 0 : 4 * min(BN, args.n - tile.n);
        for (int i = 0; i < blocks; ++i) {
            u64& full = shared.full[stage];
            wait(shared.empty[stage], parity);
            expect(full, (BM + BN) * BK + rows + cols);
            load_tile(shared.a[stage], args.a, i * BK, tile.m, full);
            const int half = at.rank * (BN / CLUSTER);
            load_for_both(shared.b[stage] + half * BK, args.b, i * BK, tile.n + half, full);
            if (rows) load_floats(shared.a_scale[stage], args.a_scale + i64(i) * args.m + tile.m, rows, full);
            if (cols) load_floats(shared.b_scale[stage], args.b_scale + i64(i) * args.n + tile.n, cols, full);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
}

__device__ __forceinline__ void consume(const Arguments& args, Shared& shared, const Place& at) {
    const int lane = at.lane, group = at.group, blocks = (args.k + BK - 1) / BK, wide = (blocks + 3) / 4 * 4;
    int stage = 0;
    u32 parity = 0;
    float t[2][HELD];
#pragma unroll
    for (int i = 0; i < 2 * HELD; ++i) t[i / HELD][i % HELD] = 0.f;
    if (group == 1) give_turn(1);
    for (int number = blockIdx.x / CLUSTER; number < at.down * at.across; number += gridDim.x / CLUSTER) {
        const Tile tile = tile_of(number, at);
        const float* tiles[2] = {args.b_scale + i64(tile.n / 128) * wide,
                                 args.b_scale + i64(min(tile.n / 128 + 1, (args.n - 1) / 128)) * wide};
        float next[2] = {TILED ? __ldg(tiles[0]) : 1.f, TILED ? __ldg(tiles[1]) : 1.f};
        float sum[BN / 2];
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) sum[i] = 0.f;
        for (int i = 0; i < blocks; ++i) {
            const float now[2] = {next[0], next[1]};
            if constexpr (TILED) {  // on their way for a whole round
                next[0] = __ldg(tiles[0] + min(i + 1, blocks - 1));
                next[1] = __ldg(tiles[1] + min(i + 1, blocks - 1));
            }
            wait(shared.full[stage], parity);
            const u64 b = descriptor(shared.b[stage]);
            u32 a[16];
            fetch_rows(a, shared.a[stage] + at.row * BK, lane);
            const float* rows = shared.a_scale[stage] + at.row + lane / 4;
            const float top = rows[0], low = rows[8];
            const float* columns = TILED ? nullptr : shared.b_scale[stage] + 2 * (lane & 3);
            take_turn(group);
            multiply(t[0], a, b);
#pragma unroll
            for (int p = 0; p < PARTS; ++p) {
                if (p + 1 < PARTS) multiply(t[(p + 1) % 2], a, b + (p + 1) * (NI * BK / 16));
                if (p + 2 == PARTS) give_turn(group);
                if (p + 1 < PARTS) {
                    finish<1>(t[p % 2]);
                } else {
                    finish<0>(t[p % 2]);
                    if (TILED && lane < CLUSTER) arrive(shared.empty[stage], lane);
                }
                const float scale = now[p * NI / 128];
                add(sum + p * HELD, t[p % 2], top * scale, low * scale, columns + p * NI);
            }
            if constexpr (!TILED) {  // the columns' scales have been read by now
                __syncwarp();
                if (lane < CLUSTER) arrive(shared.empty[stage], lane);
            }
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        const int row = tile.m + at.row + lane / 4;
        store(row < args.m ? args.out + i64(row) * args.n : nullptr, sum, tile.n, args.n, lane);
        store(row + 8 < args.m ? args.out + i64(row + 8) * args.n : nullptr, sum + 2, tile.n, args.n, lane);
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    block_gemm(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int group = int(threadIdx.x / 128) - 1, warp = threadIdx.x / 32 % 4;
    const Place at = {int(blockIdx.x % CLUSTER), group, int(threadIdx.x % 32), 64 * group + 16 * warp,
                      (args.m + BM * CLUSTER - 1) / (BM * CLUSTER), (args.n + BN - 1) / BN};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            make_barrier(shared.full[i], 1);
            make_barrier(shared.empty[i], 8 * CLUSTER);  // each warp that multiplies, of both blocks
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_sync();
    if (group < 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) produce(args, shared, at);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        consume(args, shared, at);
    }
    cluster_sync();  // the other block may still write to this one's memory
}
