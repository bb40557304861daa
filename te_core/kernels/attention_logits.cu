// Of cuDNN's largest score and sum of exponentials of each query: the statistics of backward, in the former's place,
// and the largest score of each head. A block a head.
#include "common/attention.cuh"

constexpr int THREADS = 1024;

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_logits(float* stats, const float* sums, float* largest, i64 rows, i64 s_batch, i64 s_token, i64 s_head,
                     const int* cu_q, const int* cu_kv, const int* cu_q_padded, const int* cu_kv_padded, int batch,
                     int longest_q, int longest_kv, int left, int right, int bottom_right, int packed) {
    __shared__ float tops[THREADS / 32];
    const Sequences s = {cu_q, cu_kv, cu_q_padded, cu_kv_padded, batch, longest_q, longest_kv};
    const Band band = {left, right, bottom_right};
    float top = __uint_as_float(0xff800000u);
    for (i64 row = threadIdx.x; row < rows; row += THREADS) {
        const Place at = place_of(row, packed, cu_q_padded ? cu_q_padded : cu_q, batch, longest_q);
        if (!sees_any(band, lengths_of(s, at.b), at.i)) continue;
        const i64 k = (packed ? row * s_token : at.b * s_batch + at.i * s_token) + blockIdx.x * s_head;
        const float score = stats[k];
        top = fmaxf(top, score);
        stats[k] = score + logf(sums[k]);
    }
    for (int step = 16; step; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
    __syncthreads();
    if (threadIdx.x < 32) {
        top = tops[threadIdx.x];
        for (int step = 16; step; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
        if (threadIdx.x == 0) largest[blockIdx.x] = top;
    }
}
