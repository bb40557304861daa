// LayerNorm (KIND=LAYER) and RMSNorm (KIND=RMS) forward over the rows of a matrix, to values, to FP8, or to both.
//
//   x [rows, cols] of IN, dense; gamma, beta [cols] of GAMMA        y [rows, cols] of OUT, or null
//   mean, rstd [rows] float32 (mean: LAYER only)                    rowwise [padded(rows), padded(cols)] FP8, or null
//                                                                   columnwise: its transpose (COLUMNWISE=1)
//
// RESIDUAL=1: what is normed is not x but sum [rows, cols] of IN, written on the way: residual + dropout(x + bias),
// rounded to IN, as elementwise.cu forms it. BIAS and DROPOUT say whether there are such.
// H200, 2026-11-21, RMSNorm 8192 x 4096 bf16 (benchmarks/attention_kernels.py): 93 % of the speed of a copy, with
// dropout 86 %.
//
// y is written only with VALUES=1, FP8 only with CAST=1, cast from the value rounded to OUT. With neither the kernel
// writes the moments alone, for norm_block.cu. padded() rounds up to 16; the tail is written as zeros. AMAX says what
// becomes of max |y| (NaN loses): KEEP_NONE; RAISE: *amax is raised to it; PARTIALS: amax[block] (current scaling, whose
// cast is a second pass).
//
// A team of SIZE threads takes a row, TEAMS teams make a block (common/row.cuh), the grid walks blocks of ROWS rows. A
// thread holds its ITERS vectors of a row in registers, so x is read once. STAGES > 0: it fetches the next STAGES rows
// into shared memory with cp.async meanwhile. ITERS=0 reads a long row again instead.
// COLUMNWISE: when a block has written the FP8 bytes of its ROWS = 32 rows (into its part of `rowwise`, or with
// ROWWISE=0 into a scratch of its own, [gridDim.x, ROWS, padded(cols)], at `rowwise`), it reads them back from L2 and a
// thread turns 16 rows x 4 columns by byte permutes into four 16-byte stores; two lanes fill a 32-byte sector.
// H200, 2026-11-21, 8192 x 4096 bf16 (benchmarks/norms.py; of the speed of a copy, 4.23 TB/s): LayerNorm 35.6 us, 89 %;
// RMSNorm 34.3 us, 92 %; float32 91 %. LayerNorm to FP8, scale given: row-wise 35.7 us, 67 %; both orientations
// 48.8 us, 65 %.
//
// options: -default-device
// compile-check: IN=bf16 GAMMA=bf16 OUT=bf16 KIND=LAYER ZERO_CENTERED=0 VEC=8 ITERS=4 SIZE=128 FULL=1 TEAMS=2 STAGES=0 ROWS=2 VALUES=1 CAST=0 ROWWISE=0 COLUMNWISE=0 AMAX=KEEP_NONE FORMAT=E4M3 MIN_BLOCKS=4 RESIDUAL=0 BIAS=0 DROPOUT=0
// compile-check: IN=bf16 GAMMA=bf16 OUT=bf16 KIND=LAYER ZERO_CENTERED=0 VEC=8 ITERS=4 SIZE=128 FULL=1 TEAMS=4 STAGES=1 ROWS=32 VALUES=0 CAST=1 ROWWISE=1 COLUMNWISE=1 AMAX=RAISE FORMAT=E4M3 MIN_BLOCKS=1 RESIDUAL=0 BIAS=0 DROPOUT=0
// compile-check: IN=bf16 GAMMA=float OUT=fp16 KIND=RMS ZERO_CENTERED=1 VEC=8 ITERS=2 SIZE=32 FULL=0 TEAMS=4 STAGES=2 ROWS=4 VALUES=0 CAST=1 ROWWISE=1 COLUMNWISE=0 AMAX=RAISE FORMAT=E5M2 MIN_BLOCKS=1 RESIDUAL=0 BIAS=0 DROPOUT=0
// compile-check: IN=float GAMMA=fp16 OUT=bf16 KIND=LAYER ZERO_CENTERED=1 VEC=1 ITERS=0 SIZE=1024 FULL=0 TEAMS=1 STAGES=0 ROWS=32 VALUES=0 CAST=1 ROWWISE=0 COLUMNWISE=1 AMAX=RAISE FORMAT=E4M3 MIN_BLOCKS=1 RESIDUAL=0 BIAS=0 DROPOUT=0
// compile-check: IN=fp16 GAMMA=fp16 OUT=fp16 KIND=RMS ZERO_CENTERED=0 VEC=1 ITERS=1 SIZE=4 FULL=0 TEAMS=32 STAGES=1 ROWS=32 VALUES=0 CAST=1 ROWWISE=1 COLUMNWISE=1 AMAX=KEEP_NONE FORMAT=E4M3 MIN_BLOCKS=1 RESIDUAL=0 BIAS=0 DROPOUT=0
// compile-check: IN=float GAMMA=float OUT=float KIND=RMS ZERO_CENTERED=0 VEC=4 ITERS=4 SIZE=64 FULL=1 TEAMS=2 STAGES=2 ROWS=2 VALUES=1 CAST=0 ROWWISE=0 COLUMNWISE=0 AMAX=PARTIALS FORMAT=E4M3 MIN_BLOCKS=1 RESIDUAL=0 BIAS=0 DROPOUT=0
// compile-check: IN=bf16 GAMMA=bf16 OUT=bf16 KIND=LAYER ZERO_CENTERED=0 VEC=8 ITERS=4 SIZE=128 FULL=1 TEAMS=2 STAGES=0 ROWS=2 VALUES=1 CAST=0 ROWWISE=0 COLUMNWISE=0 AMAX=KEEP_NONE FORMAT=E4M3 MIN_BLOCKS=4 RESIDUAL=1 BIAS=1 DROPOUT=1
// compile-check: IN=bf16 GAMMA=bf16 OUT=bf16 KIND=LAYER ZERO_CENTERED=0 VEC=8 ITERS=4 SIZE=128 FULL=1 TEAMS=4 STAGES=1 ROWS=32 VALUES=0 CAST=1 ROWWISE=1 COLUMNWISE=1 AMAX=RAISE FORMAT=E4M3 MIN_BLOCKS=1 RESIDUAL=1 BIAS=1 DROPOUT=0
// compile-check: IN=float GAMMA=fp16 OUT=bf16 KIND=LAYER ZERO_CENTERED=1 VEC=1 ITERS=0 SIZE=1024 FULL=0 TEAMS=1 STAGES=0 ROWS=32 VALUES=0 CAST=1 ROWWISE=0 COLUMNWISE=1 AMAX=RAISE FORMAT=E4M3 MIN_BLOCKS=1 RESIDUAL=1 BIAS=0 DROPOUT=1
// compile-check: IN=fp16 GAMMA=fp16 OUT=fp16 KIND=RMS ZERO_CENTERED=0 VEC=1 ITERS=1 SIZE=4 FULL=0 TEAMS=32 STAGES=1 ROWS=32 VALUES=0 CAST=1 ROWWISE=1 COLUMNWISE=1 AMAX=KEEP_NONE FORMAT=E4M3 MIN_BLOCKS=1 RESIDUAL=1 BIAS=1 DROPOUT=1
// compile-check: IN=float GAMMA=float OUT=float KIND=RMS ZERO_CENTERED=0 VEC=4 ITERS=4 SIZE=64 FULL=1 TEAMS=2 STAGES=2 ROWS=2 VALUES=1 CAST=0 ROWWISE=0 COLUMNWISE=0 AMAX=PARTIALS FORMAT=E4M3 MIN_BLOCKS=1 RESIDUAL=1 BIAS=0 DROPOUT=0
// compile-check: IN=bf16 GAMMA=bf16 OUT=bf16 KIND=RMS ZERO_CENTERED=0 VEC=8 ITERS=4 SIZE=64 FULL=1 TEAMS=4 STAGES=2 ROWS=4 VALUES=0 CAST=0 ROWWISE=0 COLUMNWISE=0 AMAX=KEEP_NONE FORMAT=E4M3 MIN_BLOCKS=4 RESIDUAL=1 BIAS=0 DROPOUT=0
#include "common/dropout.cuh"
#include "common/row.cuh"

