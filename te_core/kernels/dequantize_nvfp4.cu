// NVFP4 back to values of T: e2m1 * ((scale * amax) * unit), unit = 1 / (6 * bound), from either copy.
//
//   COLUMNWISE=0   out [count, length], a line of the copy is a row
//   COLUMNWISE=1   out [length, count], a line of the copy is a column; length is a multiple of 16
// A block turns 64 lines by 64 values in shared memory, so that out is written along its rows whatever it begins at.
//
// -D DTYPE=float|bf16|fp16  COLUMNWISE=0|1  ROW_SCALED=0|1
// compile-check: DTYPE=bf16 COLUMNWISE=0 ROW_SCALED=0
// compile-check: DTYPE=float COLUMNWISE=1 ROW_SCALED=1
// compile-check: DTYPE=fp16 COLUMNWISE=1 ROW_SCALED=0
#include "common/nvfp4.cuh"

typedef DTYPE T;

extern "C" __global__ void __launch_bounds__(NVFP4_THREADS)
    dequantize_nvfp4(const u8* data, const u8* scales, const float* amax, T* out, float unit, i64 count, i64 length,
                     i64 across) {
    __shared__ float tile[SIDE * PITCH];
    const i64 line0 = i64(blockIdx.x) / across * SIDE, along0 = i64(blockIdx.x) % across * SIDE;
    const i64 blocks = (length + NVFP4_BLOCK - 1) / NVFP4_BLOCK, scale_blocks = (blocks + 3) & ~i64(3);
    for (int i = threadIdx.x; i < SIDE * PIECES; i += NVFP4_THREADS) {
        const Spot p(i);
        const i64 line = line0 + p.line, block = along0 / NVFP4_BLOCK + p.block;
        if (line >= count || block >= blocks) continue;
        const uint2 raw = __ldg(reinterpret_cast<const uint2*>(data + (line * blocks + block) * 8));
        const float s = from_fp8<E4M3>(scales[line * scale_blocks + block]);
        const float scale = __fmul_rn(__fmul_rn(s, amax[ROW_SCALED ? line : 0]), unit);
#pragma unroll
        for (int j = 0; j < NVFP4_BLOCK; ++j) {
            const u32 code = (j < 8 ? raw.x : raw.y) >> (4 * (j % 8));
            tile[tile_at<COLUMNWISE>(p, j)] = __fmul_rn(from_e2m1(code), scale);
        }
    }
    __syncthreads();
    const i64 row0 = COLUMNWISE ? along0 : line0, col0 = COLUMNWISE ? line0 : along0;
    const i64 rows = COLUMNWISE ? length : count, cols = COLUMNWISE ? count : length;
    for (int i = threadIdx.x; i < SIDE * SIDE; i += NVFP4_THREADS) {
        const i64 row = row0 + i / SIDE, col = col0 + i % SIDE;
        if (row < rows && col < cols) out[row * cols + col] = from_float<T>(tile[i / SIDE * PITCH + i % SIDE]);
    }
}
