// Products of groups of rows, each with a matrix of its own (experts), in one launch. Sizes are on the device.
//
// a [T, ..] holds the rows of all groups, group after group; rows offsets[e] to offsets[e + 1] are those of group e.
//   WGRAD=0, B_ROWS=0: out [T, N], the rows of e = a [T, K] b_e^T + bias_e, b_e [N, K]
//   WGRAD=0, B_ROWS=1: out [T, N], the rows of e = a [T, K] b_e, b_e [K, N] (16 bits only)
//   WGRAD=1: out_e [M, N] (+)= a^T b over the rows of e, a [T, M], b [T, N]; of a group without rows zeros. An out_e
//            may be missing
// Rows of a and b are multiples of 16 bytes. Offsets may have any values: they are cut to ascending ones within T.
//
// FP8, by SCALES:
//   ONE: a scale for a group of a (a_scale [groups]) and for each b_e. Of WGRAD both are [groups]
//   TILES: a in 1 x 128 pieces, a_scale [K / 128, T up to 4]; b_e in 128 x 128 tiles, [N / 128, K / 128 up to 4]
//   PIECES (WGRAD): a_scale [C / 128, M], b_scale [C / 128, N]
// Of WGRAD a [M, C] and b [N, C] are transposed copies, in which each group begins at a multiple of 128 columns and is
// followed by zeros up to the next one: C is T + 127 groups down to 128.
// SPLIT: sums over 128 of K are added in float32. Else tensor cores add all of K, in fewer bits. Blocks are split.
//
// As block_gemm.cu: persistent blocks in clusters of two, tiles of 128 x 256, a thread that loads, two groups of 128
// threads that multiply 64 rows each. A step is 128 bytes of K. The two tiles of a cluster stand above one another and
// share b; where a group has an odd number of rows of tiles, its last row's tiles stand side by side and share a; a
// tile that is left is computed twice and stored once. The tile of a number is found by every thread for itself, from
// running sums that the block begins with.
// A matrix whose columns the product contracts lies in shared memory as rows of 128 bytes of K. One whose rows it
// contracts (16 bits: both of WGRAD, b of B_ROWS) lies as 64 rows of K by 64 columns, in boxes side by side; the rows
// of a box that belong to the next group become zero in a and in b, so that no NaN of the next group counts.
//
// -D A_TYPE, B_TYPE=bf16|f16|e4m3|e5m2 (a, b)  SCALES=NONE|ONE|TILES|PIECES  SPLIT=0|1  DTYPE=bf16|fp16 (bias)
//    OUT=bf16|fp16|float  WGRAD=0|1  B_ROWS=0|1  ACCUMULATE=0|1  GROUPS: how many a launch takes
// architecture: sm_90a
// compile-check: A_TYPE=bf16 B_TYPE=bf16 SCALES=NONE SPLIT=0 DTYPE=bf16 OUT=bf16 WGRAD=0 B_ROWS=0 ACCUMULATE=0 GROUPS=16
// compile-check: A_TYPE=f16 B_TYPE=f16 SCALES=NONE SPLIT=0 DTYPE=fp16 OUT=fp16 WGRAD=0 B_ROWS=1 ACCUMULATE=0 GROUPS=192
// compile-check: A_TYPE=bf16 B_TYPE=bf16 SCALES=NONE SPLIT=0 DTYPE=bf16 OUT=float WGRAD=1 B_ROWS=1 ACCUMULATE=1 GROUPS=64
// compile-check: A_TYPE=bf16 B_TYPE=bf16 SCALES=NONE SPLIT=0 DTYPE=bf16 OUT=bf16 WGRAD=1 B_ROWS=1 ACCUMULATE=1 GROUPS=16
// compile-check: A_TYPE=e4m3 B_TYPE=e4m3 SCALES=ONE SPLIT=0 DTYPE=bf16 OUT=bf16 WGRAD=0 B_ROWS=0 ACCUMULATE=0 GROUPS=64
// compile-check: A_TYPE=e5m2 B_TYPE=e4m3 SCALES=ONE SPLIT=1 DTYPE=fp16 OUT=fp16 WGRAD=0 B_ROWS=0 ACCUMULATE=0 GROUPS=192
// compile-check: A_TYPE=e5m2 B_TYPE=e4m3 SCALES=ONE SPLIT=1 DTYPE=bf16 OUT=float WGRAD=1 B_ROWS=0 ACCUMULATE=1 GROUPS=64
// compile-check: A_TYPE=e4m3 B_TYPE=e4m3 SCALES=TILES SPLIT=1 DTYPE=bf16 OUT=bf16 WGRAD=0 B_ROWS=0 ACCUMULATE=0 GROUPS=64
// compile-check: A_TYPE=e4m3 B_TYPE=e4m3 SCALES=PIECES SPLIT=1 DTYPE=bf16 OUT=bf16 WGRAD=1 B_ROWS=0 ACCUMULATE=0 GROUPS=64
#define NONE 0
#define ONE 1
#define TILES 2
#define PIECES 3
#if SCALES != NONE
#include "common/fp8_product.cuh"
#else
#include "common/hopper.cuh"
#endif

