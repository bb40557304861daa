// Dense transposed copy: x [rows, cols] -> out [cols, rows], elements of SIZE = 1, 2 or 4 bytes.
//
// ALIGNED (rows, cols and both addresses multiples of 16 bytes): a thread owns a square of V x V elements, V =
// 16 / SIZE, loads V rows of 16 bytes, transposes in registers and stores V rows of 16 bytes; eight lanes side by side
// read 128-byte lines, four below one another write 64 bytes, four warps make a square tile of 2 x 2.
// Otherwise: 32 x 32 elements through shared memory, element by element. Bandwidth not measured yet:
// benchmarks/quantize.py prints it.
//
// -D SIZE=1|2|4  ALIGNED=0|1
// compile-check: SIZE=1 ALIGNED=1
// compile-check: SIZE=2 ALIGNED=1
// compile-check: SIZE=4 ALIGNED=1
// compile-check: SIZE=1 ALIGNED=0
// compile-check: SIZE=2 ALIGNED=0
// compile-check: SIZE=4 ALIGNED=0
#include "common/fp8_tile.cuh"

typedef Bits<SIZE>::type T;

constexpr int V = 16 / SIZE;

// Words of rows r[V] become words of columns.
__device__ __forceinline__ void transpose_square(u32 (&r)[V][4]) {
    if constexpr (SIZE == 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < i; ++j) {
                const u32 t = r[i][j];
                r[i][j] = r[j][i], r[j][i] = t;
            }
        }
    } else {
        // Squares of 4 / SIZE elements are transposed in place of their words, then the squares are exchanged.
        constexpr int K = 4 / SIZE;
#pragma unroll
        for (int i = 0; i < V; i += K) {
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                if constexpr (SIZE == 1) {
                    transpose_4x4(r[i][w], r[i + 1][w], r[i + 2][w], r[i + 3][w]);
                } else {
                    const u32 a = r[i][w], b = r[i + 1][w];
                    r[i][w] = __byte_perm(a, b, 0x5410), r[i + 1][w] = __byte_perm(a, b, 0x7632);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int w = 0; w < i; ++w) {
#pragma unroll
                for (int k = 0; k < K; ++k) {
                    const u32 t = r[i * K + k][w];
                    r[i * K + k][w] = r[w * K + k][i], r[w * K + k][i] = t;
                }
            }
        }
    }
}

#if ALIGNED
extern "C" __global__ void __launch_bounds__(TILE_THREADS) transpose(const T* x, T* out, i64 rows, i64 cols) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i64 col = (i64(blockIdx.x) * 16 + warp % 2 * 8 + lane % 8) * V;
    const i64 row = (i64(blockIdx.y) * 8 + warp / 2 * 4 + lane / 8) * V;
    if (row >= rows || col >= cols) return;
    u32 r[V][4];
#pragma unroll
    for (int i = 0; i < V; ++i) {
        const uint4 raw = __ldg(reinterpret_cast<const uint4*>(x + (row + i) * cols + col));
        r[i][0] = raw.x, r[i][1] = raw.y, r[i][2] = raw.z, r[i][3] = raw.w;
    }
    transpose_square(r);
#pragma unroll
    for (int i = 0; i < V; ++i) {
        *reinterpret_cast<uint4*>(out + (col + i) * rows + row) = make_uint4(r[i][0], r[i][1], r[i][2], r[i][3]);
    }
}
#else
extern "C" __global__ void __launch_bounds__(TILE_THREADS) transpose(const T* x, T* out, i64 rows, i64 cols) {
    __shared__ T tile[32][33];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i64 row0 = i64(blockIdx.y) * 32, col0 = i64(blockIdx.x) * 32;
    for (int r = warp; r < 32; r += TILE_THREADS / 32) {
        if (row0 + r < rows && col0 + lane < cols) tile[r][lane] = x[(row0 + r) * cols + col0 + lane];
    }
    __syncthreads();
    for (int c = warp; c < 32; c += TILE_THREADS / 32) {
        if (col0 + c < cols && row0 + lane < rows) out[(col0 + c) * rows + row0 + lane] = tile[lane][c];
    }
}
#endif
