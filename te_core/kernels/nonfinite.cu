// Counts the values of dense elements of T that are no numbers: out[0] += NaNs, out[1] += infinities. What many launches
// find adds up; integers, so in any order the same.
//
//   nonfinite     x [count] -> out [2]      256 threads, 16-byte loads, one atomic a block that found something
// The elements before the first and after the last 16-byte boundary are taken one by one, by block 0.
// Only regions with check_finite launch it. Bandwidth not measured.
//
// -D DTYPE=float|bf16|fp16
// compile-check: DTYPE=bf16
// compile-check: DTYPE=fp16
// compile-check: DTYPE=float
#include "common/numeric.cuh"

typedef DTYPE T;
constexpr int THREADS = 256;

__device__ __forceinline__ void look(T value, u32& nans, u32& infinities) {
    const float v = to_float(value);
    nans += isnan(v);
    infinities += isinf(v) != 0;
}

extern "C" __global__ void __launch_bounds__(THREADS) nonfinite(const T* x, u64* out, i64 count) {
    constexpr int V = 16 / sizeof(T);
    const i64 offset = i64((16 - (reinterpret_cast<u64>(x) & 15)) & 15) / sizeof(T);
    const i64 head = offset < count ? offset : count, packs = (count - head) / V;
    const uint4* body = reinterpret_cast<const uint4*>(x + head);
    u32 nans = 0, infinities = 0;
    for (i64 i = i64(blockIdx.x) * THREADS + threadIdx.x; i < packs; i += i64(gridDim.x) * THREADS) {
        const uint4 raw = __ldg(body + i);
        const T* values = reinterpret_cast<const T*>(&raw);
#pragma unroll
        for (int k = 0; k < V; ++k) look(values[k], nans, infinities);
    }
    if (blockIdx.x == 0) {
        if (threadIdx.x < head) look(x[threadIdx.x], nans, infinities);
        const i64 tail = head + packs * V + threadIdx.x;
        if (tail < count) look(x[tail], nans, infinities);
    }
    __shared__ u32 found[2];
    if (threadIdx.x < 2) found[threadIdx.x] = 0;
    __syncthreads();
    if (nans) atomicAdd(found, nans);
    if (infinities) atomicAdd(found + 1, infinities);
    __syncthreads();
    if (threadIdx.x < 2 && found[threadIdx.x]) atomicAdd(out + threadIdx.x, u64(found[threadIdx.x]));
}
