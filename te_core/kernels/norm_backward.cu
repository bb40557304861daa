// LayerNorm (KIND=LAYER) and RMSNorm (KIND=RMS) backward: dx, and the first stage of dgamma and dbeta.
//
//   x, dx [rows, cols] of IN; dy [rows, cols] of DY; gamma [cols] of GAMMA; mean (LAYER only), rstd [rows] float32
//   ADD=1: add [rows, cols] of IN goes into dx in float32, before its one rounding (else add may be null)
//   xhat = (x - mean) * rstd,  w = dy * g,  dx = rstd * (w - mean(w) - xhat * mean(w * xhat))   (RMS: no mean(w))
//   partial [blocks, 2, cols] float32: each block's sums of dy * xhat and (LAYER) of dy; norm_backward_sum.cu adds them
//
// A persistent grid: a block of TEAMS teams walks the rows with its sums in registers (a thread always meets the same
// ITERS * VEC columns) and adds its teams' sums at the end, all in a fixed order. Each thread fetches its own pieces of
// the next STAGES rows into shared memory with cp.async, so the bytes in flight cost no registers and no barrier.
// Rows longer than the registers hold: norm_backward_wide.cu.
// H200, 2026-11-21, 8192 x 4096 bf16, norm_backward_sum (3 to 4 us) included: LayerNorm 57.4 us, 82 % of the speed of
// a copy; RMSNorm 56.0 us, 84 %; float32 90 % and 91 % (L2 flushed by reading).
//
// options: -default-device
// compile-check: IN=bf16 DY=bf16 GAMMA=bf16 KIND=LAYER ZERO_CENTERED=0 VEC=8 ITERS=2 SIZE=256 FULL=1 TEAMS=2 STAGES=3 ADD=0
// compile-check: IN=bf16 DY=bf16 GAMMA=bf16 KIND=LAYER ZERO_CENTERED=0 VEC=8 ITERS=2 SIZE=256 FULL=1 TEAMS=2 STAGES=3 ADD=1
// compile-check: IN=bf16 DY=bf16 GAMMA=bf16 KIND=LAYER ZERO_CENTERED=0 VEC=8 ITERS=4 SIZE=512 FULL=1 TEAMS=1 STAGES=2 ADD=1
// compile-check: IN=float DY=bf16 GAMMA=float KIND=RMS ZERO_CENTERED=1 VEC=4 ITERS=2 SIZE=128 FULL=1 TEAMS=4 STAGES=2 ADD=0
// compile-check: IN=fp16 DY=fp16 GAMMA=bf16 KIND=LAYER ZERO_CENTERED=1 VEC=1 ITERS=32 SIZE=512 FULL=0 TEAMS=1 STAGES=2 ADD=0
// compile-check: IN=bf16 DY=float GAMMA=bf16 KIND=RMS ZERO_CENTERED=0 VEC=2 ITERS=1 SIZE=4 FULL=0 TEAMS=64 STAGES=2 ADD=1
#include "common/row.cuh"

enum Kind { RMS = 0, LAYER = 1 };

constexpr int THREADS = SIZE * TEAMS;
// A few values a thread are worth keeping between the two uses of a row; more are worked out again.
constexpr bool KEEP = ITERS * VEC <= (THREADS <= 512 ? 16 : 8);

// A thread's pieces of one row, in shared memory.
struct RowStage {
    Stage<IN, VEC, ITERS, SIZE, FULL, THREADS> x[1 + ADD];  // with ADD the second is what is added
    Stage<DY, VEC, ITERS, SIZE, FULL, THREADS> dy;
};
typedef HeldRow<IN, VEC, ITERS, SIZE, FULL> Columns;  // which columns a thread owns
typedef Vec<float, VEC> Sums;

