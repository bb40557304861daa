// LayerNorm (KIND=LAYER) and RMSNorm (KIND=RMS) backward: dx, and the first stage of dgamma and dbeta.
//
//   x, dx [rows, cols] of IN; dy [rows, cols] of DY; gamma [cols] of GAMMA; mean (LAYER only), rstd [rows] float32
//   xhat = (x - mean) * rstd,  w = dy * g,  dx = rstd * (w - mean(w) - xhat * mean(w * xhat))   (RMS: no mean(w))
//   partial [blocks, 2, cols] float32: each block's sums of dy * xhat and (LAYER) of dy; norm_backward_sum.cu adds them
//
// A persistent grid: a block of TEAMS teams walks the rows with its sums in registers (a thread always meets the same
// ITERS * VEC columns) and adds its teams' sums at the end, all in a fixed order. Each thread fetches its own pieces of
// the next STAGES rows into shared memory with cp.async, so the bytes in flight cost no registers and no barrier.
// Rows longer than the registers hold: norm_backward_wide.cu.
// H200, 2026-11-21, 8192 x 4096 bf16, norm_backward_sum (3 to 4 us) included: LayerNorm 68.9 us, 69 % of the speed of
// a copy; RMSNorm 58.3 us, 82 %; float32 88 % and 91 %.
//
// options: -default-device
// compile-check: IN=bf16 DY=bf16 GAMMA=bf16 KIND=LAYER ZERO_CENTERED=0 VEC=8 ITERS=2 SIZE=256 FULL=1 TEAMS=2 STAGES=3
// compile-check: IN=float DY=bf16 GAMMA=float KIND=RMS ZERO_CENTERED=1 VEC=4 ITERS=2 SIZE=128 FULL=1 TEAMS=4 STAGES=2
// compile-check: IN=fp16 DY=fp16 GAMMA=bf16 KIND=LAYER ZERO_CENTERED=1 VEC=1 ITERS=16 SIZE=1024 FULL=0 TEAMS=1 STAGES=2
// compile-check: IN=bf16 DY=float GAMMA=bf16 KIND=RMS ZERO_CENTERED=0 VEC=2 ITERS=1 SIZE=4 FULL=0 TEAMS=64 STAGES=2
#include "common/row.cuh"

enum Kind { RMS = 0, LAYER = 1 };

constexpr int THREADS = SIZE * TEAMS;
// A few values a thread are worth keeping between the two uses of a row; more are worked out again.
constexpr bool KEEP = ITERS * VEC <= (THREADS <= 512 ? 16 : 8);

// A thread's pieces of one row, in shared memory.
struct Pair {
    Stage<IN, VEC, ITERS, SIZE, FULL, THREADS> x;
    Stage<DY, VEC, ITERS, SIZE, FULL, THREADS> dy;
    // The row's own two numbers come along, once for each thread: no barrier for them either.
    float mean[THREADS], rstd[THREADS];
};
typedef HeldRow<IN, VEC, ITERS, SIZE, FULL> Columns;  // which columns a thread owns

// xhat and w of the vectors a thread has in one place of the row; dy in float32 as it is.
struct Elements {
    float xhat[VEC], w[VEC], dy[VEC];
    __device__ __forceinline__ void take(const Vec<IN, VEC>& vx, const Vec<DY, VEC>& vdy, const Vec<GAMMA, VEC>& g,
                                         float mean, float rstd) {
        float x[VEC], gain[VEC];
        to_floats(vx, x);
        to_floats(vdy, dy);
        to_floats(g, gain);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            xhat[j] = (KIND == LAYER ? x[j] - mean : x[j]) * rstd;
            w[j] = dy[j] * (ZERO_CENTERED ? 1.f + gain[j] : gain[j]);
        }
    }
};