enum Kind { RMS = 0, LAYER = 1 };
enum AmaxUse { KEEP_NONE, RAISE, PARTIALS };

constexpr int THREADS = SIZE * TEAMS, STEPS = ROWS / TEAMS;
constexpr bool AHEAD = ITERS > 0 && STAGES > 0;
static_assert(THREADS % 32 == 0 && ROWS % TEAMS == 0 && (!COLUMNWISE || ROWS == 32), "tiling");
struct RowStage {
    Stage<IN, VEC, AHEAD ? ITERS : 1, SIZE, FULL, AHEAD ? THREADS : 1> of[1 + RESIDUAL];  // x, residual
};

struct Operands {
    const GAMMA *gamma, *beta;
    OUT* y;
    int cols, pitch;
    float scale;
    Top<OUT> top;
};

// A sum too long to hold: each thread reads back what it has written itself, so not through the read-only cache.
struct WrittenRow {
    const IN* p;
    template <class F> __device__ __forceinline__ void each(int rank, int cols, F f) const {
#pragma unroll 4
        for (int col = rank * VEC; col < cols; col += SIZE * VEC) {
            typedef Pieces<IN, VEC> P;
            typedef typename Bits<P::PIECE>::type W;
            Vec<IN, VEC> v;
#pragma unroll
            for (int i = 0; i < P::COUNT; ++i) {
                reinterpret_cast<W*>(&v)[i] = reinterpret_cast<const W*>(p + col)[i];
            }
            f(col, v);
        }
    }
};

