// The alpha and beta of an nvfp4 product, for cuBLASLt to read on the device: the maxima of the two operands are there,
// and the host must not wait for them.
//
//   pair[0] = amax_a * factor * amax_b, pair[1] = beta
//
// factor = 1 / (6 bound_a 6 bound_b): 6 is the largest FP4 value, a bound the largest block scale. Between the two
// maxima, so that their product alone cannot leave float32's range. One thread. Called by backends/cuda/gemm.py.
#include "common/numeric.cuh"

extern "C" __global__ void gemm_alpha(const float* amax_a, const float* amax_b, float* pair, float factor, float beta) {
    pair[0] = *amax_a * factor * *amax_b;
    pair[1] = beta;
}
