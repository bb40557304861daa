// Casts a matrix to FP8 with an E8M0 scale for each 32 elements along a row, along a column, or for each 32x32 tile, in
// one launch that reads x once. The rule is stated in te_core/backends/cpu/quantize_mxfp8.py.
//
//   x [rows, cols] of T, dense                      h, w: rows and cols rounded up to 32; H, W: to 128
//   rowwise    [h, w], scales [H, W / 32]           columnwise [h, w] (not transposed), scales [H / 32, W]
//
// A warp takes 32 rows of 8 * V columns (V = 16 / sizeof(T)): a thread holds V neighbouring columns of eight rows, so
// maxima go along a column by two shuffles of packed words and along a row by two (bf16, fp16) or three (float). The
// row-wise scales of a block of warps are gathered in shared memory, to be stored four bytes at a time. Blocks cover
// [H, W], so that each byte of all four outputs has one writer; all of x that a thread needs is loaded at once.
//
// -D DTYPE=float|bf16|fp16  FORMAT=E4M3|E5M2  ROWWISE=0|1  COLUMNWISE=0|1  TILED=0|1  COLUMN_SUM=0|1  ALIGNED=0|1
// compile-check: DTYPE=bf16 FORMAT=E4M3 ROWWISE=1 COLUMNWISE=1 TILED=0 COLUMN_SUM=1 ALIGNED=1
// compile-check: DTYPE=fp16 FORMAT=E5M2 ROWWISE=1 COLUMNWISE=1 TILED=1 COLUMN_SUM=0 ALIGNED=1
// compile-check: DTYPE=float FORMAT=E4M3 ROWWISE=1 COLUMNWISE=0 TILED=0 COLUMN_SUM=1 ALIGNED=0
// compile-check: DTYPE=float FORMAT=E5M2 ROWWISE=0 COLUMNWISE=1 TILED=0 COLUMN_SUM=0 ALIGNED=1
#include "common/e8m0.cuh"
#include "common/fp8_tile.cuh"

typedef DTYPE T;
constexpr int V = 16 / sizeof(T), SIDE = 32;
constexpr int LANES_N = 8, LANES_M = 4, ROWS = SIDE / LANES_M;  // of a warp; rows of a thread
constexpr int N = TILE_THREADS / 32 * LANES_N * V;              // columns of a block
constexpr int BLOCK_LANES = SIDE / V;                           // lanes beside one another that share a row-wise scale
constexpr int SCALE_WORDS = N / SIDE / 4;                       // row-wise scales of a row of a block, four a word

// The maximum over lanes whose numbers differ by FROM, 2 * FROM, .. below TO; a NaN has lost before.
template <int FROM, int TO> __device__ __forceinline__ u32 across_lanes(u32 top) {
#pragma unroll
    for (int d = FROM; d < TO; d <<= 1) top = Words<T>::raise(top, __shfl_xor_sync(~0u, top, d));
    return top;
}

__device__ __forceinline__ u32 row_code(const Pack& x) {
    u32 top = 0;
    raise<T>(top, x);
    return e8m0_code<FORMAT>(highest<T>(across_lanes<1, BLOCK_LANES>(top)));
}

// The code of the 32x32 tile that this thread is in.
__device__ __forceinline__ u32 tile_code(const Pack (&x)[ROWS]) {
    u32 top = 0;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) raise<T>(top, x[i]);
    return e8m0_code<FORMAT>(highest<T>(across_lanes<LANES_N, 32>(across_lanes<1, BLOCK_LANES>(top))));
}

// The codes of a thread's columns, as bytes, and what their values are multiplied by.
__device__ __forceinline__ void column_codes(const Pack (&x)[ROWS], u32 (&codes)[V / 4], float (&inverse)[V]) {
    Pack top = {};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) top.w[w] = Words<T>::raise(top.w[w], x[i].w[w]);
        top.w[w] = across_lanes<LANES_N, 32>(top.w[w]);
    }
    float amax[V];
    unpack<T>(top, amax);
#pragma unroll
    for (int w = 0; w < V / 4; ++w) codes[w] = 0;
#pragma unroll
    for (int j = 0; j < V; ++j) {
        const u32 code = e8m0_code<FORMAT>(amax[j]);
        codes[j / 4] |= code << (8 * (j % 4));
        inverse[j] = e8m0_inverse(code);
    }
}

