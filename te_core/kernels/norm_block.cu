// LayerNorm (KIND=LAYER) and RMSNorm (KIND=RMS) to FP8 with a scale for each block: the second of two launches.
//
//   x [rows, cols] of T, dense; gamma, beta [cols] of GAMMA; mean, rstd [rows] float32, which norm_forward.cu has found
//   rowwise, columnwise and their scales: common/block_tile.cuh, of y rounded to T as norm_forward.cu rounds it
//
// The tiles are taken from the end: what the first launch has read last is still in L2.
// Measured 2026-11-28, H100, RMSNorm 8192 x 4096 bf16, both orientations: both launches 74.9 us; norm_forward to values
// and quantize_block after it 93.7 us.
//
// options: -default-device
// -D DTYPE=float|bf16|fp16  GAMMA=…  KIND=RMS|LAYER  ZERO_CENTERED=0|1
//    FORMAT=E4M3|E5M2  TILED=0|1  ROWWISE=0|1  COLUMNWISE=0|1  COLUMN_SUM=0|1  ALIGNED=0|1
// compile-check: DTYPE=bf16 GAMMA=bf16 KIND=RMS ZERO_CENTERED=0 FORMAT=E4M3 TILED=0 ROWWISE=1 COLUMNWISE=1 COLUMN_SUM=0 ALIGNED=1
// compile-check: DTYPE=bf16 GAMMA=float KIND=LAYER ZERO_CENTERED=1 FORMAT=E4M3 TILED=0 ROWWISE=1 COLUMNWISE=1 COLUMN_SUM=0 ALIGNED=1
// compile-check: DTYPE=fp16 GAMMA=fp16 KIND=LAYER ZERO_CENTERED=0 FORMAT=E5M2 TILED=0 ROWWISE=1 COLUMNWISE=0 COLUMN_SUM=0 ALIGNED=0
// compile-check: DTYPE=float GAMMA=bf16 KIND=LAYER ZERO_CENTERED=1 FORMAT=E4M3 TILED=1 ROWWISE=1 COLUMNWISE=1 COLUMN_SUM=0 ALIGNED=1
#include "common/block_tile.cuh"
#include "common/row.cuh"

enum Kind { RMS = 0, LAYER = 1 };

typedef DTYPE T;
typedef BlockShape<T> Shape;
typedef BlockCast<FORMAT, TILED, ROWWISE, COLUMNWISE, COLUMN_SUM, ALIGNED> Delivered;
constexpr int V = Shape::V;
constexpr int MIN_BLOCKS = KIND == LAYER ? Shape::RESIDENT * 2 / 3 : Shape::RESIDENT;  // gamma and beta take registers

struct Normed {
    static constexpr int OUTPUTS = 1, OPERANDS = 1;
    static constexpr bool AS_IT_IS = false;
    const T* x;
    const GAMMA *gamma, *beta;
    const float *mean, *rstd;
    i64 rows, cols;
    __device__ __forceinline__ const T* operand(int) const { return x; }
    __device__ __forceinline__ i64 pitch(int) const { return cols; }

    __device__ __forceinline__ void of_columns(const GAMMA* p, i64 col, float (&f)[V]) const {
        if constexpr (ALIGNED) {
            if (col < cols) to_floats(load_vec<V>(p + col), f);
        } else {
#pragma unroll
            for (int j = 0; j < V; ++j) f[j] = col + j < cols ? to_float(p[col + j]) : 0.f;
        }
    }
    __device__ __forceinline__ void values(const Pack (&raw)[1], Pack (&out)[1], i64 row, i64 col) const {
        const bool inside = row < rows;
        const float2 moment = {KIND == LAYER && inside ? mean[row] : 0.f, inside ? rstd[row] : 0.f};
        float f[V], gain[V] = {}, shift[V] = {};
        unpack<T>(raw[0], f);
        of_columns(gamma, col, gain);
        if (KIND == LAYER) of_columns(beta, col, shift);
#pragma unroll
        for (int j = 0; j < V; ++j) {
            if (ZERO_CENTERED) gain[j] += 1.f;
            f[j] = normalized<KIND == LAYER>(f[j], moment, gain[j], shift[j]);
            if (!inside || col + j >= cols) f[j] = 0.f;
        }
        out[0] = rounded_pack<T>(f);
    }
};

extern "C" __global__ void __launch_bounds__(Shape::THREADS, MIN_BLOCKS)
    norm_block(const T* x, const GAMMA* gamma, const GAMMA* beta, const float* mean, const float* rstd, u8* rowwise,
               float* row_scale, u8* columnwise, float* column_scale, float* column_sum, float epsilon,
               int power_of_two, i64 rows, i64 cols, int across) {
    const Normed producer = {x, gamma, beta, mean, rstd, rows, cols};
    const BlockSink sink = {rowwise, row_scale, columnwise, column_scale, column_sum};
    quantize_tile<T, Delivered>(producer, sink, epsilon, power_of_two, rows, cols, across, gridDim.x - 1 - blockIdx.x);
}
