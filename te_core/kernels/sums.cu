// Column and row sums of a dense row-major [rows, cols], added in float32 in an order that only the shape decides.
//
// column_parts: grid (cols / (32 * WIDE), parts), block (32, 8). A thread adds WIDE neighbouring columns (one load:
//               16 bytes where alignment allows, else WIDE = 1) of every eighth of the block's `span` rows; out is
//               [parts, cols]. column_sum.cu adds the parts.
// row_sum:      one block of 256 a row. FP8 input (IN = u8, format FP8) is multiplied by *scale.
// Called by backends/cuda/sums.py.
// compile-check: IN=bf16 FP8=E4M3 OUT=float WIDE=8
// compile-check: IN=float FP8=E4M3 OUT=bf16 WIDE=1
// compile-check: IN=u8 FP8=E5M2 OUT=bf16 WIDE=1
#include "common/numeric.cuh"

constexpr int GROUPS = 8;

__device__ __forceinline__ float to_float(u8 v) { return from_fp8<FP8>(v); }

extern "C" __global__ void __launch_bounds__(32 * GROUPS)
column_parts(const IN* __restrict__ x, OUT* __restrict__ out, i64 rows, i64 cols, i64 span) {
    __shared__ float sums[GROUPS][32 * WIDE];
    const int lane = threadIdx.x, group = threadIdx.y;
    const i64 left = blockIdx.x * (32LL * WIDE), column = left + lane * WIDE;
    const i64 first = blockIdx.y * span;
    const i64 last = first + span < rows ? first + span : rows;
    float sum[WIDE] = {};
    if (column < cols) {
#pragma unroll 4
        for (i64 row = first + group; row < last; row += GROUPS) {
            Vec<IN, WIDE> v = load<WIDE>(x + row * cols + column);
#pragma unroll
            for (int i = 0; i < WIDE; ++i) sum[i] += to_float(v[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < WIDE; ++i) sums[group][32 * i + lane] = sum[i];  // no two lanes in one bank
    __syncthreads();
    for (int t = group * 32 + lane; t < 32 * WIDE && left + t < cols; t += 32 * GROUPS) {
        float total = 0.f;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) total += sums[g][32 * (t % WIDE) + t / WIDE];
        out[blockIdx.y * cols + left + t] = from_float<OUT>(total);
    }
}

extern "C" __global__ void __launch_bounds__(256)
row_sum(const IN* __restrict__ x, const float* scale, OUT* __restrict__ out, i64 rows, i64 cols) {
    __shared__ float scratch[32];
    const i64 row = blockIdx.x;
    float sum = 0.f;
    for (i64 column = threadIdx.x; column < cols; column += 256) sum += to_float(x[row * cols + column]);
    sum = block_sum<256>(sum, scratch);
    if (threadIdx.x == 0) out[row] = from_float<OUT>(scale ? sum * *scale : sum);
}
