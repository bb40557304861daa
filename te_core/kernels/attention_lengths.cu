// What cuDNN wants to know of sequences, in one launch: their lengths, where each begins in each packed tensor (in
// elements), and a sink of zeros. Sequences from `batch` to `slots` are empty: plans are made for powers of two.
//
// One thread a sequence, and one for the end.
#include "common/attention.cuh"

extern "C" __global__ void attention_lengths(const int* cu_q, const int* cu_kv, const int* cu_q_padded,
                                             const int* cu_kv_padded, int batch, int slots, int longest_q,
                                             int longest_kv, int* len_q, int* len_kv, float* zeros, int n_zeros,
                                             i64* offsets, int pitch, i64 q0, i64 q1, i64 q2, i64 q3, i64 kv0, i64 kv1,
                                             i64 kv2, i64 kv3) {
    const int b = blockIdx.x * blockDim.x + threadIdx.x;
    const Sequences s = {cu_q, cu_kv, cu_q_padded, cu_kv_padded, batch, longest_q, longest_kv};
    if (b < slots) {
        const Lengths n = lengths_of(s, b);
        len_q[b] = n.q;
        len_kv[b] = n.kv;
    }
    if (b < n_zeros) zeros[b] = 0.f;
    if (b > slots) return;
    const i64 strides[8] = {q0, q1, q2, q3, kv0, kv1, kv2, kv3};
    const int* starts_q = cu_q_padded ? cu_q_padded : cu_q;
    const int* starts_kv = cu_kv_padded ? cu_kv_padded : cu_kv;
    i64* place = offsets + b;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        if (!strides[k]) continue;
        *place = i64((k < 4 ? starts_q : starts_kv)[min(b, batch)]) * strides[k];
        place += pitch;
    }
}
