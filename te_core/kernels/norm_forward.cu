// LayerNorm (KIND=LAYER) and RMSNorm (KIND=RMS) forward over the rows of a matrix, to values, to FP8, or to both.
//
//   x [rows, cols] of IN, dense; gamma, beta [cols] of GAMMA        y [rows, cols] of OUT, or null
//   mean, rstd [rows] float32 (mean: LAYER only)                    rowwise [padded(rows), padded(cols)] FP8, or null
//                                                                   columnwise: its transpose (COLUMNWISE=1)
//
// padded() rounds up to 16; the tail is written as zeros. With CAST=1 FP8 is cast from the value rounded to OUT. AMAX
// says what becomes of max |y| (NaN loses): KEEP_NONE; RAISE: *amax is raised to it; PARTIALS: amax[block] (current
// scaling, whose cast is a second pass).
//
// A team of SIZE threads takes a row, TEAMS teams make a block (common/row.cuh), a persistent grid walks blocks of ROWS
// rows. Each thread fetches its ITERS vectors of the next STAGES rows into shared memory with cp.async and holds those
// of the present one in registers, so x is read once and memory is never idle; ITERS=0 reads a long row again instead.
// COLUMNWISE collects the FP8 bytes of ROWS rows in shared memory; a thread then turns 16 rows x 4 columns by byte
// permutes into four 16-byte stores (ROWS = 32: two lanes side by side fill a 32-byte sector). Rows too long for that:
// norm_forward_wide.cu. NORM_FORWARD_MEASURED
//
// options: -default-device
// compile-check: IN=bf16 GAMMA=bf16 OUT=bf16 KIND=LAYER ZERO_CENTERED=0 VEC=8 ITERS=4 SIZE=128 FULL=1 TEAMS=2 STAGES=2 ROWS=2 CAST=0 COLUMNWISE=0 AMAX=KEEP_NONE FORMAT=E4M3
// compile-check: IN=bf16 GAMMA=bf16 OUT=bf16 KIND=LAYER ZERO_CENTERED=0 VEC=8 ITERS=4 SIZE=128 FULL=1 TEAMS=8 STAGES=1 ROWS=32 CAST=1 COLUMNWISE=1 AMAX=RAISE FORMAT=E4M3
// compile-check: IN=bf16 GAMMA=float OUT=fp16 KIND=RMS ZERO_CENTERED=1 VEC=8 ITERS=2 SIZE=32 FULL=0 TEAMS=4 STAGES=2 ROWS=4 CAST=1 COLUMNWISE=0 AMAX=RAISE FORMAT=E5M2
// compile-check: IN=float GAMMA=fp16 OUT=bf16 KIND=LAYER ZERO_CENTERED=1 VEC=1 ITERS=0 SIZE=1024 FULL=0 TEAMS=1 STAGES=1 ROWS=1 CAST=1 COLUMNWISE=0 AMAX=RAISE FORMAT=E4M3
// compile-check: IN=fp16 GAMMA=fp16 OUT=fp16 KIND=RMS ZERO_CENTERED=0 VEC=1 ITERS=1 SIZE=4 FULL=0 TEAMS=32 STAGES=1 ROWS=32 CAST=1 COLUMNWISE=1 AMAX=KEEP_NONE FORMAT=E4M3
// compile-check: IN=float GAMMA=float OUT=float KIND=RMS ZERO_CENTERED=0 VEC=4 ITERS=4 SIZE=64 FULL=1 TEAMS=2 STAGES=2 ROWS=2 CAST=0 COLUMNWISE=0 AMAX=PARTIALS FORMAT=E4M3
#include "common/row.cuh"

enum Kind { RMS = 0, LAYER = 1 };
enum AmaxUse { KEEP_NONE, RAISE, PARTIALS };

constexpr int THREADS = SIZE * TEAMS, STEPS = ROWS / TEAMS;
constexpr bool HELD = ITERS > 0;
static_assert(THREADS % 32 == 0 && ROWS % TEAMS == 0 && (!COLUMNWISE || ROWS == 16 || ROWS == 32), "tiling");
typedef Stage<IN, VEC, HELD ? ITERS : 1, SIZE, FULL, THREADS> RowStage;

struct Operands {
    const IN* x;
    const GAMMA *gamma, *beta;
    OUT* y;
    u8 *rowwise, *columnwise, *tile;  // tile: [ROWS][tile_pitch], shared
    i64 rows, height;
    int cols, pitch, tile_pitch;
    float scale, top;

    // Column `col` of row `r` in the tile. The lower sixteen rows have the halves of each 128 bytes exchanged: the two
    // half warps that read rows r and r + 16 of the same columns then meet different banks.
    __device__ __forceinline__ int in_tile(int r, int col) const { return r * tile_pitch + (col ^ ((r & 16) << 2)); }
};

// Normalizes one row and delivers it; r is its place in the block.
template <class Row> __device__ __forceinline__ void deliver(Operands& o, const Row& row, float2 moment, i64 at, int r, int rank) {
    row.each(rank, o.cols, [&](int col, const auto& v) {
        const Vec<GAMMA, VEC> g = load_vec<VEC>(o.gamma + col);
        Vec<GAMMA, VEC> b;
        if (KIND == LAYER) b = load_vec<VEC>(o.beta + col);
        float f[VEC];
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            const float gain = ZERO_CENTERED ? 1.f + to_float(g[j]) : to_float(g[j]);
            f[j] = normalized<KIND == LAYER>(to_float(v[j]), moment, gain, KIND == LAYER ? to_float(b[j]) : 0.f);
        }
        const Vec<OUT, VEC> out = round_to(f, OUT());
        if (!CAST || o.y != nullptr) store_vec(o.y + at * o.cols + col, out);
        if (AMAX != KEEP_NONE) {
#pragma unroll
            for (int j = 0; j < VEC; ++j) o.top = fmaxf(o.top, fabsf(to_float(out[j])));
        }
        if (CAST) {
            const Vec<u8, VEC> q = quantized<FORMAT>(out, o.scale);
            if (!COLUMNWISE || o.rowwise != nullptr) store_vec(o.rowwise + at * o.pitch + col, q);
            if (COLUMNWISE) store_vec(o.tile + o.in_tile(r, col), q);
        }
    });
}

