// Max |x| over dense elements of T (NaN ignored): one partial for each block, written, not accumulated, so nothing
// needs to be zeroed before. A launch of one block writes the final value.
//
//   amax          x [count] -> out [gridDim.x]      256 threads, four 16-byte loads in flight a thread
//   amax_finish   partials [gridDim.x, count] -> out [gridDim.x]      a block of 256 threads for each
// The elements before the first and after the last 16-byte boundary are taken one by one, by block 0.
// Bandwidth not measured yet: benchmarks/quantize.py prints it.
//
// -D DTYPE=float|bf16|fp16
// compile-check: DTYPE=bf16
// compile-check: DTYPE=fp16
// compile-check: DTYPE=float
#include "common/fp8_tile.cuh"

typedef DTYPE T;
constexpr int THREADS = 256, LOADS = 4;

extern "C" __global__ void __launch_bounds__(THREADS) amax(const T* x, float* out, i64 count) {
    __shared__ float scratch[32];
    constexpr int V = 16 / sizeof(T);
    const i64 offset = i64((16 - (reinterpret_cast<u64>(x) & 15)) & 15) / sizeof(T);
    const i64 head = offset < count ? offset : count, packs = (count - head) / V;
    const uint4* body = reinterpret_cast<const uint4*>(x + head);

    u32 top = 0;
    const i64 stride = i64(gridDim.x) * THREADS;
    i64 i = i64(blockIdx.x) * THREADS + threadIdx.x;
    for (; i + (LOADS - 1) * stride < packs; i += LOADS * stride) {
        uint4 raw[LOADS];
#pragma unroll
        for (int k = 0; k < LOADS; ++k) raw[k] = __ldg(body + i + k * stride);
#pragma unroll
        for (int k = 0; k < LOADS; ++k) raise<T>(top, Pack{{raw[k].x, raw[k].y, raw[k].z, raw[k].w}});
    }
    for (; i < packs; i += stride) {
        const uint4 raw = __ldg(body + i);
        raise<T>(top, Pack{{raw.x, raw.y, raw.z, raw.w}});
    }
    float edge = 0.f;
    if (blockIdx.x == 0) {
        if (threadIdx.x < head) edge = fmaxf(edge, fabsf(to_float(x[threadIdx.x])));
        const i64 tail = head + packs * V + threadIdx.x;
        if (tail < count) edge = fmaxf(edge, fabsf(to_float(x[tail])));
    }
    const float most = block_max<THREADS>(fmaxf(edge, highest<T>(top)), scratch);
    if (threadIdx.x == 0) out[blockIdx.x] = most;
}

extern "C" __global__ void __launch_bounds__(THREADS) amax_finish(const float* partials, float* out, int count) {
    __shared__ float scratch[32];
    const float* mine = partials + i64(blockIdx.x) * count;
    float top = 0.f;
    for (int i = threadIdx.x; i < count; i += THREADS) top = fmaxf(top, mine[i]);
    top = block_max<THREADS>(top, scratch);
    if (threadIdx.x == 0) out[blockIdx.x] = top;
}
