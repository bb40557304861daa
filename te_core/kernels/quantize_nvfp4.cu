// Casts a matrix to NVFP4, row-wise, transposed, or both, in one launch; and the maxima that it needs before.
// te_core/ops/quantize_nvfp4.py is the rule, te_core/quantized.py the storage.
//
//   maxima           x -> partials [gridDim.x], then as many of the transformed columns (TRANSFORM only)
//   row_maxima       x -> the amax of each row; a block of 256 threads a row          (row_scaled)
//   column_maxima    x -> the amax of each column; 32 columns by 8 rows of threads    (row_scaled)
//   quantize_nvfp4   x, maxima -> data, scales, amax of each copy and all padding
//
// A block takes 64 x 64 elements into shared memory as floats; a thread reads pieces of 16 from it, along a row or
// along a column, so that each line of the tile is a 32-byte sector of data and four bytes of scales. The grid covers
// the padding of the scales (128 lines): blocks there only write zeros. Tiles of 16 x 16 need the maxima (and with
// FOUR_OVER_SIX the errors) of 16 lines, which meet in shared memory.
// Speed not measured: no GPU that multiplies FP4 has run it yet.
//
// -D DTYPE=float|bf16|fp16  ALIGNED=0|1  TILED=0|1  TRANSFORM=0|1  STOCHASTIC=0|1  ROW_SCALED=0|1
//    FOUR_OVER_SIX=0|1|2 (no, absolute errors, squares)
// compile-check: DTYPE=bf16 ALIGNED=1 TILED=0 TRANSFORM=1 STOCHASTIC=1 ROW_SCALED=0 FOUR_OVER_SIX=0
// compile-check: DTYPE=float ALIGNED=0 TILED=1 TRANSFORM=0 STOCHASTIC=0 ROW_SCALED=0 FOUR_OVER_SIX=2
// compile-check: DTYPE=fp16 ALIGNED=1 TILED=1 TRANSFORM=1 STOCHASTIC=1 ROW_SCALED=0 FOUR_OVER_SIX=0
// compile-check: DTYPE=bf16 ALIGNED=1 TILED=0 TRANSFORM=0 STOCHASTIC=0 ROW_SCALED=1 FOUR_OVER_SIX=1
#include "common/fp8_tile.cuh"
#include "common/nvfp4.cuh"
#include "common/philox.cuh"

typedef DTYPE T;

constexpr float SIXTH = 1.f / 6;
constexpr int COLUMNWISE_SITE = 0x40000000;

struct Shared {
    float tile[SIDE * PITCH];
    float line[2][SIDE * PIECES];  // of each piece: its maximum; its errors with both scales
    u8 scale[PIECES][PIECES];      // of each 16 x 16 tile: [line / 16, block]
    u8 scales[2][PIECES][PIECES];  // both candidates
    float scratch[32];
};

// One copy in memory: lines of `blocks` pieces each; `count` lines are not padding.
struct Target {
    u8 *data, *scale;
    float* amax;
    i64 count, lines, blocks, scale_lines, scale_blocks;
    i64 line0, block0;  // where this block's tile begins
    __device__ __forceinline__ Target(u8* data, u8* scale, float* amax, i64 count, i64 length, i64 line0, i64 along0)
        : data(data), scale(scale), amax(amax), count(count), lines(padded(count)),
          blocks(padded(length) / NVFP4_BLOCK), scale_lines((count + 127) & ~i64(127)),
          scale_blocks((blocks + 3) & ~i64(3)), line0(line0), block0(along0 / NVFP4_BLOCK) {}
};

__device__ __forceinline__ void load_tile(const T* x, i64 row0, i64 col0, i64 rows, i64 cols, float* tile) {
    constexpr int V = 16 / sizeof(T), LANES = SIDE / V;
    const int at = threadIdx.x % LANES * V;
#pragma unroll 4
    for (int row = threadIdx.x / LANES; row < SIDE; row += NVFP4_THREADS / LANES) {
        float f[V];
        unpack<T>(fetch_pack<T, ALIGNED>(x, row0 + row, rows, cols, col0 + at, cols), f);
#pragma unroll
        for (int j = 0; j < V; ++j) tile[row * PITCH + at + j] = f[j];
    }
}

template <bool Columnwise> __device__ __forceinline__ void read_piece(const float* tile, Spot p, float (&v)[16]) {
#pragma unroll
    for (int j = 0; j < NVFP4_BLOCK; ++j) v[j] = tile[tile_at<Columnwise>(p, j)];
    if constexpr (TRANSFORM && Columnwise) hadamard(v);
}

// ---- scales ------------------------------------------------------------------------------------------------

// The scale of a block with this maximum; with FOUR_OVER_SIX, the one that maps it to 4 or to 6.
template <bool Four> __device__ __forceinline__ u8 scale_of(float top, const Level& level) {
    if constexpr (FOUR_OVER_SIX) {
        const float base = __fmul_rn(__fdiv_rn(top, 6.f), level.encode);
        return block_scale(Four ? __fmul_rn(base, 1.5f) : base);
    } else {
        return block_scale(__fmul_rn(top, __fmul_rn(level.encode, SIXTH)));
    }
}

