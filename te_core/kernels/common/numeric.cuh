// Element types, vector access, reductions: what every kernel starts from.
//
// NVRTC compiles this without the host standard library; only the CUDA headers below are used (cub and
// cooperative_groups cost about a second of compile time each and are not).
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

typedef unsigned char u8;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
typedef __nv_bfloat16 bf16;
typedef __half fp16;

// ---- conversions: round to nearest even everywhere -------------------------------------------------------

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(bf16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float to_float(fp16 v) { return __half2float(v); }

template <class T> __device__ __forceinline__ T from_float(float v);
template <> __device__ __forceinline__ float from_float<float>(float v) { return v; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float v) { return __float2bfloat16_rn(v); }
template <> __device__ __forceinline__ fp16 from_float<fp16>(float v) { return __float2half_rn(v); }

// The value as it is after a store in T: fused kernels cast from this, so that fused equals unfused.
template <class T> __device__ __forceinline__ float rounded(float v) { return to_float(from_float<T>(v)); }

// FP8 formats by name: E4M3 = 0, E5M2 = 1 (the -D constants of the kernels use these).
enum Fp8Format { E4M3 = 0, E5M2 = 1 };

template <int F> __device__ __forceinline__ u8 to_fp8(float v) {
    return __nv_cvt_float_to_fp8(v, __NV_SATFINITE, F == E4M3 ? __NV_E4M3 : __NV_E5M2);
}
template <int F> __device__ __forceinline__ unsigned short to_fp8x2(float lo, float hi) {
    return __nv_cvt_float2_to_fp8x2(make_float2(lo, hi), __NV_SATFINITE, F == E4M3 ? __NV_E4M3 : __NV_E5M2);
}
template <int F> __device__ __forceinline__ float from_fp8(u8 v) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(v, F == E4M3 ? __NV_E4M3 : __NV_E5M2)));
}

// ---- vectors: N elements moved by one aligned access (N * sizeof(T) <= 16) -------------------------------

template <class T, int N> struct alignas(sizeof(T) * N) Vec {
    T v[N];
    __device__ __forceinline__ T& operator[](int i) { return v[i]; }
    __device__ __forceinline__ const T& operator[](int i) const { return v[i]; }
};

template <int N, class T> __device__ __forceinline__ Vec<T, N> load(const T* p) {
    return *reinterpret_cast<const Vec<T, N>*>(p);
}
template <int N, class T> __device__ __forceinline__ void store(T* p, const Vec<T, N>& v) {
    *reinterpret_cast<Vec<T, N>*>(p) = v;
}

// ---- reductions -----------------------------------------------------------------------------------------

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
    return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
    return v;
}

// Every thread of the block gets the result. `scratch` holds 32 floats and may be reused after the call.
template <int THREADS> __device__ __forceinline__ float block_sum(float v, float* scratch) {
    v = warp_sum(v);
    if (THREADS <= 32) return v;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if (lane == 0) scratch[warp] = v;
    __syncthreads();
    v = warp_sum(lane < THREADS / 32 ? scratch[lane] : 0.f);
    __syncthreads();
    return v;
}
template <int THREADS> __device__ __forceinline__ float block_max(float v, float* scratch) {
    v = warp_max(v);
    if (THREADS <= 32) return v;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if (lane == 0) scratch[warp] = v;
    __syncthreads();
    v = warp_max(lane < THREADS / 32 ? scratch[lane] : 0.f);
    __syncthreads();
    return v;
}

// Raise *p to v. Both are >= 0, where the order of floats is the order of their bits; fmaxf dropped any NaN.
__device__ __forceinline__ void atomic_raise(float* p, float v) {
    if (v > 0.f) atomicMax(reinterpret_cast<u32*>(p), __float_as_uint(v));
}

// ---- current scaling: the scale of a tensor from its maximum (te_core.ops.quantize states the rule) ------

__device__ __forceinline__ float scale_from_amax(float amax, float limit, float epsilon, bool power_of_two) {
    if (amax < epsilon) amax = epsilon;
    if (!(amax > 0.f) || isinf(amax)) return 1.f;
    float s = __fdiv_rn(limit, amax);
    if (isinf(s)) s = __uint_as_float(0x7f7fffffu);
    if (power_of_two) s = __uint_as_float(__float_as_uint(s) & 0xff800000u);
    return s;
}