constexpr bool FP8 = SCALES != NONE, BLOCKS = SCALES == TILES || SCALES == PIECES, PADDED = FP8 && WGRAD;
constexpr int BM = 128, BN = 256, BK = FP8 ? 128 : 64, STAGES = 4, CLUSTER = 2, THREADS = 384;
constexpr int BOX = 64 * 128;  // bytes of 64 rows of 128 bytes
constexpr int BAND = 16;       // rows of clusters below one another that share b in L2

struct Arguments {
    Map a;
    Map b[WGRAD ? 1 : GROUPS];
    OUT* out[WGRAD ? GROUPS : 1];
    const DTYPE* bias[WGRAD ? 1 : GROUPS];
    const int* offsets;  // of the first group here
#if SCALES != NONE
    const float* a_scale;
    const float* b_scale[WGRAD ? 1 : GROUPS];
    int pitch, before;  // pitch: of a's pieces; before: how many groups stand before the first one here
#endif
    int total, m, n, k, groups;  // total: T; m: of WGRAD alone
};

struct alignas(1024) Shared {
    u8 a[STAGES][BM * 128];
    u8 b[STAGES][BN * 128];
    float a_scale[BLOCKS ? STAGES : 1][BM + 4];
    float b_scale[SCALES == PIECES ? STAGES : 1][BN];
    u64 full[STAGES], empty[STAGES];
    int offsets[GROUPS + 1], first[GROUPS + 1];  // first: the number of a group's first pair of tiles
    int columns[PADDED ? GROUPS + 1 : 1];            // of the transposed copies, where a group begins
};

// Who a thread is: its block's rank in the cluster, its group (-1 loads), the first of its warp's 16 rows in a tile.
struct Place {
    int rank, group, lane, row;
};

enum Share { B, A, NOTHING };

struct Work {
    int e, m, n, end;   // the group; first row (of all) and column of a tile; rows from `end` on are not stored
    int from, to, steps;  // of K
    Share share;        // what both blocks of the cluster read
    bool stored;
};

// ---- tensor cores ------------------------------------------------------------------------------------------

#define KEEP64(t, i) KEEP16(t, i), KEEP16(t, i + 16), KEEP16(t, i + 32), KEEP16(t, i + 48)
#if SCALES != NONE
#define SHAPE "m64n256k32"
#define TURNED ""
#else
#define SHAPE "m64n256k16"
#define TURNED ", %131, %132"
#endif
#define STEP(a, b, adds)  \
    "wgmma.mma_async.sync.aligned." SHAPE ".f32." TEXT(A_TYPE) "." TEXT(B_TYPE)  \
    " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
    "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57," \
    "%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85," \
    "%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110," \
    "%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}, " a ", " b ", " adds  \
    ", 1, 1" TURNED ";\n"