// Zeros from column `from` to the end of the padded row.
__device__ __forceinline__ void pad_row(Operands& o, int from, i64 at, int r, int rank) {
    for (int col = from + rank; col < o.pitch; col += SIZE) {
        if (!COLUMNWISE || o.rowwise != nullptr) o.rowwise[at * o.pitch + col] = 0;
        if (COLUMNWISE) o.tile[o.in_tile(r, col)] = 0;
    }
}

// The tile, turned: its first row is row `first` of the matrix.
__device__ __forceinline__ void write_columns(const Operands& o, i64 first) {
    constexpr int ACROSS = ROWS == 32 ? 16 : 32;  // lanes side by side, four columns each
    const int lane = threadIdx.x % 32, below = lane / ACROSS * 16;
    if (first + below >= o.height) return;
    for (int col = (threadIdx.x / 32 * ACROSS + lane % ACROSS) * 4; col < o.pitch; col += THREADS / 32 * ACROSS * 4) {
        u32 word[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) word[i] = *reinterpret_cast<const u32*>(o.tile + o.in_tile(below + i, col));
#pragma unroll
        for (int i = 0; i < 16; i += 4) transpose_bytes(word[i], word[i + 1], word[i + 2], word[i + 3]);
        u8* to = o.columnwise + col * o.height + first + below;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            *reinterpret_cast<uint4*>(to + j * o.height) = make_uint4(word[j], word[4 + j], word[8 + j], word[12 + j]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    norm_forward(const IN* __restrict__ x, const GAMMA* __restrict__ gamma, const GAMMA* __restrict__ beta, OUT* y,
                 u8* rowwise, u8* columnwise, float* __restrict__ mean, float* __restrict__ rstd,
                 const float* scale_of_cast, float* scale_inv, float* amax, i64 rows, int cols, float inv_cols,
                 float eps) {
    typedef Team<SIZE, TEAMS> RowTeam;
    extern __shared__ uint4 dynamic[];
    __shared__ float2 scratch[RowTeam::SCRATCH];
    __shared__ float maxima[32];
    RowTeam team(scratch);
    RowStage* stages = reinterpret_cast<RowStage*>(dynamic);

    const int pitch = (cols + 15) & ~15;
    Operands o = {x, gamma, beta, y, rowwise, columnwise, reinterpret_cast<u8*>(stages + (HELD ? STAGES : 0)),
                  rows, CAST ? (rows + 15) & ~i64(15) : rows, cols, pitch, (pitch + 127) & ~127, 1.f, 0.f};
    if (CAST) {
        o.scale = *scale_of_cast;
        if (blockIdx.x == 0 && threadIdx.x == 0) *scale_inv = __fdiv_rn(1.f, o.scale);
    }

    // The n-th row of this team.
    const auto row_at = [&](i64 n) {
        return (blockIdx.x + n / STEPS * gridDim.x) * ROWS + n % STEPS * TEAMS + team.index;
    };
    const auto fetch = [&](RowStage& stage, i64 at) {
        if (HELD && at < rows) stage.fetch(x + at * cols, team.rank, cols);
        commit_copies();
    };
#pragma unroll
    for (int s = 0; s < STAGES; ++s) fetch(stages[s], row_at(s));

    int slot = 0;
    for (i64 n = 0; row_at(n) - team.index < o.height; ++n) {
        const i64 at = row_at(n);
        const int r = int(n % STEPS) * TEAMS + team.index;
        // A team beyond the last row keeps in step with the others, on whatever its registers hold.
        const bool inside = at < rows;
        typename RowOf<IN, VEC, ITERS, SIZE, FULL>::type row;
        if (HELD) {
            wait_copies<STAGES - 1>();
            row.take(stages[slot]);
            fetch(stages[slot], row_at(n + STAGES));
            slot = slot + 1 == STAGES ? 0 : slot + 1;
        } else {
            row.read(x + (inside ? at : 0) * cols, team.rank, cols);
        }
        const float2 moment = moments<KIND == LAYER, VEC>(row, team, cols, inv_cols, eps);
        if (inside) {
            if (team.rank == 0) {
                if (KIND == LAYER) mean[at] = moment.x;
                rstd[at] = moment.y;
            }
            deliver(o, row, moment, at, r, team.rank);
        }
        if (CAST && at < o.height) pad_row(o, inside ? cols : 0, at, r, team.rank);
        if (COLUMNWISE && n % STEPS == STEPS - 1) {
            __syncthreads();
            write_columns(o, at - r);
            __syncthreads();
        }
    }
    if (AMAX != KEEP_NONE) {
        o.top = warp_max(o.top);
        if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = o.top;
        __syncthreads();
        if (threadIdx.x < 32) {
            const float top = warp_max(threadIdx.x < THREADS / 32 ? maxima[threadIdx.x] : 0.f);
            if (threadIdx.x == 0 && AMAX == PARTIALS) amax[blockIdx.x] = top;
            if (threadIdx.x == 0 && AMAX == RAISE) atomic_raise(amax, top);
        }
    }
}