// What a piece loses under this scale.
__device__ __forceinline__ float error_of(const float (&v)[16], u8 scale, const Level& level, float range) {
    const float encode = block_encode(scale, level), s = from_fp8<E4M3>(scale);
    float error[16];
#pragma unroll
    for (int j = 0; j < NVFP4_BLOCK; ++j) {
        const float value = __fmul_rn(from_e2m1(to_e2m1(__fmul_rn(v[j], encode))), s);
        const float d = __fsub_rn(__fdiv_rn(__fmul_rn(value, level.amax), range), v[j]);
        error[j] = FOUR_OVER_SIX == 2 ? __fmul_rn(d, d) : fabsf(d);
    }
    return pairwise_sum(error);
}

__device__ __forceinline__ u8 scale_of_piece(const float (&v)[16], const Level& level, float range) {
    const float top = largest(v);
    const u8 six = scale_of<false>(top, level);
    if constexpr (FOUR_OVER_SIX) {
        const u8 four = scale_of<true>(top, level);
        return error_of(v, four, level, range) < error_of(v, six, level, range) ? four : six;
    }
    return six;
}

// s.scale of all sixteen 16 x 16 tiles, from the values of one copy.
template <bool Columnwise>
__device__ __forceinline__ void find_tile_scales(Shared& s, const Level& level, float range) {
    __syncthreads();  // the scales of the other copy have been read
    for (int i = threadIdx.x; i < SIDE * PIECES; i += NVFP4_THREADS) {
        float v[16];
        read_piece<Columnwise>(s.tile, Spot(i), v);
        s.line[0][i] = largest(v);
    }
    __syncthreads();
    const int group = threadIdx.x / PIECES, block = threadIdx.x % PIECES, first = group * NVFP4_BLOCK * PIECES + block;
    if (threadIdx.x < PIECES * PIECES) {
        float top = 0.f;
        for (int line = 0; line < NVFP4_BLOCK; ++line) top = fmaxf(top, s.line[0][first + line * PIECES]);
        s.scale[group][block] = s.scales[0][group][block] = scale_of<false>(top, level);
        if constexpr (FOUR_OVER_SIX) s.scales[1][group][block] = scale_of<true>(top, level);
    }
    __syncthreads();
    if constexpr (FOUR_OVER_SIX) {
        for (int i = threadIdx.x; i < SIDE * PIECES; i += NVFP4_THREADS) {
            const Spot p(i);
            float v[16];
            read_piece<Columnwise>(s.tile, p, v);
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                s.line[k][i] = error_of(v, s.scales[k][p.line / NVFP4_BLOCK][p.block], level, range);
            }
        }
        __syncthreads();
        if (threadIdx.x < PIECES * PIECES) {
            float error[2];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                float lines[NVFP4_BLOCK];
#pragma unroll
                for (int line = 0; line < NVFP4_BLOCK; ++line) lines[line] = s.line[k][first + line * PIECES];
                error[k] = pairwise_sum(lines);
            }
            if (error[1] < error[0]) s.scale[group][block] = s.scales[1][group][block];
        }
        __syncthreads();
    }
}

// ---- the cast ----------------------------------------------------------------------------------------------

// Swapped: s.scale holds the scales of the other copy, whose tiles are the same, transposed.
template <bool Columnwise, bool Swapped>
__device__ __forceinline__ void cast_copy(const Shared& s, const Target& t, const Level& tensor, float range,
                                          const Philox& philox) {
#pragma unroll 1
    for (int i = 0; i < MINE; ++i) {
        const Spot p(threadIdx.x + i * NVFP4_THREADS);
        const i64 line = t.line0 + p.line, block = t.block0 + p.block;
        if (line >= t.scale_lines || block >= t.scale_blocks) continue;
        u8* scale = t.scale + line * t.scale_blocks + block;
        if (line >= t.lines || block >= t.blocks) {
            *scale = 0;
            continue;
        }
        float v[16];
        read_piece<Columnwise>(s.tile, p, v);
        const Level level = ROW_SCALED ? Level(line < t.count ? t.amax[line] : 0.f, range) : tensor;
        u8 code;
        if constexpr (TILED) {
            const int group = p.line / NVFP4_BLOCK;
            code = Swapped ? s.scale[p.block][group] : s.scale[group][p.block];
        } else {
            code = scale_of_piece(v, level, range);
        }
        *scale = code;
        const float encode = block_encode(code, level);
        u32 random[4] = {}, word[2] = {};
        if constexpr (STOCHASTIC) philox.draw(u64(line * t.blocks + block), random);
#pragma unroll
        for (int j = 0; j < NVFP4_BLOCK; ++j) {
            const float scaled = __fmul_rn(v[j], encode);
            const u32 e2m1 = STOCHASTIC ? to_e2m1_stochastic(scaled, random[j / 4] >> (8 * (j % 4)) & 255)
                                        : to_e2m1(scaled);
            word[j / 8] |= e2m1 << (4 * (j % 8));
        }
        *reinterpret_cast<uint2*>(t.data + (line * t.blocks + block) * 8) = make_uint2(word[0], word[1]);
    }
}