// The means and rstds of so many of a team's rows are fetched at once: a row's own would come from memory each time,
// later than the row itself, and copies of 4 bytes cost as much as those of 16.
constexpr int SEGMENT = TEAMS > 128 ? 2 : TEAMS < 8 ? 64 : 512 / TEAMS;

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
__device__ __forceinline__ void add_teams(Sums (&sum)[ITERS], float* shared, int team, int rank, int cols) {
#pragma unroll
    for (int n = TEAMS; n > 1; n = (n + 1) / 2) {
        const int half = (n + 1) / 2;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ITERS; ++i) {
            const int col = Columns::column(i, rank);
            if (team < half || team >= n || !Columns::owns(col, cols)) continue;
            store_vec(shared + (team - half) * cols + col, sum[i]);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ITERS; ++i) {
            const int col = Columns::column(i, rank);
            if (team >= n - half || !Columns::owns(col, cols)) continue;
            const Sums other = load<VEC>(shared + team * cols + col);
#pragma unroll
            for (int j = 0; j < VEC; ++j) sum[i][j] += other[j];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    norm_backward(const DY* __restrict__ dy, const IN* __restrict__ x, const GAMMA* __restrict__ gamma,
                  const float* __restrict__ mean, const float* __restrict__ rstd, const IN* __restrict__ add,
                  IN* __restrict__ dx, float* __restrict__ partial, i64 rows, int cols, float inv_cols) {
    typedef Team<SIZE, TEAMS> RowTeam;
    extern __shared__ uint4 dynamic[];
    __shared__ float2 scratch[RowTeam::SCRATCH];
    __shared__ float2 moments_of_rows[TEAMS][SEGMENT];
    RowStage* stages = reinterpret_cast<RowStage*>(dynamic);
    RowTeam team(scratch);

    const i64 step = i64(gridDim.x) * TEAMS;
    i64 first = i64(blockIdx.x) * TEAMS;
    const auto fetch = [&](RowStage& stage, i64 at) {
        if (at < rows) {
            stage.x[0].fetch(x + at * cols, team.rank, cols);
            stage.dy.fetch(dy + at * cols, team.rank, cols);
            if (ADD) stage.x[ADD].fetch(add + at * cols, team.rank, cols);
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
    Sums dgamma[ITERS] = {}, dbeta[ITERS] = {};

    for (int slot = 0, place = 0; first < rows; first += step, slot = slot + 1 == STAGES ? 0 : slot + 1) {
        const i64 at = first + team.index;
        const bool inside = at < rows;  // a team beyond the last row only keeps in step
        RowStage& stage = stages[slot];
        wait_copies<STAGES - 1>();
        if (place == 0) {  // all have read the last segment: they met in a sum since
            for (int i = team.rank; i < SEGMENT; i += SIZE) {
                const i64 row = at + i * step;
                if (row < rows) moments_of_rows[team.index][i] = make_float2(KIND == LAYER ? mean[row] : 0.f, rstd[row]);
            }
            if (SIZE > 32) team.barrier();
            else __syncwarp();
        }
        const float2 moment = moments_of_rows[team.index][place];
        const float row_mean = moment.x, row_rstd = moment.y;
        place = place + 1 == SEGMENT ? 0 : place + 1;

        float2 sum = make_float2(0.f, 0.f);  // of w and of w * xhat
        Elements kept[KEEP ? ITERS : 1];
        Vec<IN, VEC> added[KEEP ? ITERS : 1];  // ADD: kept as it is, its stage is overwritten meanwhile
        if (inside) {
#pragma unroll
            for (int i = 0; i < ITERS; ++i) {
                if (!Columns::owns(Columns::column(i, team.rank), cols)) continue;
                Elements& e = kept[KEEP ? i : 0];
                e.take(stage.x[0].v[i][threadIdx.x], stage.dy.v[i][threadIdx.x], g[i], row_mean, row_rstd);
                if (ADD && KEEP) added[KEEP ? i : 0] = stage.x[ADD].v[i][threadIdx.x];
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
                if (!KEEP) e.take(stage.x[0].v[i][threadIdx.x], stage.dy.v[i][threadIdx.x], g[i], row_mean, row_rstd);
                float f[VEC], more[VEC];
                if (ADD) to_floats(KEEP ? added[KEEP ? i : 0] : stage.x[ADD].v[i][threadIdx.x], more);
#pragma unroll
                for (int j = 0; j < VEC; ++j) {
                    const float w = KIND == LAYER ? fmaf(e.w[j], row_rstd, constant) : e.w[j] * row_rstd;
                    f[j] = fmaf(e.xhat[j], along_x, w);
                    if (ADD) f[j] = __fadd_rn(f[j], more[j]);
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
        const int col = Columns::column(i, team.rank);
        if (!Columns::owns(col, cols)) continue;
        store_vec(out + col, dgamma[i]);
        if (KIND == LAYER) store_vec(out + cols + col, dbeta[i]);
    }
}
