// E8M0 scales: a byte e that means 2^(e - 127). The rule is stated in te_core/backends/cpu/quantize_mxfp8.py.
#pragma once
#include "common/numeric.cuh"

// The code of a block's scale: amax / limit of the FP8 format, rounded up to a power of two by the bits of the float.
// A power of two has no mantissa to carry; 2^-127 is one, too, but a subnormal. Infinity is 254; amax is never NaN.
template <int Format> __device__ __forceinline__ u32 e8m0_code(float amax) {
    const u32 bits = __float_as_uint(__fmul_rn(amax, 1.f / (Format == E4M3 ? 448.f : 57344.f)));
    const u32 code = (bits + (bits > 0x00800000u ? 0x007fffffu : 0x003fffffu)) >> 23;
    return code < 254u ? code : 254u;
}

// What a value is multiplied by to get it back.
__device__ __forceinline__ float e8m0_value(u32 code) {
    return __uint_as_float(code == 0u ? 0x00400000u : code == 255u ? 0x7fc00000u : code << 23);
}
// What a value is multiplied by before the cast: 2^(127 - code), for codes up to 254.
__device__ __forceinline__ float e8m0_inverse(u32 code) { return e8m0_value(254u - code); }
