// ALiBi as a bias, where cuDNN's own does not fit: -slope |i + shift - j|, and minus infinity where a key is not seen,
// for diagonals that end bottom-right (cuDNN has none together with a bias). float32: distances need its bits.
//
// A block a query of a head, blockIdx = (query, head, sequence). slopes: [heads], or [batch, heads].
// -D MASKED=0|1
// compile-check: MASKED=0
// compile-check: MASKED=1
#include "common/attention.cuh"

extern "C" __global__ void __launch_bounds__(128)
    attention_bias(const float* slopes, float* bias, int slopes_batch, int columns, const int* cu_q, const int* cu_kv,
                   int batch, int longest_q, int longest_kv, int left, int right, int bottom_right) {
    const Sequences s = {cu_q, cu_kv, nullptr, nullptr, batch, longest_q, longest_kv};
    const Band band = {left, right, bottom_right};
    const int i = blockIdx.x, h = blockIdx.y, b = blockIdx.z;
    const int shift = shift_of(band, lengths_of(s, b));
    const float slope = b < batch ? slopes[(slopes_batch ? b * gridDim.y : 0) + h] : 0.f;
    float* row = bias + ((i64(b) * gridDim.y + h) * gridDim.x + i) * columns;
    for (int j = threadIdx.x; j < columns; j += blockDim.x) {
        const float value = -slope * fabsf(float(i + shift - j));
        row[j] = !MASKED || sees(band, shift, i, j) ? value : __uint_as_float(0xff800000u);
    }
}
