// The numbers of a step of Adam that are known on the device alone, for adam.cu: lr, 1 / (1 - beta^t) of both betas, and
// what gradients are multiplied by. One thread. The powers are taken in float64: in float32 1 - 0.999 has four digits.
// compile-check:
#include "common/numeric.cuh"

__device__ __forceinline__ double correction(i64 beta, int step) {
    return 1.0 / (1.0 - pow(__longlong_as_double(beta), double(step)));
}

extern "C" __global__ void adam_numbers(const float* lr, float lr_value, const int* step, int step_value, i64 beta1,
                                        i64 beta2, int corrects, const float* scale, float* numbers) {
    const int t = step ? *step : step_value;
    numbers[0] = lr ? *lr : lr_value;
    numbers[1] = corrects ? float(correction(beta1, t)) : 1.f;
    numbers[2] = corrects ? float(correction(beta2, t)) : 1.f;
    numbers[3] = scale ? *scale : 1.f;
}