// What a warp has alike is told the compiler, which then keeps descriptors in uniform registers.
template <bool ROWS> __device__ __forceinline__ u64 descriptor(const u8* at) {
    const u32 low = __reduce_min_sync(~0u, (ROWS ? BOX >> 4 : 1) << 16 | (address(at) & 0x3ffff) >> 4);
    return u64(1) << 62 | u64(1024 >> 4) << 32 | low;
}

// sum (+)= 64 rows of a times 256 columns over a step of K: begins.
__device__ __forceinline__ void multiply(float (&s)[128], u64 a, u64 b, int adds) {
    constexpr int A_STEP = (WGRAD && !FP8 ? 16 * 128 : 32) >> 4, B_STEP = (B_ROWS ? 16 * 128 : 32) >> 4;
    asm volatile("{\n.reg .pred first, yes;\n.reg .b64 a1, a2, a3, b1, b2, b3;\nsetp.ne.b32 first, %130, 0;\n"
                 "setp.eq.b32 yes, 0, 0;\n"
                 "add.s64 a1, %128, %133;\nadd.s64 a2, a1, %133;\nadd.s64 a3, a2, %133;\n"
                 "add.s64 b1, %129, %134;\nadd.s64 b2, b1, %134;\nadd.s64 b3, b2, %134;\nwgmma.fence.sync.aligned;\n"
                 STEP("%128", "%129", "first") STEP("a1", "b1", "yes") STEP("a2", "b2", "yes") STEP("a3", "b3", "yes")
                 "wgmma.commit_group.sync.aligned;\n}"
                 : KEEP64(s, 0), KEEP64(s, 64)
                 : "l"(a), "l"(b), "r"(adds), "n"(WGRAD), "n"(B_ROWS), "n"(A_STEP), "n"(B_STEP) : "memory");
}

template <int PENDING> __device__ __forceinline__ void finish(float (&s)[128]) {
    asm volatile("wgmma.wait_group.sync.aligned %128;" : KEEP64(s, 0), KEEP64(s, 64) : "n"(PENDING) : "memory");
}

#if SCALES != NONE
// sum += t, times the scales of two rows and, of pieces, of each column.
__device__ __forceinline__ void add(float* sum, const float (&t)[HELD], float top, float low, const float* columns) {
#pragma unroll
    for (int j = 0; j < HELD; j += 4) {
        const float2 c = SCALES == PIECES ? *reinterpret_cast<const float2*>(columns + 2 * j) : make_float2(1.f, 1.f);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float row = i < 2 ? top : low;
            if (SCALES == ONE) sum[j + i] += t[j + i];
            else sum[j + i] = fmaf(t[j + i], SCALES == PIECES ? row * (i % 2 ? c.y : c.x) : row, sum[j + i]);
        }
    }
}

// Group 0 before group 1, and again, so that with tiles both do not add at once.
__device__ __forceinline__ void take_turn(int group) {
    if constexpr (SCALES == TILES) asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory");
}
__device__ __forceinline__ void give_turn(int group) {
    if constexpr (SCALES == TILES) asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory");
}
#endif

// Of boxes side by side, rows from `keep` on become zero; by `threads` threads, of which this is number t.
__device__ __forceinline__ void blank(u8* boxes, int count, int keep, int t, int threads) {
    const int each = (64 - keep) * 8;
    for (int i = t; i < count * each; i += threads) {
        *reinterpret_cast<uint4*>(boxes + i / each * BOX + keep * 128 + i % each * 16) = make_uint4(0, 0, 0, 0);
    }
}

// ---- results -----------------------------------------------------------------------------------------------

template <class T> __device__ __forceinline__ u32 pair(float x, float y) {
    const T two[2] = {from_float<T>(x), from_float<T>(y)};
    return *reinterpret_cast<const u32*>(two);
}
template <class T> __device__ __forceinline__ float2 apart(u32 v) {
    const T* two = reinterpret_cast<const T*>(&v);
    return make_float2(to_float(two[0]), to_float(two[1]));
}

