// quantize.cu for several matrices of one width in one launch, each with a scale of its own.
//
//   x [rows of a group, cols] of T, dense    rowwise, columnwise as in quantize.cu
// SCALING as there: GIVEN_SCALE and OWN_SCALE cast; NO_CAST leaves partial maxima of each group at its `amax`, in a tile
// order that is that of quantize.cu, and so column sums of the same bits.
// Bandwidth: that of quantize.cu less the last wave; benchmarks/modules.py measures it within GroupedLinear.
//
// -D DTYPE=float|bf16|fp16  FORMAT=E4M3|E5M2  SCALING=…  TALL=0|1  COLUMNWISE=0|1  COLUMN_SUM=0|1  ALIGNED=0|1
//    CAPACITY=… (80 bytes each: 48 fit the 4 KB of every device, 384 the 32,764 bytes of CUDA 12.1 and later)
// compile-check: DTYPE=bf16 FORMAT=E4M3 SCALING=GIVEN_SCALE TALL=1 COLUMNWISE=1 COLUMN_SUM=0 ALIGNED=1 CAPACITY=48
// compile-check: DTYPE=bf16 FORMAT=E5M2 SCALING=GIVEN_SCALE TALL=1 COLUMNWISE=1 COLUMN_SUM=1 ALIGNED=1 CAPACITY=384
// compile-check: DTYPE=float FORMAT=E5M2 SCALING=OWN_SCALE TALL=1 COLUMNWISE=1 COLUMN_SUM=0 ALIGNED=0 CAPACITY=48
// compile-check: DTYPE=bf16 FORMAT=E4M3 SCALING=NO_CAST TALL=0 COLUMNWISE=0 COLUMN_SUM=0 ALIGNED=1 CAPACITY=48
// compile-check: DTYPE=fp16 FORMAT=E4M3 SCALING=NO_CAST TALL=1 COLUMNWISE=0 COLUMN_SUM=1 ALIGNED=1 CAPACITY=48
#include "common/fp8_tile.cuh"
#include "common/groups.cuh"

typedef DTYPE T;

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
