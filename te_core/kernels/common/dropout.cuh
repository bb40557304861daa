// What is added to a residual stream: residual + dropout(x + bias), by the rule of te_core/ops/elementwise.py. One
// function for all kernels that form it, so that a fused sum and one of its own are equal bit for bit.
#pragma once
#include "common/philox.cuh"

// keep: 0 or 1 / (1 - p) with dropout. A dropped element adds a true zero, even where x is infinite. No fused
// multiply-add: the CPU backend rounds the product, and the two shall agree.
template <bool Dropout> __device__ __forceinline__ float residual_sum(float x, float bias, float keep, float residual) {
    x += bias;
    if (Dropout) x = keep != 0.f ? __fmul_rn(x, keep) : 0.f;
    return __fadd_rn(residual, x);
}

// keep[j] = factor where the mask keeps element + j, else 0. `element` is a multiple of N, N a power of two.
template <int N>
__device__ __forceinline__ void draw_keep(const Philox& philox, u64 element, u32 threshold, float factor,
                                          float (&keep)[N]) {
#pragma unroll
    for (int j = 0; j < N; j += 4) {
        u32 word[4];
        philox.draw((element + j) / 4, word);
        // Fewer than four share a draw with their neighbours: theirs come first.
        if (N <= 2 && element & 2) word[0] = word[2], word[1] = word[3];
        if (N == 1 && element & 1) word[0] = word[1];
#pragma unroll
        for (int k = 0; k < (N < 4 ? N : 4); ++k) keep[j + k] = word[k] >= threshold ? factor : 0.f;
    }
}
