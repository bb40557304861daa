// Scales of delayed scaling beside their inverses, all at once: out[i] = (scale_i, 1 / scale_i), the inverse also to
// place_i, unless that is null.
//
// compile-check:
#include "common/numeric.cuh"

extern "C" __global__ void __launch_bounds__(32)
scale_pairs(const float* s0, const float* s1, const float* s2, const float* s3, float* p0, float* p1, float* p2,
            float* p3, float* __restrict__ out, i64 n) {
    const int i = threadIdx.x;
    if (i >= n) return;
    const float scale = *(i == 0 ? s0 : i == 1 ? s1 : i == 2 ? s2 : s3);
    float* const place = i == 0 ? p0 : i == 1 ? p1 : i == 2 ? p2 : p3;
    const float inverse = __fdiv_rn(1.f, scale);
    out[2 * i] = scale;
    out[2 * i + 1] = inverse;
    if (place) *place = inverse;
}
