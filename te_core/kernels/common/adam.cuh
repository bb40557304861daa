// One element's step of Adam or AdamW, as te_core.ops.optimizer states it: no products are fused with sums, so that
// every device has the same bits.
#pragma once
#include "common/numeric.cuh"

// What one step of a list of tensors has in common.
struct AdamRule {
    const float* numbers;  // lr, correction1, correction2, scale, read on the device; or null: they stand below
    const u32* skip;       // or null
    float lr, correction1, correction2, scale;
    float beta1, rest1, beta2, rest2, epsilon, decay;
};

__device__ __forceinline__ bool skips(const AdamRule& r) { return r.skip != nullptr && *r.skip != 0; }
__device__ __forceinline__ AdamRule with_numbers(AdamRule r) {
    if (r.numbers != nullptr) {
        r.lr = r.numbers[0], r.correction1 = r.numbers[1], r.correction2 = r.numbers[2], r.scale = r.numbers[3];
    }
    return r;
}

template <bool Decoupled>
__device__ __forceinline__ void adam_step(const AdamRule& r, float g, float& p, float& m, float& v) {
    g = __fmul_rn(g, r.scale);
    if (!Decoupled) g = __fadd_rn(g, __fmul_rn(r.decay, p));
    m = __fadd_rn(__fmul_rn(r.beta1, m), __fmul_rn(r.rest1, g));
    v = __fadd_rn(__fmul_rn(r.beta2, v), __fmul_rn(r.rest2, __fmul_rn(g, g)));
    float u = __fdiv_rn(__fmul_rn(m, r.correction1),
                        __fadd_rn(__fsqrt_rn(__fmul_rn(v, r.correction2)), r.epsilon));
    if (Decoupled) u = __fadd_rn(u, __fmul_rn(r.decay, p));
    p = __fsub_rn(p, __fmul_rn(r.lr, u));
}