// A row's columns, times `by`: 16 bytes a lane.
template <class T>
__device__ __forceinline__ void store(T* row, const float* sum, float by, const DTYPE* bias, int col, int n, int lane) {
#pragma unroll
    for (int j = 0; j < BN / 8; j += 4) {
        u32 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int c = col + 8 * (j + i) + 2 * (lane & 3);
            float2 more = bias && c < n ? apart<DTYPE>(__ldg(reinterpret_cast<const u32*>(bias + c)))
                                        : make_float2(0.f, 0.f);
            if (ACCUMULATE && c < n && row) more = apart<T>(*reinterpret_cast<const u32*>(row + c));
            v[i] = pair<T>(fmaf(by, sum[4 * (j + i)], more.x), fmaf(by, sum[4 * (j + i) + 1], more.y));
        }
        turn(v, lane);
        const int c = col + 8 * (j + (lane & 3));
        if (c < n && row) *reinterpret_cast<uint4*>(row + c) = make_uint4(v[0], v[1], v[2], v[3]);
    }
}

// Of two lanes side by side one takes four columns of eight, the other those of the next eight.
__device__ __forceinline__ void store(float* row, const float* sum, float by, const DTYPE*, int col, int n, int lane) {
    const bool odd = lane & 1;
#pragma unroll
    for (int j = 0; j < BN / 8; j += 2) {
        const float* x = sum + 4 * j;
        const float* y = x + 4;
        const float gx = __shfl_xor_sync(~0u, odd ? x[0] : y[0], 1), gy = __shfl_xor_sync(~0u, odd ? x[1] : y[1], 1);
        const float4 w = odd ? make_float4(gx, gy, y[0], y[1]) : make_float4(x[0], x[1], gx, gy);
        const float4 v = make_float4(by * w.x, by * w.y, by * w.z, by * w.w);
        const int c = col + 8 * (j + odd) + 2 * (lane & 2);
        if (c >= n || !row) continue;
        if (ACCUMULATE) {  // nothing waits for what was there; one addition an element: the same bits every time
            asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                         ::"l"(row + c), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
        } else {
            *reinterpret_cast<float4*>(row + c) = v;
        }
    }
}

// ---- who does what -----------------------------------------------------------------------------------------

// Pairs of tiles: two rows of tiles at a time, of an odd last row two columns at a time.
__device__ __forceinline__ int pairs_of(int rows, int across) {
    const int down = (rows + BM - 1) / BM;
    return (down >> 1) * across + (down & 1) * ((across + 1) >> 1);
}

// One warp.
__device__ __forceinline__ void number_groups(const Arguments& args, Shared& shared) {
    const int across = (args.n + BN - 1) / BN, lane = threadIdx.x;
    int before = 0, reached = 0, columns = 0;
#if SCALES != NONE
    if (PADDED) {
        for (int e0 = -args.before; e0 < 0; e0 += 32) {
            const int e = e0 + lane;
            const int rows = e < 0 ? max(args.offsets[min(e + 1, 0)] - args.offsets[e], 0) : 0;
            columns += __reduce_add_sync(~0u, (rows + 127) & ~127);
        }
    }
#endif
    for (int e0 = 0; e0 <= args.groups; e0 += 32) {
        const int e = e0 + lane;
        int start = min(max(e <= args.groups ? args.offsets[e] : 0, reached), args.total);
#pragma unroll
        for (int o = 1; o < 32; o <<= 1) {
            const int x = __shfl_up_sync(~0u, start, o);
            if (lane >= o) start = max(start, x);
        }
        if (e <= args.groups) shared.offsets[e] = start;
        reached = __shfl_sync(~0u, start, 31);
    }
    __syncwarp();
    for (int e0 = 0; e0 < args.groups; e0 += 32) {
        const int e = e0 + lane;
        const bool nothing = e >= args.groups || (WGRAD && !args.out[WGRAD ? e : 0]);
        const int rows = nothing ? 0 : WGRAD ? args.m : shared.offsets[e + 1] - shared.offsets[e];
        int sum = pairs_of(rows, across);
        const int wide = e < args.groups ? (shared.offsets[e + 1] - shared.offsets[e] + 127) & ~127 : 0;
        int end = wide;
        const int own = sum;
#pragma unroll
        for (int o = 1; o < 32; o <<= 1) {
            const int x = __shfl_up_sync(~0u, sum, o), y = PADDED ? __shfl_up_sync(~0u, end, o) : 0;
            if (lane >= o) sum += x, end += y;
        }
        if (e < args.groups) shared.first[e] = before + sum - own, shared.first[e + 1] = before + sum;
        before += __shfl_sync(~0u, sum, 31);
        if (PADDED) {
            if (e < args.groups) shared.columns[e] = columns + end - wide;
            columns += __shfl_sync(~0u, end, 31);
        }
    }
}

