// FP8 with block scales back to values: out [rows, cols] of T = float32(q) * the scale of its block, rounded.
//
//   COLUMNWISE=0   q [padded(rows), padded(cols)]: a thread turns 16 bytes of a row, which share a scale
//   COLUMNWISE=1   q [padded(cols), padded(rows)]: a thread turns 16 x 4 bytes (four columns) into four values of
//                  each of sixteen rows, transposing 4 x 4 bytes at a time in registers; a column's share a scale
// Scales (quantize_block.cu writes them): pieces [blocks, rows of the copy], TILED [row blocks, blocks up to four].
//
// -D DTYPE=float|bf16|fp16  FORMAT=E4M3|E5M2  COLUMNWISE=0|1  TILED=0|1  VECTOR=0|1
// compile-check: DTYPE=bf16 FORMAT=E4M3 COLUMNWISE=0 TILED=0 VECTOR=1
// compile-check: DTYPE=float FORMAT=E5M2 COLUMNWISE=1 TILED=0 VECTOR=1
// compile-check: DTYPE=fp16 FORMAT=E4M3 COLUMNWISE=1 TILED=1 VECTOR=0
#include "common/fp8_tile.cuh"

typedef DTYPE T;

constexpr int SIDE = 128;

// Four FP8 values of a word, times their scales, to out[0..3] (those before `edge`).
__device__ __forceinline__ void put(u32 word, const float (&inverse)[4], T* out, i64 col, i64 edge) {
    Vec<T, 4> v;
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = from_float<T>(from_fp8<FORMAT>(u8(word >> (8 * j))) * inverse[j]);
    if constexpr (VECTOR) {
        if (col < edge) store(out, v);
    } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (col + j < edge) out[j] = v[j];
        }
    }
}

// The scale of row `at` of a copy of `height` rows, `along` elements in; the copy's rows are `length` long.
__device__ __forceinline__ float scale_at(const float* scales, i64 at, i64 along, i64 height, i64 length) {
    if (!TILED) return __ldg(scales + along / SIDE * height + at);
    const i64 blocks = (length + SIDE - 1) / SIDE;
    return __ldg(scales + at / SIDE * ((blocks + 3) & ~i64(3)) + along / SIDE);
}

extern "C" __global__ void __launch_bounds__(TILE_THREADS)
    dequantize_block(const u8* q, const float* scales, T* out, i64 rows, i64 cols) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i64 height = padded(rows), pitch = padded(cols);
#if COLUMNWISE
    const i64 col = (i64(blockIdx.y) * 16 + lane % 16) * 4, row = (i64(blockIdx.x) * 8 + warp * 2 + lane / 16) * 16;
    if (row >= rows || col >= cols) return;
    u32 r[4][4];
    float inverse[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const uint4 raw = __ldg(reinterpret_cast<const uint4*>(q + (col + j) * height + row));
        r[j][0] = raw.x, r[j][1] = raw.y, r[j][2] = raw.z, r[j][3] = raw.w;
        inverse[j] = scale_at(scales, col + j, row, pitch, height);
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        transpose_4x4(r[0][w], r[1][w], r[2][w], r[3][w]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const i64 at = row + 4 * w + i;
            if (at < rows) put(r[i][w], inverse, out + at * cols + col, col, cols);
        }
    }
#else
    const i64 col = (i64(blockIdx.y) * 32 + lane) * 16, row0 = (i64(blockIdx.x) * 4 + warp) * 4;
    if (col >= cols) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const i64 row = row0 + i;
        if (row >= rows) return;
        const float one = scale_at(scales, row, col, height, pitch), inverse[4] = {one, one, one, one};
        const uint4 raw = __ldg(reinterpret_cast<const uint4*>(q + row * pitch + col));
        const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) put(words[w], inverse, out + row * cols + col + 4 * w, col + 4 * w, cols);
    }
#endif
}
