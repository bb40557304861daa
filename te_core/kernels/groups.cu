// Groups of rows whose sizes are on the device: where each begins, and the column sums of each.
//
// -D SIZE=int|i64 (group_offsets)  DTYPE=bf16|fp16|float OUT=bf16|fp16|float (group_sums)  GROUPS: of a launch's table
// compile-check: SIZE=i64 DTYPE=bf16 OUT=bf16 GROUPS=16
// compile-check: SIZE=int DTYPE=float OUT=float GROUPS=192
#include "common/numeric.cuh"

// offsets [groups + 1]: running sums of sizes. One warp. What is negative counts as 0, and sums end at `rows`; `faults`
// counts calls whose sizes are not those of `rows` rows.
extern "C" __global__ void group_offsets(const SIZE* sizes, int* offsets, int* faults, int groups, int rows) {
    const int lane = threadIdx.x;
    i64 before = 0;
    bool fault = false;
    if (lane == 0) offsets[0] = 0;
    for (int e0 = 0; e0 < groups; e0 += 32) {
        const int e = e0 + lane;
        const i64 given = e < groups ? i64(sizes[e]) : 0;
        i64 sum = given < 0 ? 0 : given > rows ? i64(rows) + 1 : given;  // so that no sum overflows
        fault |= given < 0;
#pragma unroll
        for (int o = 1; o < 32; o <<= 1) {
            const i64 x = __shfl_up_sync(~0u, sum, o);
            if (lane >= o) sum += x;
        }
        if (e < groups) offsets[e + 1] = int(min(before + sum, i64(rows)));
        before += __shfl_sync(~0u, sum, 31);
    }
    fault |= before != rows;
    if (__any_sync(~0u, fault) && lane == 0 && faults) *faults += 1;
}

struct Table {
    const DTYPE* x;  // [.., cols]
    const int* offsets;
    OUT* out[GROUPS];  // [cols] each, or none
    int cols;
};

// Each out: the column sums of a group's rows, in the order of eight rows at a time. A block adds 64 columns of a group.
extern "C" __global__ void group_sums(const __grid_constant__ Table table) {
    __shared__ float sums[8][64];
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32, across = (table.cols + 63) / 64;
    const int e = blockIdx.x / across, col = blockIdx.x % across * 64 + 2 * lane;
    OUT* out = table.out[e];
    if (!out) return;
    float one = 0.f, two = 0.f;
    const bool first = col < table.cols, second = col + 1 < table.cols;
    for (int r = table.offsets[e] + row; r < table.offsets[e + 1]; r += 8) {
        const DTYPE* at = table.x + i64(r) * table.cols + col;
        if (first) one += to_float(at[0]);
        if (second) two += to_float(at[1]);
    }
    sums[row][2 * lane] = one, sums[row][2 * lane + 1] = two;
    __syncthreads();
    if (threadIdx.x >= 64) return;
    const int c = blockIdx.x % across * 64 + threadIdx.x;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += sums[i][threadIdx.x];
    if (c < table.cols) out[c] = from_float<OUT>(sum);
}
