// FP8 with a scale for each 1x128 piece or 128x128 tile: both copies from one reading of x, in one launch.
//
//   x [rows, cols] of T, dense             rowwise, columnwise and their scales: common/block_tile.cuh, which does it
//
// Measured 2026-11-21, H200, 8192 x 4096 bf16, against a copy's 4.23 TB/s: both copies 35.8 us after a clean flush (90 %;
// 39.1 us, 82 % after a dirty one), row-wise 25.8 us (93 %), with column sums 40.7 us (79 %).
// H100, 2026-11-28, of a copy's 3.04 TB/s: both copies 46.4 us (95 %), of 16384 x 8192 188 us.
// With GROUPED=1 the file's kernel is quantize_block_grouped: several matrices of one width, by a table of CAPACITY.
// With GROUPED=2 it is quantize_block_rows: groups of rows whose sizes are on the device, which lie as those of
// quantize_rows (quantize_grouped.cu); scales of the rowwise copy [cols / 128, row_pitch], of the other [pitch / 128, cols].
//
// -D DTYPE=float|bf16|fp16  FORMAT=E4M3|E5M2  TILED=0|1  ROWWISE=0|1  COLUMNWISE=0|1  COLUMN_SUM=0|1  ALIGNED=0|1
// compile-check: DTYPE=bf16 FORMAT=E4M3 TILED=0 ROWWISE=1 COLUMNWISE=1 COLUMN_SUM=0 ALIGNED=1
// compile-check: DTYPE=bf16 FORMAT=E4M3 TILED=1 ROWWISE=1 COLUMNWISE=1 COLUMN_SUM=0 ALIGNED=1
// compile-check: DTYPE=bf16 FORMAT=E5M2 TILED=0 ROWWISE=1 COLUMNWISE=1 COLUMN_SUM=1 ALIGNED=1
// compile-check: DTYPE=bf16 FORMAT=E4M3 TILED=0 ROWWISE=1 COLUMNWISE=0 COLUMN_SUM=0 ALIGNED=1
// compile-check: DTYPE=fp16 FORMAT=E4M3 TILED=0 ROWWISE=0 COLUMNWISE=1 COLUMN_SUM=0 ALIGNED=0
// compile-check: DTYPE=float FORMAT=E5M2 TILED=0 ROWWISE=1 COLUMNWISE=1 COLUMN_SUM=1 ALIGNED=0
// compile-check: DTYPE=float FORMAT=E4M3 TILED=1 ROWWISE=0 COLUMNWISE=1 COLUMN_SUM=0 ALIGNED=1
// compile-check: DTYPE=bf16 FORMAT=E4M3 TILED=0 ROWWISE=1 COLUMNWISE=1 COLUMN_SUM=1 ALIGNED=1 GROUPED=1 CAPACITY=48
// compile-check: DTYPE=bf16 FORMAT=E4M3 TILED=1 ROWWISE=1 COLUMNWISE=1 COLUMN_SUM=0 ALIGNED=1 GROUPED=1 CAPACITY=384
// compile-check: DTYPE=bf16 FORMAT=E4M3 TILED=0 ROWWISE=1 COLUMNWISE=1 COLUMN_SUM=0 ALIGNED=1 GROUPED=2
// compile-check: DTYPE=fp16 FORMAT=E5M2 TILED=0 ROWWISE=0 COLUMNWISE=1 COLUMN_SUM=0 ALIGNED=0 GROUPED=2
#include "common/block_tile.cuh"
#include "common/groups.cuh"

#ifndef GROUPED
#define GROUPED 0
#endif

typedef DTYPE T;
typedef BlockShape<T> Shape;
typedef BlockCast<FORMAT, TILED, ROWWISE, COLUMNWISE, COLUMN_SUM, ALIGNED> Delivered;

#if GROUPED == 2
extern "C" __global__ void __launch_bounds__(Shape::THREADS, Shape::RESIDENT)
    quantize_block_rows(const T* x, u8* rowwise, float* row_scale, u8* columnwise, float* column_scale,
                        const int* offsets, i64 cols, i64 pitch, i64 row_pitch, int total, int groups, int across,
                        float epsilon, int power_of_two) {
    const int number = blockIdx.x / across;
    const GroupTile g = group_tile(offsets, groups, total, number);
    if (g.e < 0) return;
    const Rows among = {g.rows, (g.rows + 127) / 128 * 128, pitch, row_pitch};
    const Matrix<T> producer = {x + g.start * cols, cols};
    const BlockSink sink = {rowwise + g.start * cols, row_scale + g.start, columnwise + 128 * i64(g.first),
                            column_scale + g.first * cols, nullptr};
    quantize_tile<T, Delivered>(producer, sink, epsilon, power_of_two, g.rows, cols, across,
                                blockIdx.x - u32(g.first * across), &among);
}
#elif GROUPED
struct Group {
    const T* x;
    BlockSink sink;
    i64 rows;
    u32 first, unused;
};
struct Table {
    Group group[CAPACITY];
    i64 cols;
    float epsilon;
    int power_of_two, count;
    u32 across;
};

extern "C" __global__ void __launch_bounds__(Shape::THREADS, Shape::RESIDENT)
    quantize_block_grouped(const __grid_constant__ Table table) {
    const Group& g = table.group[group_of(table, blockIdx.x)];
    const Matrix<T> producer = {g.x, table.cols};
    quantize_tile<T, Delivered>(producer, g.sink, table.epsilon, table.power_of_two, g.rows, table.cols, table.across,
                                blockIdx.x - g.first);
}
#else
extern "C" __global__ void __launch_bounds__(Shape::THREADS, Shape::RESIDENT)
    quantize_block(const T* x, u8* rowwise, float* row_scale, u8* columnwise, float* column_scale, float* column_sum,
                   float epsilon, int power_of_two, i64 rows, i64 cols, int across) {
    const Matrix<T> producer = {x, cols};
    const BlockSink sink = {rowwise, row_scale, columnwise, column_scale, column_sum};
    quantize_tile<T, Delivered>(producer, sink, epsilon, power_of_two, rows, cols, across, blockIdx.x);
}
#endif
