// What cuBLASLt does not fuse, applied to a float32 product: bias, gelu (keeping its input), gelu', adding to the
// old output. One rounding, at the store.
//
//   v = acc + bias;  ACTIVATION 0: r = v;  1: aux = v (if HAS_AUX), r = gelu(v);  2: r = v * gelu'(aux)
//   out = r (+ out if ACCUMULATE)
//
// acc, aux, out: dense row-major [m, n]; bias [n]. acc may be out (float32, no ACCUMULATE). A thread owns a column
// and walks down the rows of its block, so that the bias is read once. Called by backends/cuda/gemm.py for odd
// combinations only; plain loads of one element (any alignment).
// compile-check: OUT=bf16 BIAS=float HAS_BIAS=1 AUX=bf16 HAS_AUX=1 ACTIVATION=1 ACCUMULATE=0
// compile-check: OUT=float BIAS=float HAS_BIAS=0 AUX=fp16 HAS_AUX=1 ACTIVATION=2 ACCUMULATE=1
#include "common/numeric.cuh"

__device__ __forceinline__ float gelu(float x) {
    return 0.5f * x * (1.f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
}
__device__ __forceinline__ float gelu_slope(float x) {
    const float t = tanhf(0.7978845608f * (x + 0.044715f * x * x * x));
    return 0.5f * (1.f + t) + 0.5f * x * (1.f - t * t) * 0.7978845608f * (1.f + 3.f * 0.044715f * x * x);
}

extern "C" __global__ void __launch_bounds__(128)
epilogue(const float* acc, const BIAS* bias, AUX* aux, OUT* out, i64 m, i64 n) {
    const i64 column = blockIdx.x * 128LL + threadIdx.x;
    if (column >= n) return;
    const float b = HAS_BIAS ? to_float(bias[column]) : 0.f;
    for (i64 row = blockIdx.y; row < m; row += gridDim.y) {
        const i64 at = row * n + column;
        float v = acc[at] + b;
        if (ACTIVATION == 1) {
            if (HAS_AUX) aux[at] = from_float<AUX>(v);
            v = gelu(v);
        } else if (ACTIVATION == 2) {
            v *= gelu_slope(to_float(aux[at]));
        }
        if (ACCUMULATE) v += to_float(out[at]);
        out[at] = from_float<OUT>(v);
    }
}
