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

// NVRTC 13.0 knows no INFINITY: a later one finds it in a header that these include.
__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

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
// Four values to four bytes, saturating. One instruction a pair, where the device has it, straight into the word.
template <int F> __device__ __forceinline__ u32 to_fp8x4(float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 890
    u32 word;
    if (F == E4M3) {
        asm("{.reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1; cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3;"
            " mov.b32 %0, {lo, hi};}" : "=r"(word) : "f"(a), "f"(b), "f"(c), "f"(d));
    } else {
        asm("{.reg .b16 lo, hi; cvt.rn.satfinite.e5m2x2.f32 lo, %2, %1; cvt.rn.satfinite.e5m2x2.f32 hi, %4, %3;"
            " mov.b32 %0, {lo, hi};}" : "=r"(word) : "f"(a), "f"(b), "f"(c), "f"(d));
    }
    return word;
#else
    return to_fp8x2<F>(a, b) | u32(to_fp8x2<F>(c, d)) << 16;
#endif
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

// The plain type of so many bytes, for moving elements whose value does not matter.
template <int BYTES> struct Bits;
template <> struct Bits<1> { typedef u8 type; };
template <> struct Bits<2> { typedef unsigned short type; };
template <> struct Bits<4> { typedef u32 type; };
template <> struct Bits<8> { typedef uint2 type; };
template <> struct Bits<16> { typedef uint4 type; };

// Rows of four bytes in, columns of four bytes out.
__device__ __forceinline__ void transpose_4x4(u32& a, u32& b, u32& c, u32& d) {
    const u32 ab_lo = __byte_perm(a, b, 0x5140), ab_hi = __byte_perm(a, b, 0x7362);
    const u32 cd_lo = __byte_perm(c, d, 0x5140), cd_hi = __byte_perm(c, d, 0x7362);
    a = __byte_perm(ab_lo, cd_lo, 0x5410);
    b = __byte_perm(ab_lo, cd_lo, 0x7632);
    c = __byte_perm(ab_hi, cd_hi, 0x5410);
    d = __byte_perm(ab_hi, cd_hi, 0x7632);
}

// ---- asynchronous copies to shared memory: each thread closes and awaits groups of its own ----------------

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all but the last N commits have arrived.
template <int N> __device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
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

// ---- the scale of a tensor or block from its maximum (te_core.ops.quantize states the rule) --------------

__device__ __forceinline__ float scale_from_amax(float amax, float limit, float epsilon, bool power_of_two,
                                                 float at_overflow = 3.402823466e38f) {
    if (amax < epsilon) amax = epsilon;
    if (!(amax > 0.f) || isinf(amax)) return 1.f;
    float s = __fdiv_rn(limit, amax);
    if (isinf(s)) s = at_overflow;
    if (power_of_two) s = __uint_as_float(__float_as_uint(s) & 0xff800000u);
    return s;
}
