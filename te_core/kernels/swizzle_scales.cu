// Block scales, one byte each, in the order in which cuBLASLt reads them (te_core/ops/swizzle.py has the formula).
//
//   TRANSPOSED=0   scale [R, C]: a thread makes 16 bytes, the blocks j .. j + 3 of rows i, i + 32, i + 64, i + 96;
//                  a warp takes four such i and eight j, so that it reads and writes whole sectors
//   TRANSPOSED=1   scale [C, R], of an mxfp8 columnwise copy: a thread turns four words of 4 rows x 4 blocks and makes
//                  64 neighbouring bytes
// R is a multiple of 128, C of 4. The tile of 128 x 4 at (I, J) becomes the 512 bytes from (I * C / 4 + J) * 512 on.
//
// -D TRANSPOSED=0|1
// compile-check: TRANSPOSED=0
// compile-check: TRANSPOSED=1
#include "common/numeric.cuh"

#if TRANSPOSED
extern "C" __global__ void __launch_bounds__(256) swizzle_scales(const u8* scale, u8* out, i64 rows, i64 blocks) {
    // A tile has eight threads.
    const i64 job = i64(blockIdx.x) * 256 + threadIdx.x;
    const i64 tiles = blocks / 4, tile = job / 8;
    const int i = job % 8 * 4;
    if (tile >= rows / 128 * tiles) return;
    const u8* from = scale + tile % tiles * 4 * rows + tile / tiles * 128 + i;
    u32 word[4][4];
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
        u32(&w)[4] = word[quarter];
#pragma unroll
        for (int j = 0; j < 4; ++j) w[j] = __ldg(reinterpret_cast<const u32*>(from + j * rows + quarter * 32));
        transpose_4x4(w[0], w[1], w[2], w[3]);
    }
    uint4* to = reinterpret_cast<uint4*>(out + tile * 512) + i;
#pragma unroll
    for (int r = 0; r < 4; ++r) to[r] = make_uint4(word[0][r], word[1][r], word[2][r], word[3][r]);
}
#else
extern "C" __global__ void __launch_bounds__(256) swizzle_scales(const u8* scale, u8* out, i64 rows, i64 blocks) {
    // A block of threads has eight tiles beside one another.
    const i64 tiles = blocks / 4, groups = (tiles + 7) / 8;
    const i64 above = blockIdx.x / groups, tile = blockIdx.x % groups * 8 + threadIdx.x % 8;
    const int i = threadIdx.x / 8;
    if (tile >= tiles) return;
    const u8* from = scale + (above * 128 + i) * blocks + tile * 4;
    u32 word[4];
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
        word[quarter] = __ldg(reinterpret_cast<const u32*>(from + quarter * 32 * blocks));
    }
    uint4* to = reinterpret_cast<uint4*>(out + (above * tiles + tile) * 512) + i;
    *to = make_uint4(word[0], word[1], word[2], word[3]);
}
#endif
