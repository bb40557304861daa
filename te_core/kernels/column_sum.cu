// Adds float32 partial rows into one row of T: the second half of every column sum (bias gradients, dgamma, dbeta).
//
//   partials [rows, cols] float32 -> out [cols] of T
// A block takes 32 columns with eight threads each; a thread adds every eighth row, then the eight sums are added in
// order. The order depends on the shape alone, so the result is the same on every run.
// column_sum_grouped does it for several matrices of one width: `across` blocks for each.
//
// -D DTYPE=float|bf16|fp16
// compile-check: DTYPE=float
// compile-check: DTYPE=bf16
#include "common/groups.cuh"

typedef DTYPE T;
constexpr int COLS = 32, GROUPS = 8;

// 128 entries of 24 bytes fit the 4 KB of every device.
struct Part {
    const float* partials;
    T* out;
    int rows;
    u32 first;
};
struct Table {
    Part group[128];
    i64 cols;
    int count;
};

__device__ __forceinline__ void add_partials(const float* partials, T* out, int rows, i64 cols, u32 block) {
    __shared__ float sums[GROUPS][COLS];
    const int lane = threadIdx.x % COLS, group = threadIdx.x / COLS;
    const i64 col = i64(block) * COLS + lane;
    float sum = 0.f;
    if (col < cols) {
#pragma unroll 8
        for (int r = group; r < rows; r += GROUPS) sum += partials[r * cols + col];
    }
    sums[group][lane] = sum;
    __syncthreads();
    if (group > 0 || col >= cols) return;
    for (int g = 1; g < GROUPS; ++g) sum += sums[g][lane];
    out[col] = from_float<T>(sum);
}

extern "C" __global__ void __launch_bounds__(COLS * GROUPS)
    column_sum(const float* partials, T* out, int rows, i64 cols) {
    add_partials(partials, out, rows, cols, blockIdx.x);
}

extern "C" __global__ void __launch_bounds__(COLS * GROUPS)
    column_sum_grouped(const __grid_constant__ Table table) {
    const Part& p = table.group[group_of(table, blockIdx.x)];
    add_partials(p.partials, p.out, p.rows, table.cols, blockIdx.x - p.first);
}
