// The numbers of NVFP4: E2M1 values and E4M3 block scales below a float32 amax. te_core/ops/quantize_nvfp4.py is the
// rule. Each operation is rounded by itself: an FMA would change bits that the CPU backend has.
#pragma once
#include "common/numeric.cuh"

constexpr int NVFP4_BLOCK = 16;
constexpr float FLOAT_TOP = 3.402823466e38f;

// The scale above all blocks, from the amax; `range` is 6 * bound.
struct Level {
    float amax, encode, decode;
    __device__ __forceinline__ Level(float amax, float range) : amax(amax) {
        encode = fminf(__fdiv_rn(range, amax), FLOAT_TOP);
        if (amax == 0.f || encode == 0.f) encode = 1.f;
        decode = __fdiv_rn(1.f, encode);
    }
};

// What values of a block with this scale are multiplied by.
__device__ __forceinline__ float block_encode(u8 scale, const Level& level) {
    return fminf(__fdiv_rn(1.f, __fmul_rn(from_fp8<E4M3>(scale), level.decode)), FLOAT_TOP);
}

__device__ __forceinline__ u8 block_scale(float wanted) { return to_fp8<E4M3>(fminf(wanted, FLOAT_TOP)); }

// 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
__device__ __forceinline__ float from_e2m1(u32 code) {
    const float size = 0.5f * float((0xC8643210u >> (4 * (code & 7))) & 15);
    return code & 8 ? -size : size;
}

// NaN becomes +6; the sign of a zero is kept.
__device__ __forceinline__ u32 signed_e2m1(u32 size, float v) {
    return isnan(v) ? 7 : size | (__float_as_uint(v) >> 28 & 8);
}

__device__ __forceinline__ u32 to_e2m1(float v) {
    const float a = fabsf(v);
    const u32 size = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.f);
    return signed_e2m1(size, v);
}

__device__ __forceinline__ u32 to_e2m1_stochastic(float v, u32 random) {
    const float a = fminf(fabsf(v), 6.f);
    const float step = a < 2.f ? 0.5f : a < 4.f ? 1.f : 2.f;
    const float t = __fadd_rn(a, __fmul_rn(float(random) * (1.f / 256), step));
    const u32 size = (t >= 0.5f) + (t >= 1.f) + (t >= 1.5f) + (t >= 2.f) + (t >= 3.f) + (t >= 4.f) + (t >= 6.f);
    return signed_e2m1(size, v);
}

// The sum of sixteen values: neighbours first, then the pairs.
__device__ __forceinline__ float pairwise_sum(float (&v)[NVFP4_BLOCK]) {
#pragma unroll
    for (int n = NVFP4_BLOCK / 2; n; n >>= 1) {
#pragma unroll
        for (int i = 0; i < n; ++i) v[i] = __fadd_rn(v[2 * i], v[2 * i + 1]);
    }
    return v[0];
}

__device__ __forceinline__ float largest(const float (&v)[NVFP4_BLOCK]) {
    float top = 0.f;
#pragma unroll
    for (int j = 0; j < NVFP4_BLOCK; ++j) top = fmaxf(top, fabsf(v[j]));
    return top;
}

// The random Hadamard transform of a piece, bf16 in and out.
__device__ __forceinline__ void hadamard(float (&v)[NVFP4_BLOCK]) {
    constexpr u32 NEGATIVE = 0xD7E8;  // bit i is set where sign i is -1
#pragma unroll
    for (int i = 0; i < NVFP4_BLOCK; ++i) v[i] = __fmul_rn(rounded<bf16>(v[i]), NEGATIVE >> i & 1 ? -0.25f : 0.25f);
#pragma unroll
    for (int h = 1; h < NVFP4_BLOCK; h <<= 1) {
#pragma unroll
        for (int i = 0; i < NVFP4_BLOCK; ++i) {
            if (i & h) continue;
            const float a = v[i], b = v[i + h];
            v[i] = __fadd_rn(a, b);
            v[i + h] = __fsub_rn(a, b);
        }
    }
#pragma unroll
    for (int i = 0; i < NVFP4_BLOCK; ++i) v[i] = __fadd_rn(rounded<bf16>(v[i]), 0.f);  // makes -0 positive
}

// ---- 64 x 64 values in shared memory, read as pieces of either copy ---------------------------------------

constexpr int SIDE = 64, PITCH = SIDE + 1;  // a column's elements fall into different banks
constexpr int NVFP4_THREADS = 128, PIECES = SIDE / NVFP4_BLOCK, MINE = SIDE * PIECES / NVFP4_THREADS;

// Where piece `index` (0 .. 255) of a copy lies: its line, and its block along the line.
struct Spot {
    int line, block;
    __device__ __forceinline__ explicit Spot(int index) : line(index / PIECES), block(index % PIECES) {}
};

template <bool Columnwise> __device__ __forceinline__ int tile_at(Spot p, int j) {
    const int along = p.block * NVFP4_BLOCK + j;
    return Columnwise ? along * PITCH + p.line : p.line * PITCH + along;
}