// V values times their scales (one for all, or one each) as bytes.
template <int SCALES>
__device__ __forceinline__ void cast(const float (&f)[V], const float (&scale)[SCALES], u32 (&words)[V / 4]) {
#pragma unroll
    for (int w = 0; w < V / 4; ++w) {
        float p[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) p[j] = f[4 * w + j] * scale[SCALES == 1 ? 0 : 4 * w + j];
        words[w] = to_fp8x4<FORMAT>(p[0], p[1], p[2], p[3]);
    }
}

extern "C" __global__ void __launch_bounds__(TILE_THREADS, 5)
    quantize_mxfp8(const T* x, u8* rowwise, u8* row_scales, u8* columnwise, u8* column_scales, float* column_sum,
                   i64 rows, i64 cols) {
    __shared__ u32 gathered[SIDE][SCALE_WORDS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int place = (warp * LANES_N + lane % LANES_N) * V;  // of the thread's columns in the block
    const i64 col = i64(blockIdx.x) * N + place;
    const i64 height = (rows + 31) & ~i64(31), width = (cols + 31) & ~i64(31);
    const i64 scale_height = (rows + 127) & ~i64(127), scale_width = (cols + 127) & ~i64(127);
    float sum[V] = {};

    // Blocks below one another take turns, as far as the host bounds their number.
    for (i64 row0 = i64(blockIdx.y) * SIDE; row0 < scale_height; row0 += i64(gridDim.y) * SIDE) {
        const i64 row = row0 + lane / LANES_N;  // and every fourth after it: a warp loads 128 bytes of four rows
        Pack v[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) v[i] = fetch_pack<T, ALIGNED>(x, row + i * LANES_M, rows, cols, col, cols);

        const bool inside = row0 < height && col < width;
        u32 tile = 0;
        float inverse[V];
        if constexpr (TILED) tile = tile_code(v);
        if constexpr (COLUMNWISE) {
            u32 codes[V / 4];
            if constexpr (TILED) {
#pragma unroll
                for (int w = 0; w < V / 4; ++w) codes[w] = tile * 0x01010101u;
            } else {
                column_codes(v, codes, inverse);
            }
            u8* to = column_scales + row0 / SIDE * scale_width;
            if (lane < LANES_N) store_row<V, true>(to + col, codes, col, scale_width);
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int line = lane / LANES_N + i * LANES_M;
            const i64 at = (row0 + line) * width + col, edge = inside ? width : 0;
            float f[V];
            u32 words[V / 4];
            unpack<T>(v[i], f);
            if constexpr (COLUMN_SUM) {
#pragma unroll
                for (int j = 0; j < V; ++j) sum[j] += f[j];
            }
            if constexpr (ROWWISE || TILED) {
                const u32 code = TILED ? tile : row_code(v[i]);
                const float one[1] = {e8m0_inverse(code)};
                cast(f, one, words);
                if constexpr (ROWWISE) {
                    store_row<V, true>(rowwise + at, words, col, edge);
                    if (lane % BLOCK_LANES == 0) reinterpret_cast<u8*>(gathered[line])[place / SIDE] = u8(code);
                }
            }
            if constexpr (COLUMNWISE) {
                if constexpr (!TILED) cast(f, inverse, words);
                store_row<V, true>(columnwise + at, words, col, edge);
            }
        }
        if constexpr (ROWWISE) {
            __syncthreads();
            const int line = threadIdx.x / SCALE_WORDS, word = threadIdx.x % SCALE_WORDS;
            const i64 block = i64(blockIdx.x) * (N / SIDE) + word * 4, pitch = scale_width / SIDE;
            if (line < SIDE && block < pitch) {
                *reinterpret_cast<u32*>(row_scales + (row0 + line) * pitch + block) = gathered[line][word];
            }
            __syncthreads();  // before the next rows' scales come
        }
    }
    if constexpr (COLUMN_SUM) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
#pragma unroll
            for (int d = LANES_N; d < 32; d <<= 1) sum[j] += __shfl_xor_sync(~0u, sum[j], d);
            if (lane < LANES_N && col + j < cols) column_sum[blockIdx.y * cols + col + j] = sum[j];
        }
    }
}