// Adds the teams' sums of each column into team 0's, pairing them in a fixed order.
__device__ __forceinline__ void add_teams(float (&sum)[ITERS][VEC], float* shared, int team, int rank, int cols) {
    for (int n = TEAMS; n > 1;) {
        const int half = (n + 1) / 2;
        __syncthreads();
        for (int i = 0; i < ITERS && team >= half && team < n; ++i) {
            const int col = (i * SIZE + rank) * VEC;
            for (int j = 0; j < VEC && col < cols; ++j) shared[(team - half) * cols + col + j] = sum[i][j];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ITERS; ++i) {
            const int col = (i * SIZE + rank) * VEC;
            if (team < n - half && col < cols) {
#pragma unroll
                for (int j = 0; j < VEC; ++j) sum[i][j] += shared[team * cols + col + j];
            }
        }
        n = half;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    norm_backward(const DY* __restrict__ dy, const IN* __restrict__ x, const GAMMA* __restrict__ gamma,
                  const float* __restrict__ mean, const float* __restrict__ rstd, IN* __restrict__ dx,
                  float* __restrict__ partial, i64 rows, int cols, float inv_cols) {
    typedef Team<SIZE, TEAMS> RowTeam;
    extern __shared__ uint4 dynamic[];
    __shared__ float2 scratch[RowTeam::SCRATCH];
    Pair* stages = reinterpret_cast<Pair*>(dynamic);
    RowTeam team(scratch);

    const i64 step = i64(gridDim.x) * TEAMS;
    i64 first = i64(blockIdx.x) * TEAMS;
    const auto word = [](float* p) { return reinterpret_cast<Vec<float, 1>*>(p + threadIdx.x); };
    const auto fetch = [&](Pair& stage, i64 at) {
        if (at < rows) {
            stage.x.fetch(x + at * cols, team.rank, cols);
            stage.dy.fetch(dy + at * cols, team.rank, cols);
            if (KIND == LAYER) copy_async(word(stage.mean), mean + at);
            copy_async(word(stage.rstd), rstd + at);
        }
        commit_copies();
    };
#pragma unroll
    for (int s = 0; s < STAGES; ++s) fetch(stages[s], first + team.index + s * step);

    Vec<GAMMA, VEC> g[ITERS];
#pragma unroll
    for (int i = 0; i < ITERS; ++i) {
        const int col = Columns::column(i, team.rank);
        if (Columns::owns(col, cols)) g[i] = load_vec<VEC>(gamma + col);
    }
    float dgamma[ITERS][VEC] = {}, dbeta[ITERS][VEC] = {};

    for (int slot = 0; first < rows; first += step, slot = slot + 1 == STAGES ? 0 : slot + 1) {
        const i64 at = first + team.index;
        const bool inside = at < rows;  // a team beyond the last row only keeps in step
        Pair& stage = stages[slot];
        wait_copies<STAGES - 1>();
        const float row_mean = KIND == LAYER ? stage.mean[threadIdx.x] : 0.f, row_rstd = stage.rstd[threadIdx.x];

        float2 sum = make_float2(0.f, 0.f);  // of w and of w * xhat
        Elements kept[KEEP ? ITERS : 1];
        if (inside) {
#pragma unroll
            for (int i = 0; i < ITERS; ++i) {
                if (!Columns::owns(Columns::column(i, team.rank), cols)) continue;
                Elements& e = kept[KEEP ? i : 0];
                e.take(stage.x.v[i][threadIdx.x], stage.dy.v[i][threadIdx.x], g[i], row_mean, row_rstd);
#pragma unroll
                for (int j = 0; j < VEC; ++j) {
                    if (KIND == LAYER) sum.x += e.w[j];
                    sum.y = fmaf(e.w[j], e.xhat[j], sum.y);
                    dgamma[i][j] = fmaf(e.dy[j], e.xhat[j], dgamma[i][j]);
                    if (KIND == LAYER) dbeta[i][j] += e.dy[j];
                }
            }
        }
        if (KEEP) fetch(stage, at + STAGES * step);
        if (KIND == LAYER) sum = team.sum(sum);
        if (KIND == RMS) sum.y = team.sum(sum.y);
        // dx = rstd * (w - sum.x / cols - xhat * sum.y / cols), multiplied out
        const float constant = -row_rstd * (sum.x * inv_cols), along_x = -row_rstd * (sum.y * inv_cols);
        if (inside) {
#pragma unroll
            for (int i = 0; i < ITERS; ++i) {
                const int col = Columns::column(i, team.rank);
                if (!Columns::owns(col, cols)) continue;
                Elements& e = kept[KEEP ? i : 0];
                if (!KEEP) e.take(stage.x.v[i][threadIdx.x], stage.dy.v[i][threadIdx.x], g[i], row_mean, row_rstd);
                float f[VEC];
#pragma unroll
                for (int j = 0; j < VEC; ++j) {
                    const float w = KIND == LAYER ? fmaf(e.w[j], row_rstd, constant) : e.w[j] * row_rstd;
                    f[j] = fmaf(e.xhat[j], along_x, w);
                }
                store_vec(dx + at * cols + col, round_to(f, IN()));
            }
        }
        if (!KEEP) fetch(stage, at + STAGES * step);
    }

    wait_copies<0>();
    float* shared = reinterpret_cast<float*>(dynamic);
    add_teams(dgamma, shared, team.index, team.rank, cols);
    if (KIND == LAYER) add_teams(dbeta, shared, team.index, team.rank, cols);
    if (team.index > 0) return;
    float* out = partial + i64(blockIdx.x) * 2 * cols;
#pragma unroll
    for (int i = 0; i < ITERS; ++i) {
        const int col = (i * SIZE + team.rank) * VEC;
        for (int j = 0; j < VEC && col < cols; ++j) {
            out[col + j] = dgamma[i][j];
            if (KIND == LAYER) out[cols + col + j] = dbeta[i][j];
        }
    }
}
