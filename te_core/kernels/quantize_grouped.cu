// quantize.cu for several matrices of one width in one launch, each with a scale of its own.
//
//   x [rows of a group, cols] of T, dense    rowwise, columnwise as in quantize.cu
// SCALING as there: GIVEN_SCALE and OWN_SCALE cast; NO_CAST leaves partial maxima of each group at its `amax`, in a tile
// order that is that of quantize.cu, and so column sums of the same bits.
// Bandwidth: that of quantize.cu less the last wave; benchmarks/modules.py measures it within GroupedLinear.
//
// With BY_OFFSETS=1 the file's kernel is quantize_rows: groups of rows of one matrix, whose sizes are on the device. The rows
// of the rowwise copy lie as those of x; in the transposed copy [cols, pitch] a group begins at a multiple of 128
// columns and is followed by zeros up to the next one.
//
// -D DTYPE=float|bf16|fp16  FORMAT=E4M3|E5M2  SCALING=…  TALL=0|1  COLUMNWISE=0|1  COLUMN_SUM=0|1  ALIGNED=0|1
//    CAPACITY=… (80 bytes each: 48 fit the 4 KB of every device, 384 the 32,764 bytes of CUDA 12.1 and later)
// compile-check: DTYPE=bf16 FORMAT=E4M3 SCALING=GIVEN_SCALE TALL=1 COLUMNWISE=1 COLUMN_SUM=0 ALIGNED=1 CAPACITY=48
// compile-check: DTYPE=bf16 FORMAT=E5M2 SCALING=GIVEN_SCALE TALL=1 COLUMNWISE=1 COLUMN_SUM=1 ALIGNED=1 CAPACITY=384
// compile-check: DTYPE=float FORMAT=E5M2 SCALING=OWN_SCALE TALL=1 COLUMNWISE=1 COLUMN_SUM=0 ALIGNED=0 CAPACITY=48
// compile-check: DTYPE=bf16 FORMAT=E4M3 SCALING=NO_CAST TALL=0 COLUMNWISE=0 COLUMN_SUM=0 ALIGNED=1 CAPACITY=48
// compile-check: DTYPE=fp16 FORMAT=E4M3 SCALING=NO_CAST TALL=1 COLUMNWISE=0 COLUMN_SUM=1 ALIGNED=1 CAPACITY=48
// compile-check: DTYPE=bf16 FORMAT=E4M3 SCALING=GIVEN_SCALE TALL=1 COLUMNWISE=1 COLUMN_SUM=0 ALIGNED=1 BY_OFFSETS=1
// compile-check: DTYPE=fp16 FORMAT=E5M2 SCALING=OWN_SCALE TALL=1 COLUMNWISE=1 COLUMN_SUM=0 ALIGNED=0 BY_OFFSETS=1
// compile-check: DTYPE=bf16 FORMAT=E4M3 SCALING=NO_CAST TALL=1 COLUMNWISE=0 COLUMN_SUM=0 ALIGNED=1 BY_OFFSETS=1
#include "common/fp8_tile.cuh"
#include "common/groups.cuh"

#ifndef BY_OFFSETS
#define BY_OFFSETS 0
#endif

typedef DTYPE T;

#if BY_OFFSETS
// A block takes a tile of 128 rows, `across` of them side by side. `source`: NO_CAST and OWN_SCALE have a maximum for
// each tile there, GIVEN_SCALE a scale for each group, `source_step` floats apart. `amax` is raised for each group.
extern "C" __global__ void __launch_bounds__(TILE_THREADS, 5)
    quantize_rows(const T* x, u8* rowwise, u8* columnwise, const int* offsets, float* source, float* scale_inv,
                  float* amax, i64 cols, i64 pitch, int total, int groups, int across, int source_step, int amax_step,
                  float epsilon, int power_of_two) {
    const int number = blockIdx.x / across;
    if (SCALING != NO_CAST && blockIdx.x == 0) {
        for (int e = threadIdx.x; e < groups; e += TILE_THREADS) {
            const bool none = offsets[e + 1] <= offsets[e];
            if (none) scale_inv[e] = SCALING == GIVEN_SCALE ? __fdiv_rn(1.f, source[i64(e) * source_step]) : 1.f;
        }
    }
    const GroupTile g = group_tile(offsets, groups, total, number);
    if (g.e < 0) return;
    const u32 down = (g.rows + 127) / 128;
    float* maxima = source + i64(g.first) * across;
    float* top = SCALING == NO_CAST ? maxima : amax ? amax + i64(g.e) * amax_step : nullptr;
    const BlockPlace place = {blockIdx.x % across, u32(number - g.first), u32(across), down};
    const Rows among = {g.rows, 128 * i64(down), pitch, 0};
    const Matrix<T> producer = {x + g.start * cols, cols};
    const TileSink<T> sink = {nullptr, rowwise ? rowwise + g.start * cols : nullptr, columnwise + 128 * i64(g.first),
                              top, nullptr};
    const TileScale scaling = {SCALING == GIVEN_SCALE ? source + i64(g.e) * source_step : maxima, int(down) * across,
                               epsilon, power_of_two, scale_inv + g.e};
    walk_tiles<T, FORMAT, SCALING, TALL, COLUMNWISE, COLUMN_SUM, false, ALIGNED>(producer, sink, scaling, g.rows, cols,
                                                                                 1, place, &among);
}
#else

struct Group {
    const T* x;
    u8 *rowwise, *columnwise;
    const float* source;
    float *scale_inv, *amax, *column_sum;  // column_sum: the partial sums, [down, cols]
    i64 rows;
    u32 first, down;
    int steps, n_partials;
};
struct Table {
    Group group[CAPACITY];
    i64 cols;
    float epsilon;
    int power_of_two, count;
    u32 across;
};

extern "C" __global__ void __launch_bounds__(TILE_THREADS, TALL ? 5 : 6)
    quantize_grouped(const __grid_constant__ Table table) {
    const Group& g = table.group[group_of(table, blockIdx.x)];
    const u32 block = blockIdx.x - g.first;
    const BlockPlace place = {block % table.across, block / table.across, table.across, g.down};
    const Matrix<T> producer = {g.x, table.cols};
    const TileSink<T> sink = {nullptr, g.rowwise, g.columnwise, g.amax, g.column_sum};
    const TileScale scaling = {g.source, g.n_partials, table.epsilon, table.power_of_two, g.scale_inv};
    walk_tiles<T, FORMAT, SCALING, TALL, COLUMNWISE, COLUMN_SUM, false, ALIGNED>(producer, sink, scaling, g.rows,
                                                                                 table.cols, g.steps, place);
}
#endif