// The tile of a pair's number, in group w.e or a later one; false: there is none.
__device__ __forceinline__ bool find(const Arguments& args, const Shared& shared, int number, int rank, Work& w) {
    while (w.e < args.groups && number >= shared.first[w.e + 1]) ++w.e;
    if (w.e >= args.groups) return false;
    const int across = (args.n + BN - 1) / BN, from = shared.offsets[w.e], to = shared.offsets[w.e + 1];
    int p = number - shared.first[w.e];
    const int band = p / (BAND * across);
    p -= band * BAND * across;
    const int down = min(((WGRAD ? args.m : to - from) + BM - 1) / BM - 2 * BAND * band, 2 * BAND);
    const int full = down >> 1;
    int m, n;
    w.stored = true, w.share = B;
    if (!(down & 1)) {
        m = 2 * (p % full) + rank, n = p / full;
    } else {  // two columns at a time, so that the last row has them too
        const int unit = 2 * full + 1, two = p / unit, inside = p - two * unit;
        const bool both = 2 * two + 1 < across;
        if (inside < (both ? 2 * full : full)) {
            const bool second = inside >= full;
            m = 2 * (second ? inside - full : inside) + rank, n = 2 * two + second;
        } else {
            m = down - 1, n = 2 * two + (both ? rank : 0), w.share = both ? A : NOTHING, w.stored = both || rank == 0;
        }
    }
    w.m = (m + 2 * BAND * band) * BM + (WGRAD ? 0 : from), w.n = n * BN;
    w.end = WGRAD ? args.m : to, w.from = WGRAD ? from : 0, w.to = WGRAD ? to : args.k;
    if (PADDED) w.from = shared.columns[w.e], w.to = w.from + to - from;
    w.steps = (w.to - w.from + BK - 1) / BK;
    return true;
}

// Box i of a tile of a matrix, whose first row or column is `at`: 64 rows by 128 bytes of K, or 64 of K by 64 columns.
template <bool ROWS>
__device__ __forceinline__ void load_box(u8* to, const Map& map, int at, int k, int i, bool both, u64& full) {
    const int x = (FP8 ? 1 : 2) * (ROWS ? at + 64 * i : k), y = ROWS ? k : at + 64 * i;
    if (both) {
        load_for_both(to + i * BOX, map, x, y, full);
    } else {
        load_tile(to + i * BOX, map, x, y, full);
    }
}

