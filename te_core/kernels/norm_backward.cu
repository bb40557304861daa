// LayerNorm (KIND=LAYER) and RMSNorm (KIND=RMS) backward: dx, and the first stage of dgamma and dbeta.
//
//   x, dx [rows, cols] of IN; dy [rows, cols] of DY; gamma [cols] of GAMMA; mean (LAYER only), rstd [rows] float32
//   xhat = (x - mean) * rstd,  w = dy * g,  dx = rstd * (w - mean(w) - xhat * mean(w * xhat))   (RMS: no mean(w))
//   partial [blocks, 2, cols] float32: each block's sums of dy * xhat and (LAYER) of dy; norm_backward_sum.cu adds them
//
// A persistent grid: a block of TEAMS teams walks the rows with its sums in registers (a thread always meets the same
// ITERS * VEC columns) and adds its teams' sums at the end, all in a fixed order. Each thread fetches its own pieces of
// the next STAGES rows into shared memory with cp.async, so the bytes in flight cost no registers and no barrier.
// Rows longer than the registers hold: norm_backward_wide.cu. NORM_BACKWARD_MEASURED
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
#ifndef KEEP_MOST
#define KEEP_MOST 16
#endif
constexpr bool KEEP = ITERS * VEC <= (THREADS <= 512 ? KEEP_MOST : 8);

// A thread's pieces of one row, in shared memory.
struct Pair {
    Stage<IN, VEC, ITERS, SIZE, FULL, THREADS> x;
    Stage<DY, VEC, ITERS, SIZE, FULL, THREADS> dy;
};
typedef HeldRow<IN, VEC, ITERS, SIZE, FULL> Columns;  // which columns a thread owns

struct Element {
    float xhat, w;
};
__device__ __forceinline__ Element element(IN x, DY dy, GAMMA gamma, float2 moment) {
    Element e;
    e.xhat = (KIND == LAYER ? to_float(x) - moment.x : to_float(x)) * moment.y;
    e.w = to_float(dy) * (ZERO_CENTERED ? 1.f + to_float(gamma) : to_float(gamma));
    return e;
}

__device__ __forceinline__ float2 moment_of(const float* mean, const float* rstd, i64 at, i64 rows) {
    if (at >= rows) return make_float2(0.f, 0.f);
    return make_float2(KIND == LAYER ? __ldg(mean + at) : 0.f, __ldg(rstd + at));
}

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
    const auto fetch = [&](Pair& stage, i64 at) {
        if (at < rows) {
            stage.x.fetch(x + at * cols, team.rank, cols);
            stage.dy.fetch(dy + at * cols, team.rank, cols);
        }
        commit_copies();
    };
#pragma unroll
    for (int s = 0; s < STAGES; ++s) fetch(stages[s], first + team.index + s * step);
    float2 next = moment_of(mean, rstd, first + team.index, rows);

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
        const float2 moment = next;
        next = moment_of(mean, rstd, at + step, rows);
        wait_copies<STAGES - 1>();

        float2 sum = make_float2(0.f, 0.f);  // of w and of w * xhat
        Element kept[KEEP ? ITERS : 1][KEEP ? VEC : 1];
        if (inside) {
#pragma unroll
            for (int i = 0; i < ITERS; ++i) {
                if (Columns::owns(Columns::column(i, team.rank), cols)) {
                    const Vec<IN, VEC> vx = stage.x.v[i][threadIdx.x];
                    const Vec<DY, VEC> vdy = stage.dy.v[i][threadIdx.x];
#pragma unroll
                    for (int j = 0; j < VEC; ++j) {
                        const Element e = element(vx[j], vdy[j], g[i][j], moment);
                        if (KIND == LAYER) sum.x += e.w;
                        sum.y = fmaf(e.w, e.xhat, sum.y);
                        dgamma[i][j] = fmaf(to_float(vdy[j]), e.xhat, dgamma[i][j]);
                        if (KIND == LAYER) dbeta[i][j] += to_float(vdy[j]);
                        if (KEEP) kept[KEEP ? i : 0][KEEP ? j : 0] = e;
                    }
                }
            }
        }
        if (KEEP) fetch(stage, at + STAGES * step);
        if (KIND == LAYER) sum = team.sum(sum);
        else sum.y = team.sum(sum.y);
        // dx = rstd * (w - sum.x / cols - xhat * sum.y / cols), multiplied out
        const float constant = -moment.y * (sum.x * inv_cols), along_x = -moment.y * (sum.y * inv_cols);
        if (inside) {
#pragma unroll
            for (int i = 0; i < ITERS; ++i) {
                const int col = Columns::column(i, team.rank);
                if (Columns::owns(col, cols)) {
                    Vec<IN, VEC> vx;
                    Vec<DY, VEC> vdy;
                    if (!KEEP) {
                        vx = stage.x.v[i][threadIdx.x];
                        vdy = stage.dy.v[i][threadIdx.x];
                    }
                    float f[VEC];
#pragma unroll
                    for (int j = 0; j < VEC; ++j) {
                        const Element e =
                            KEEP ? kept[KEEP ? i : 0][KEEP ? j : 0] : element(vx[j], vdy[j], g[i][j], moment);
                        const float w = KIND == LAYER ? fmaf(e.w, moment.y, constant) : e.w * moment.y;
                        f[j] = fmaf(e.xhat, along_x, w);
                    }
                    store_vec(dx + at * cols + col, round_to(f, IN()));
                }
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