__device__ __forceinline__ float maximum_of(const float* partials, int count, float* scratch) {
    float top = 0.f;
    for (int i = threadIdx.x; i < count; i += NVFP4_THREADS) top = fmaxf(top, partials[i]);
    return block_max<NVFP4_THREADS>(top, scratch);
}

// `across`: tiles beside one another. row_* or column_* are null where that copy is not wanted.
extern "C" __global__ void __launch_bounds__(NVFP4_THREADS)
    quantize_nvfp4(const T* x, u8* row_data, u8* row_scale, float* row_amax, u8* column_data, u8* column_scale,
                   float* column_amax, const float* partials, int n_partials, const i64* rng, int site, float range,
                   i64 rows, i64 cols, i64 across) {
    __shared__ Shared s;
    const i64 row0 = i64(blockIdx.x) / across * SIDE, col0 = i64(blockIdx.x) % across * SIDE;
    load_tile(x, row0, col0, rows, cols, s.tile);
    float top = 0.f, column_top = 0.f;
    if constexpr (!ROW_SCALED) {
        top = column_top = maximum_of(partials, n_partials, s.scratch);
        if constexpr (TRANSFORM) column_top = maximum_of(partials + n_partials, n_partials, s.scratch);
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            if (row_amax != nullptr) *row_amax = top;
            if (column_amax != nullptr) *column_amax = column_top;
        }
    }
    const Level level(top, range), column_level(column_top, range);
    if constexpr (TILED) find_tile_scales<false>(s, level, range);
    __syncthreads();
    if (row_data != nullptr) {
        const Target target(row_data, row_scale, row_amax, rows, cols, row0, col0);
        cast_copy<false, false>(s, target, level, range, Philox(STOCHASTIC ? rng : nullptr, site));
    }
    if (column_data == nullptr) return;
    if constexpr (TILED && TRANSFORM) find_tile_scales<true>(s, column_level, range);
    const Target target(column_data, column_scale, column_amax, cols, rows, col0, row0);
    const Philox philox(STOCHASTIC ? rng : nullptr, site ^ COLUMNWISE_SITE);
    cast_copy<true, TILED && !TRANSFORM>(s, target, column_level, range, philox);
}

// ---- maxima ------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(NVFP4_THREADS)
    maxima(const T* x, float* partials, i64 rows, i64 cols, i64 across, i64 tiles) {
    __shared__ Shared s;
    float top = 0.f, transformed = 0.f;
    for (i64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        __syncthreads();
        load_tile(x, tile / across * SIDE, tile % across * SIDE, rows, cols, s.tile);
        __syncthreads();
        for (int i = threadIdx.x; i < SIDE * PIECES; i += NVFP4_THREADS) {
            float v[16];
            read_piece<false>(s.tile, Spot(i), v);
            top = fmaxf(top, largest(v));
            read_piece<true>(s.tile, Spot(i), v);
            transformed = fmaxf(transformed, largest(v));
        }
    }
    top = block_max<NVFP4_THREADS>(top, s.scratch);
    transformed = block_max<NVFP4_THREADS>(transformed, s.scratch);
    if (threadIdx.x > 0) return;
    partials[blockIdx.x] = top;
    partials[gridDim.x + blockIdx.x] = transformed;
}

extern "C" __global__ void __launch_bounds__(256) row_maxima(const T* x, float* amax, i64 cols) {
    __shared__ float scratch[32];
    const T* row = x + i64(blockIdx.x) * cols;
    float top = 0.f;
    for (i64 col = threadIdx.x; col < cols; col += 256) top = fmaxf(top, fabsf(to_float(row[col])));
    top = block_max<256>(top, scratch);
    if (threadIdx.x == 0) amax[blockIdx.x] = top;
}

extern "C" __global__ void __launch_bounds__(256) column_maxima(const T* x, float* amax, i64 rows, i64 cols) {
    __shared__ float tops[8][32];
    const i64 col = i64(blockIdx.x) * 32 + threadIdx.x;
    float top = 0.f;
    if (col < cols) {
#pragma unroll 8
        for (i64 row = threadIdx.y; row < rows; row += 8) top = fmaxf(top, fabsf(to_float(x[row * cols + col])));
    }
    tops[threadIdx.y][threadIdx.x] = top;
    __syncthreads();
    if (threadIdx.y > 0 || col >= cols) return;
    for (int i = 1; i < 8; ++i) top = fmaxf(top, tops[i][threadIdx.x]);
    amax[col] = top;
}