__device__ __forceinline__ void produce(const Arguments& args, Shared& shared, const Place& at) {
    int stage = 0;
    u32 parity = 1;
    Work w = {};
    for (int number = blockIdx.x / CLUSTER; find(args, shared, number, at.rank, w); number += gridDim.x / CLUSTER) {
        const Map& b = args.b[WGRAD ? 0 : w.e];
#if SCALES != NONE
        // A row of pieces is copied from a multiple of 16 bytes on.
        const int left = SCALES == TILES ? w.m & ~3 : w.m, width = SCALES == TILES ? args.pitch : args.m;
        const u32 rows = BLOCKS ? 4 * min(SCALES == TILES ? BM + 4 : BM, width - left) : 0;
        const u32 cols = SCALES == PIECES ? 4 * min(BN, args.n - w.n) : 0;
#else
        constexpr u32 rows = 0, cols = 0;
#endif
        for (int step = 0; step < w.steps; ++step) {
            u64& full = shared.full[stage];
            wait(shared.empty[stage], parity);
            expect(full, (BM + BN) * 128 + rows + cols);
            const int k = w.from + step * BK;
            for (int i = 0; i < BM / 64; ++i) {
                if (w.share != A || i == at.rank) load_box<WGRAD && !FP8>(shared.a[stage], args.a, w.m, k, i, w.share == A, full);
            }
            for (int i = 0; i < BN / 64; ++i) {
                if (w.share != B || i / 2 == at.rank) load_box<B_ROWS>(shared.b[stage], b, w.n, k, i, w.share == B, full);
            }
#if SCALES != NONE
            const i64 at_k = k / BK;
            float *a_scale = shared.a_scale[BLOCKS ? stage : 0], *b_scale = shared.b_scale[SCALES == PIECES ? stage : 0];
            if (rows) load_floats(a_scale, args.a_scale + at_k * width + left, rows, full);
            if (cols) load_floats(b_scale, args.b_scale[0] + at_k * args.n + w.n, cols, full);
#endif
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
}

// The place of shared memory that comes next, and the parity of its barriers.
struct Turn {
    int stage;
    u32 parity;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

#if SCALES != NONE && SPLIT
// sum = the tile's product; sums over 128 of K are formed in t and added.
__device__ __forceinline__ void sum_up(const Arguments& args, Shared& shared, const Place& at, const Work& w, Turn& turn,
                                       float (&t)[2][HELD], float (&sum)[BN / 2]) {
    const int lane = at.lane, wide = (w.steps + 3) & ~3, last = (args.n - 1) / 128;
    const float *left = args.b_scale[WGRAD ? 0 : w.e], *right = left;
    if (SCALES == TILES) left += i64(w.n / 128) * wide, right += i64(min(w.n / 128 + 1, last)) * wide;
    float next[2] = {SCALES == TILES ? __ldg(left) : 1.f, SCALES == TILES ? __ldg(right) : 1.f};
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) sum[i] = 0.f;
    for (int i = 0; i < w.steps; ++i, turn.next()) {
        const int stage = turn.stage;
        const float now[2] = {next[0], next[1]};
        if (SCALES == TILES) {  // on their way for a whole round
            next[0] = __ldg(left + min(i + 1, w.steps - 1));
            next[1] = __ldg(right + min(i + 1, w.steps - 1));
        }
        wait(shared.full[stage], turn.parity);
        const u64 b = descriptor<false>(shared.b[stage]);
        u32 a[16];
        fetch_rows(a, shared.a[stage] + at.row * 128, lane);
        float top = 1.f, low = 1.f;
        if (BLOCKS) {
            const float* rows = shared.a_scale[stage] + at.row + lane / 4 + (SCALES == TILES ? w.m & 3 : 0);
            top = rows[0], low = rows[8];
        }
        const float* columns = shared.b_scale[SCALES == PIECES ? stage : 0] + 2 * (lane & 3);
        take_turn(at.group);
        multiply(t[0], a, b);
#pragma unroll
        for (int p = 0; p < BN / NI; ++p) {
            constexpr int LAST = BN / NI - 1;
            if (p < LAST) multiply(t[(p + 1) % 2], a, b + (p + 1) * (NI * 128 / 16));
            if (p == LAST - 1) give_turn(at.group);
            if (p < LAST) {
                finish<1>(t[p % 2]);
            } else {
                finish<0>(t[p % 2]);
                if (SCALES != PIECES && lane < CLUSTER) arrive(shared.empty[stage], lane);
            }
            const float tile = now[p * NI / 128];
            add(sum + p * HELD, t[p % 2], top * tile, low * tile, columns + p * NI);
        }
        if (SCALES == PIECES) {  // the columns' scales have been read by now
            __syncwarp();
            if (lane < CLUSTER) arrive(shared.empty[stage], lane);
        }
    }
}
#else
// sum = the tile's product, all of K by the tensor cores.
__device__ __forceinline__ void sum_up(Shared& shared, const Place& at, const Work& w, Turn& turn,
                                       float (&sum)[BN / 2]) {
    if (w.steps == 0) {
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) sum[i] = 0.f;
    }
    for (int i = 0; i < w.steps; ++i, turn.next()) {
        wait(shared.full[turn.stage], turn.parity);
        u8 *a = shared.a[turn.stage] + at.group * BOX, *b = shared.b[turn.stage];
        const int keep = w.to - w.from - i * BK;
        if (WGRAD && !FP8 && keep < BK) {
            blank(a, 1, keep, threadIdx.x % 128, 128);
            blank(b + 2 * at.group * BOX, 2, keep, threadIdx.x % 128, 128);
            asm volatile("fence.proxy.async.shared::cta;\nbar.sync 1, 256;" ::: "memory");
        }
        multiply(sum, descriptor<WGRAD && !FP8>(a), descriptor<B_ROWS>(b), i);
        finish<1>(sum);
        if (i && at.lane < CLUSTER) arrive(shared.empty[(turn.stage + STAGES - 1) % STAGES], at.lane);
    }
    finish<0>(sum);
    if (w.steps && at.lane < CLUSTER) arrive(shared.empty[(turn.stage + STAGES - 1) % STAGES], at.lane);
}
#endif

__device__ __forceinline__ void consume(const Arguments& args, Shared& shared, const Place& at) {
    Turn turn = {0, 0};
    Work w = {};
    float sum[BN / 2];
#if SCALES != NONE && SPLIT
    float t[2][HELD];
#pragma unroll
    for (int i = 0; i < 2 * HELD; ++i) t[i / HELD][i % HELD] = 0.f;
    if (at.group == 1) give_turn(1);
#endif
    for (int number = blockIdx.x / CLUSTER; find(args, shared, number, at.rank, w); number += gridDim.x / CLUSTER) {
        float by = 1.f;
#if SCALES == ONE
        if (w.steps) by = args.a_scale[w.e] * (WGRAD ? args.b_scale[0][w.e] : *args.b_scale[WGRAD ? 0 : w.e]);
#endif
#if SCALES != NONE && SPLIT
        sum_up(args, shared, at, w, turn, t, sum);
#else
        sum_up(shared, at, w, turn, sum);
#endif
        if (!w.stored || (ACCUMULATE && w.steps == 0)) continue;
        const int row = w.m + at.row + at.lane / 4;
        OUT* out = args.out[WGRAD ? w.e : 0] + i64(row) * args.n;
        const DTYPE* bias = WGRAD ? nullptr : args.bias[w.e];
        store(row < w.end ? out : nullptr, sum, by, bias, w.n, args.n, at.lane);
        store(row + 8 < w.end ? out + 8 * i64(args.n) : nullptr, sum + 2, by, bias, w.n, args.n, at.lane);
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    grouped_gemm(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int group = int(threadIdx.x / 128) - 1, warp = threadIdx.x / 32 % 4;
    const Place at = {int(blockIdx.x % CLUSTER), group, int(threadIdx.x % 32), 64 * group + 16 * warp};
    if (threadIdx.x == 32) {
        for (int i = 0; i < STAGES; ++i) {
            make_barrier(shared.full[i], 1);
            make_barrier(shared.empty[i], 8 * CLUSTER);  // each warp that multiplies, of both blocks
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (threadIdx.x < 32) number_groups(args, shared);
    __syncthreads();
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
