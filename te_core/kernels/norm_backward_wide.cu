// LayerNorm and RMSNorm backward for rows too long for norm_backward.cu's registers (over 16,384 elements).
//
// Operands and formulas as in norm_backward.cu. Two kernels, each reading x and dy once from memory (and once more from
// L2): norm_backward_wide gives dx, a block of SIZE threads to a row; norm_backward_columns gives the partial sums
// [gridDim.y, 2, cols] of dgamma and dbeta, a thread to VEC columns of every gridDim.y-th row.
// Not tuned: no model has such rows.
//
// compile-check: IN=bf16 DY=bf16 GAMMA=bf16 KIND=LAYER ZERO_CENTERED=0 VEC=8 SIZE=1024 ADD=1
// compile-check: IN=float DY=float GAMMA=float KIND=RMS ZERO_CENTERED=1 VEC=1 SIZE=1024 ADD=0
#include "common/row.cuh"

enum Kind { RMS = 0, LAYER = 1 };

__device__ __forceinline__ float xhat_of(IN x, float2 moment) {
    return (KIND == LAYER ? to_float(x) - moment.x : to_float(x)) * moment.y;
}
__device__ __forceinline__ float weighted(DY dy, GAMMA gamma) {
    return to_float(dy) * (ZERO_CENTERED ? 1.f + to_float(gamma) : to_float(gamma));
}

extern "C" __global__ void __launch_bounds__(SIZE)
    norm_backward_wide(const DY* __restrict__ dy, const IN* __restrict__ x, const GAMMA* __restrict__ gamma,
                       const float* __restrict__ mean, const float* __restrict__ rstd, const IN* __restrict__ add,
                       IN* __restrict__ dx, i64 rows, int cols, float inv_cols) {
    typedef Team<SIZE, 1> RowTeam;
    __shared__ float2 scratch[RowTeam::SCRATCH];
    RowTeam team(scratch);
    for (i64 at = blockIdx.x; at < rows; at += gridDim.x) {
        const float2 moment = make_float2(KIND == LAYER ? mean[at] : 0.f, rstd[at]);
        const IN* x_row = x + at * cols;
        const DY* dy_row = dy + at * cols;
        float2 sum = make_float2(0.f, 0.f);
#pragma unroll 2
        for (int col = team.rank * VEC; col < cols; col += SIZE * VEC) {
            const Vec<IN, VEC> vx = load_vec<VEC>(x_row + col);
            const Vec<DY, VEC> vdy = load_vec<VEC>(dy_row + col);
            const Vec<GAMMA, VEC> g = load_vec<VEC>(gamma + col);
#pragma unroll
            for (int j = 0; j < VEC; ++j) {
                const float w = weighted(vdy[j], g[j]);
                if (KIND == LAYER) sum.x += w;
                sum.y = fmaf(w, xhat_of(vx[j], moment), sum.y);
            }
        }
        sum = team.sum(sum);
        const float along_one = sum.x * inv_cols, along_x = sum.y * inv_cols;
#pragma unroll 2
        for (int col = team.rank * VEC; col < cols; col += SIZE * VEC) {
            const Vec<IN, VEC> vx = load_vec<VEC>(x_row + col);
            const Vec<DY, VEC> vdy = load_vec<VEC>(dy_row + col);
            const Vec<GAMMA, VEC> g = load_vec<VEC>(gamma + col);
            float f[VEC], more[VEC];
            if (ADD) to_floats(load_once<VEC>(add + at * cols + col), more);
#pragma unroll
            for (int j = 0; j < VEC; ++j) {
                float w = weighted(vdy[j], g[j]);
                if (KIND == LAYER) w -= along_one;
                f[j] = moment.y * fmaf(-xhat_of(vx[j], moment), along_x, w);
                if (ADD) f[j] = __fadd_rn(f[j], more[j]);
            }
            store_vec(dx + at * cols + col, round_to(f, IN()));
        }
    }
}

extern "C" __global__ void __launch_bounds__(128)
    norm_backward_columns(const DY* __restrict__ dy, const IN* __restrict__ x, const float* __restrict__ mean,
                          const float* __restrict__ rstd, float* __restrict__ partial, i64 rows, int cols) {
    const int col = (blockIdx.x * 128 + threadIdx.x) * VEC;
    if (col >= cols) return;
    float dgamma[VEC] = {}, dbeta[VEC] = {};
#pragma unroll 4
    for (i64 at = blockIdx.y; at < rows; at += gridDim.y) {
        const float2 moment = make_float2(KIND == LAYER ? __ldg(mean + at) : 0.f, __ldg(rstd + at));
        const Vec<IN, VEC> vx = load_once<VEC>(x + at * cols + col);
        const Vec<DY, VEC> vdy = load_once<VEC>(dy + at * cols + col);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            dgamma[j] = fmaf(to_float(vdy[j]), xhat_of(vx[j], moment), dgamma[j]);
            if (KIND == LAYER) dbeta[j] += to_float(vdy[j]);
        }
    }
    float* out = partial + i64(blockIdx.y) * 2 * cols + col;
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
        out[j] = dgamma[j];
        if (KIND == LAYER) out[cols + j] = dbeta[j];
    }
}