// What becomes part of the row before it is normed; all null with RESIDUAL=0.
struct Branch {
    const IN *residual, *bias;
    IN* sum;
    Philox philox;
    u32 threshold;
    float factor;

    // The sum of one vector, which is element `at` of the matrix; written if the row is the team's own.
    __device__ __forceinline__ Vec<IN, VEC> add(const Vec<IN, VEC>& x, const Vec<IN, VEC>& other, i64 at, int col,
                                                bool inside) const {
        float f[VEC], r[VEC], b[VEC] = {}, keep[VEC] = {};
        to_floats(x, f);
        to_floats(other, r);
        if (BIAS) to_floats(load_vec<VEC>(bias + col), b);
        if (DROPOUT) draw_keep(philox, at, threshold, factor, keep);
#pragma unroll
        for (int j = 0; j < VEC; ++j) f[j] = residual_sum<DROPOUT>(f[j], b[j], keep[j], r[j]);
        const Vec<IN, VEC> rounded = round_to(f, IN());
        if (inside) store_vec(sum + at, rounded);
        return rounded;
    }

    // Row `at` of the sum, from its parts in registers or in memory.
    template <int Iters, bool Full> using Held = HeldRow<IN, VEC, Iters, SIZE, Full>;
    template <int Iters, bool Full>
    __device__ __forceinline__ Held<Iters, Full> row(const Held<Iters, Full>& x, const Held<Iters, Full>& other, i64 at,
                                                     int rank, int cols, bool inside) const {
        Held<Iters, Full> all;
#pragma unroll
        for (int i = 0; i < Iters; ++i) {
            const int col = x.column(i, rank);
            if (x.owns(col, cols)) all.v[i] = add(x.v[i], other.v[i], at * cols + col, col, inside);
        }
        return all;
    }
    typedef StreamedRow<IN, VEC, SIZE> Streamed;
    __device__ __forceinline__ WrittenRow row(const Streamed& x, const Streamed& other, i64 at, int rank, int cols,
                                              bool inside) const {
        for (int col = rank * VEC; inside && col < cols; col += SIZE * VEC) {
            add(load_once<VEC>(x.p + col), load_once<VEC>(other.p + col), at * cols + col, col, inside);
        }
        return {inside ? sum + at * cols : residual};
    }
};

// Normalizes one row and delivers it: to row `at` of y, and to `bytes`.
template <class Row>
__device__ __forceinline__ void deliver(Operands& o, const Row& row, float2 moment, i64 at, u8* bytes, int rank) {
    row.each(rank, o.cols, [&](int col, const auto& v) {
        const Vec<GAMMA, VEC> g = load_vec<VEC>(o.gamma + col);
        Vec<GAMMA, VEC> b;
        if (KIND == LAYER) b = load_vec<VEC>(o.beta + col);
        float f[VEC], gain[VEC], shift[VEC] = {};
        to_floats(v, f);
        to_floats(g, gain);
        if (KIND == LAYER) to_floats(b, shift);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            if (ZERO_CENTERED) gain[j] += 1.f;
            f[j] = normalized<KIND == LAYER>(f[j], moment, gain[j], shift[j]);
        }
        const Vec<OUT, VEC> out = round_to(f, OUT());
        if (VALUES) store_vec(o.y + at * o.cols + col, out);
        if (AMAX != KEEP_NONE) o.top.raise(out);
        if (CAST) store_vec(bytes + col, quantized<FORMAT>(out, o.scale));
    });
}

