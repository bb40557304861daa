// The gradient of a softmax's sink (te_core/ops/attention_merge.py has the rule): of each head the sum over tokens of
// exp(sink - statistic) * (dy . out), negative.
//
//   dy, out [token, batch, head, width] of T, stats [token, batch, head] float32, any strides but the last
//   parts float32 [gridDim.x][heads], which column_sum.cu adds up
//
// A block takes a strip of tokens and eight heads, a warp each, so neighbouring warps read neighbouring memory. What a
// lane multiplies stays its own until the end of the strip: the factor of a token is the same in all of them. ACROSS of a
// warp share a token's head; the others take the next tokens.
//
// -D DTYPE=float|bf16|fp16  VEC=1|2|4|8  ACROSS=1|2|4|8|16|32
// compile-check: DTYPE=bf16 VEC=8 ACROSS=16
// compile-check: DTYPE=float VEC=1 ACROSS=32
#include "common/row.cuh"

typedef DTYPE T;
constexpr int TOKENS = 32 / ACROSS;

extern "C" __global__ void __launch_bounds__(256)
    attention_sink(const T* __restrict__ dy, const T* __restrict__ out, const float* __restrict__ stats,
                   const float* __restrict__ sink, float* __restrict__ parts, i64 tokens, i64 strip, int batches,
                   int heads, int width, i64 d_token, i64 d_batch, i64 d_head, i64 o_token, i64 o_batch, i64 o_head,
                   i64 s_token, i64 s_batch, i64 s_head) {
    const int lane = threadIdx.x % ACROSS, head = blockIdx.y * 8 + threadIdx.x / 32;
    if (head >= heads) return;
    const float own = sink[head];
    const i64 first = blockIdx.x * strip, last = min(first + strip, tokens);
    float sum = 0.f;
#pragma unroll 2
    for (i64 row = first + threadIdx.x % 32 / ACROSS; row < last; row += TOKENS) {
        const i64 token = row / batches, batch = row % batches;
        const float log = stats[token * s_token + batch * s_batch + head * s_head];
        if (isinf(log)) continue;
        const T* const x = dy + token * d_token + batch * d_batch + head * d_head;
        const T* const y = out + token * o_token + batch * o_batch + head * o_head;
        float along = 0.f;
        for (int v = lane; v < width; v += ACROSS) {
            float a[VEC], b[VEC];
            to_floats(load_vec<VEC>(x + v * VEC), a);
            to_floats(load_vec<VEC>(y + v * VEC), b);
#pragma unroll
            for (int j = 0; j < VEC; ++j) along = fmaf(a[j], b[j], along);
        }
        sum = fmaf(-expf(own - log), along, sum);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) parts[i64(blockIdx.x) * heads + head] = sum;
}
