// MXFP8 back to values: out [rows, cols] of T = float32(q) * 2^(scale - 127), rounded, from either copy.
//
//   COLUMNWISE=0   q [h, w], scales [H, W / 32]         h, w: rows and cols rounded up to 32; H, W: to 128
//   COLUMNWISE=1   q [h, w], scales [H / 32, W]
// A block has 32 rows: a thread takes V = 16 / sizeof(T) columns of every fourth of them, so that the scales of its
// columns are read once. All the rows are in storage, so they are loaded together without a test.
//
// -D DTYPE=float|bf16|fp16  FORMAT=E4M3|E5M2  COLUMNWISE=0|1  ALIGNED=0|1 (rows of out start on 16 bytes)
// compile-check: DTYPE=bf16 FORMAT=E4M3 COLUMNWISE=0 ALIGNED=1
// compile-check: DTYPE=float FORMAT=E5M2 COLUMNWISE=1 ALIGNED=1
// compile-check: DTYPE=fp16 FORMAT=E4M3 COLUMNWISE=1 ALIGNED=0
#include "common/e8m0.cuh"
#include "common/fp8_tile.cuh"

typedef DTYPE T;
constexpr int V = 16 / sizeof(T), SIDE = 32, WARPS = TILE_THREADS / 32, ROWS = SIDE / WARPS;

extern "C" __global__ void __launch_bounds__(TILE_THREADS)
    dequantize_mxfp8(const u8* q, const u8* scales, T* out, i64 rows, i64 cols) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i64 col = (i64(blockIdx.x) * 32 + lane) * V;
    const i64 width = (cols + 31) & ~i64(31), scale_width = (cols + 127) & ~i64(127);
    if (col >= cols) return;
    for (i64 row0 = i64(blockIdx.y) * SIDE; row0 < rows; row0 += i64(gridDim.y) * SIDE) {
        const i64 first = row0 + warp;
        Vec<u8, V> bytes[ROWS], columns;
        u8 own[ROWS];
        if constexpr (COLUMNWISE) columns = load<V>(scales + row0 / SIDE * scale_width + col);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const i64 row = first + i * WARPS;
            bytes[i] = load<V>(q + row * width + col);
            if constexpr (!COLUMNWISE) own[i] = scales[row * (scale_width / SIDE) + col / SIDE];
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const i64 row = first + i * WARPS;
            float f[V];
#pragma unroll
            for (int j = 0; j < V; ++j) {
                f[j] = from_fp8<FORMAT>(bytes[i][j]) * e8m0_value(COLUMNWISE ? columns[j] : own[i]);
            }
            if (row < rows) store_pack<T, ALIGNED>(out + row * cols + col, rounded_pack<T>(f), col, cols);
        }
    }
}