// The transposed copy of 32 rows of FP8 that this block has just written; they become columns first ... first + 31.
__device__ __forceinline__ void write_columns(const u8* bytes, int pitch, u8* columnwise, i64 first, i64 height) {
    const int lane = threadIdx.x % 32, below = lane / 16 * 16;
    if (first + below >= height) return;
    for (int col = (threadIdx.x / 32 * 16 + lane % 16) * 4; col < pitch; col += THREADS / 32 * 64) {
        const u8* from = bytes + i64(below) * pitch + col;
        u32 word[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) word[i] = __ldcg(reinterpret_cast<const u32*>(from + i * pitch));
#pragma unroll
        for (int i = 0; i < 16; i += 4) transpose_4x4(word[i], word[i + 1], word[i + 2], word[i + 3]);
        u8* to = columnwise + col * height + first + below;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            *reinterpret_cast<uint4*>(to + j * height) = make_uint4(word[j], word[4 + j], word[8 + j], word[12 + j]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    norm_forward(const IN* __restrict__ x, const GAMMA* __restrict__ gamma, const GAMMA* __restrict__ beta, OUT* y,
                 u8* rowwise, u8* columnwise, float* __restrict__ mean, float* __restrict__ rstd,
                 const float* scale_of_cast, float* scale_inv, float* amax, i64 rows, int cols, float inv_cols,
                 float eps
#if RESIDUAL
                 ,
                 const IN* __restrict__ residual, const IN* __restrict__ bias, IN* sum, const i64* __restrict__ rng,
                 int site, int threshold, float factor
#endif
    ) {
    typedef Team<SIZE, TEAMS> RowTeam;
    extern __shared__ uint4 dynamic[];
    __shared__ float2 scratch[RowTeam::SCRATCH];
    __shared__ float maxima[32];
    RowTeam team(scratch);
    RowStage* stages = reinterpret_cast<RowStage*>(dynamic);
#if RESIDUAL
    const Branch branch = {residual, bias, sum, Philox(DROPOUT ? rng : nullptr, site), u32(threshold), factor};
#endif
    Operands o = {gamma, beta, y, cols, (cols + 15) & ~15, 1.f};
    const i64 height = CAST ? (rows + 15) & ~i64(15) : rows;
    if (CAST) {
        o.scale = *scale_of_cast;
        if (blockIdx.x == 0 && threadIdx.x == 0) *scale_inv = __fdiv_rn(1.f, o.scale);
    }

    // The rows of this block, and of this team the n-th.
    const auto first_of = [&](i64 n) { return (blockIdx.x + n / STEPS * gridDim.x) * ROWS; };
    const auto row_at = [&](i64 n) { return first_of(n) + n % STEPS * TEAMS + team.index; };
    const auto fetch = [&](RowStage& stage, i64 at) {
        if (at < rows) {
            stage.of[0].fetch(x + at * cols, team.rank, cols);
#if RESIDUAL
            stage.of[1].fetch(residual + at * cols, team.rank, cols);
#endif
        }
        commit_copies();
    };
    if (AHEAD) {
#pragma unroll
        for (int s = 0; s < STAGES; ++s) fetch(stages[s], row_at(s));
    }

    int slot = 0;
    for (i64 n = 0; first_of(n) < height; ++n) {
        const i64 first = first_of(n), at = row_at(n);
        // A team beyond the last row keeps in step with the others, on some row or other.
        const bool inside = at < rows;
        typedef typename RowOf<IN, VEC, ITERS, SIZE, FULL>::type Row;
        Row row, other;
        if (AHEAD) {
            wait_copies<AHEAD ? STAGES - 1 : 0>();
            row.take(stages[slot].of[0]);
            if (RESIDUAL) other.take(stages[slot].of[RESIDUAL]);
            fetch(stages[slot], row_at(n + STAGES));
            slot = slot + 1 == STAGES ? 0 : slot + 1;
        } else {
            row.read(x + (inside ? at : 0) * cols, team.rank, cols);
#if RESIDUAL
            other.read(residual + (inside ? at : 0) * cols, team.rank, cols);
#endif
        }
#if RESIDUAL
        const auto normed = branch.row(row, other, at, team.rank, cols, inside);
#else
        const Row& normed = row;
#endif
        const float2 moment = moments<KIND == LAYER, VEC>(normed, team, cols, inv_cols, eps);
        u8* bytes = rowwise + (ROWWISE ? at : i64(blockIdx.x) * ROWS + (at - first)) * o.pitch;
        if (inside) {
            if (team.rank == 0) {
                if (KIND == LAYER) mean[at] = moment.x;
                rstd[at] = moment.y;
            }
            deliver(o, normed, moment, at, bytes, team.rank);
        }
        if (CAST && at < height) {  // the tail of the row, or a whole row of padding
            for (int col = (inside ? cols : 0) + team.rank; col < o.pitch; col += SIZE) bytes[col] = 0;
        }
        if (COLUMNWISE && n % STEPS == STEPS - 1) {
            __syncthreads();  // also makes the block's bytes visible to all its threads
            const u8* written = rowwise + (ROWWISE ? first : i64(blockIdx.x) * ROWS) * o.pitch;
            write_columns(written, o.pitch, columnwise, first, height);
            if (!ROWWISE) __syncthreads();  // before the scratch is written again
        }
    }
    if (AMAX != KEEP_NONE) {
        const float own = warp_max(o.top.get());
        if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = own;
        __syncthreads();
        if (threadIdx.x < 32) {
            const float top = warp_max(threadIdx.x < THREADS / 32 ? maxima[threadIdx.x] : 0.f);
            if (threadIdx.x == 0 && AMAX == PARTIALS) amax[blockIdx.x] = top;
            if (threadIdx.x == 0 && AMAX == RAISE) atomic_raise(amax, top);
        }
    }
}
