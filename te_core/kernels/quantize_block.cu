// FP8 with a scale for each 1x128 piece or 128x128 tile: both copies from one reading of x, in one launch.
//
//   x [rows, cols] of T, dense             rowwise    [padded(rows), padded(cols)], pieces along its rows
//   q = sat_cast(float32(x) * scale)       columnwise its transpose, pieces along its rows too, which are x's columns
//
// padded() rounds up to 16; the tail is written as zeros, its scales as those of zeros. Scales are stored inverse:
// pieces [blocks along the copy's rows, rows of the copy]; TILED [row blocks, blocks up to a multiple of 4].
//
// A block of threads takes one 128x128 tile. A thread owns V = 16 / sizeof(T) neighbouring columns of sixteen rows,
// as in common/fp8_tile.cuh, whose stores it shares. x waits in shared memory, each thread's part in places of its
// own: it comes by asynchronous copies that hold no registers, so that six blocks (three of float) keep a
// multiprocessor's share of the memory busy, and is read there twice, for the maxima and for the cast. Sixteen lanes
// side by side cover 128 columns of 16-bit elements: a row's maximum takes fifteen exchanges for sixteen rows, after
// which each lane has one row. Two lanes below one another turn 32 rows, a whole sector of the transposed copy.
// Measured 2026-11-21, H200, 8192 x 4096 bf16, against a copy's 4.23 TB/s: both copies 35.8 us after a clean flush (90 %;
// 39.1 us, 82 % after a dirty one), row-wise 25.8 us (93 %), with column sums 40.7 us (79 %).
// With GROUPED=1 the file's kernel is quantize_block_grouped: several matrices of one width, by a table of CAPACITY.
//
// -D DTYPE=float|bf16|fp16  FORMAT=E4M3|E5M2  TILED=0|1  ROWWISE=0|1  COLUMNWISE=0|1  COLUMN_SUM=0|1  ALIGNED=0|1
// compile-check: DTYPE=bf16 FORMAT=E4M3 TILED=0 ROWWISE=1 COLUMNWISE=1 COLUMN_SUM=0 ALIGNED=1
// compile-check: DTYPE=bf16 FORMAT=E4M3 TILED=1 ROWWISE=1 COLUMNWISE=1 COLUMN_SUM=0 ALIGNED=1
// compile-check: DTYPE=bf16 FORMAT=E5M2 TILED=0 ROWWISE=1 COLUMNWISE=1 COLUMN_SUM=1 ALIGNED=1
// compile-check: DTYPE=bf16 FORMAT=E4M3 TILED=0 ROWWISE=1 COLUMNWISE=0 COLUMN_SUM=0 ALIGNED=1
// compile-check: DTYPE=fp16 FORMAT=E4M3 TILED=0 ROWWISE=0 COLUMNWISE=1 COLUMN_SUM=0 ALIGNED=0
// compile-check: DTYPE=float FORMAT=E5M2 TILED=0 ROWWISE=1 COLUMNWISE=1 COLUMN_SUM=1 ALIGNED=0
// compile-check: DTYPE=float FORMAT=E4M3 TILED=1 ROWWISE=0 COLUMNWISE=1 COLUMN_SUM=0 ALIGNED=1
// compile-check: DTYPE=bf16 FORMAT=E4M3 TILED=0 ROWWISE=1 COLUMNWISE=1 COLUMN_SUM=1 ALIGNED=1 GROUPED=1 CAPACITY=48
// compile-check: DTYPE=bf16 FORMAT=E4M3 TILED=1 ROWWISE=1 COLUMNWISE=1 COLUMN_SUM=0 ALIGNED=1 GROUPED=1 CAPACITY=384
#include "common/fp8_tile.cuh"
#include "common/groups.cuh"

#ifndef GROUPED
#define GROUPED 0
#endif

typedef DTYPE T;

constexpr int SIDE = 128, V = 16 / sizeof(T), ROWS = 16;
constexpr int LANES_N = 16, WARPS_N = SIDE / (LANES_N * V), WARPS_M = SIDE / (32 / LANES_N * ROWS);
constexpr int THREADS = 32 * WARPS_N * WARPS_M;
constexpr float LIMIT = FORMAT == E4M3 ? 448.f : 57344.f;

#if __CUDA_ARCH__ >= 890
constexpr int UNROLL = ROWS / 4;
#else
constexpr int UNROLL = 1;  // each conversion to FP8 is a long piece of code there: unrolled, it compiles for 8 seconds
#endif

// The largest finite value of the input type: the scale of a block so small that the quotient overflows.
__device__ __forceinline__ float largest(float) { return __uint_as_float(0x7f7fffffu); }
__device__ __forceinline__ float largest(bf16) { return __uint_as_float(0x7f7f0000u); }
__device__ __forceinline__ float largest(fp16) { return 65504.f; }

struct Rule {
    float epsilon;
    int power_of_two;
    __device__ __forceinline__ float operator()(float amax) const {
        return scale_from_amax(amax, LIMIT, epsilon, power_of_two != 0, largest(T()));
    }
};

// What the warps tell one another. `row` and `column` hold maxima, then (in the first of each) the scales.
struct Exchange {
    float row[WARPS_N][SIDE];
    float column[WARPS_M][SIDE];
    float sum[COLUMN_SUM ? WARPS_M : 1][SIDE];
};

// This thread's sixteen rows begin on their way to its places in shared memory.
__device__ __forceinline__ void fetch_rows(const T* x, uint4* mine, i64 row, i64 rows, i64 col, i64 cols) {
    const i64 left = col < cols ? rows - row : 0;
    const int inside = left < 0 ? 0 : (left < ROWS ? int(left) : ROWS);
    const T* p = x + row * cols + col;
#pragma unroll
    for (int i = 0; i < ROWS; ++i, p += cols) {
        if constexpr (ALIGNED) {
            copy_async(mine + i * THREADS, p, i < inside);
        } else {
            const Pack pack = fetch_pack<T, false>(p, 0, i < inside, 0, 0, cols - col);
            mine[i * THREADS] = make_uint4(pack.w[0], pack.w[1], pack.w[2], pack.w[3]);
        }
    }
    commit_copies();
}

__device__ __forceinline__ Pack held_row(const uint4* mine, int i) {
    const uint4 v = mine[i * THREADS];
    return Pack{{v.x, v.y, v.z, v.w}};
}

// Lanes D apart share out 2 D maxima: each keeps those of its own half and gives the others away.
template <int D> __device__ __forceinline__ void halve(float (&v)[ROWS], int lane) {
    const bool upper = (lane & D) != 0;
#pragma unroll
    for (int i = 0; i < D; ++i) {
        const float keep = upper ? v[i + D] : v[i], give = upper ? v[i] : v[i + D];
        v[i] = fmaxf(keep, __shfl_xor_sync(~0u, give, D));
    }
}

// Each of sixteen lanes brings a maximum for each of sixteen rows and leaves with that of the row of its own number.
__device__ __forceinline__ float own_maximum(float (&v)[ROWS], int lane) {
    halve<8>(v, lane);
    halve<4>(v, lane);
    halve<2>(v, lane);
    halve<1>(v, lane);
    return v[0];
}

// The maxima of this warp's rows and columns (in a tile: of the warp, over both), and its column sums.
__device__ __forceinline__ void gather(const uint4* mine, Exchange& shared, int lane, int warp_n, int warp_m) {
    float tops[ROWS], sum[V] = {};
    Pack column = {};
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const Pack pack = held_row(mine, i);
        if constexpr (ROWWISE && !TILED) {
            u32 top = 0;
            raise<T>(top, pack);
            tops[i] = highest<T>(top);
        }
        if constexpr (COLUMNWISE || TILED) {
#pragma unroll
            for (int w = 0; w < 4; ++w) column.w[w] = Words<T>::raise(column.w[w], pack.w[w]);
        }
        if constexpr (COLUMN_SUM) {
            float f[V];
            unpack<T>(pack, f);
#pragma unroll
            for (int j = 0; j < V; ++j) sum[j] += f[j];
        }
    }
    const int place = (warp_n * LANES_N + lane % LANES_N) * V;
    if constexpr (TILED) {
        u32 top = 0;
        raise<T>(top, column);
        const float amax = warp_max(highest<T>(top));
        if (lane == 0) shared.row[0][warp_m * WARPS_N + warp_n] = amax;
    } else {
        if constexpr (ROWWISE) shared.row[warp_n][warp_m * 32 + lane] = own_maximum(tops, lane);
        if constexpr (COLUMNWISE) {
            float f[V];
            unpack<T>(column, f);
#pragma unroll
            for (int j = 0; j < V; ++j) {
                f[j] = fmaxf(f[j], __shfl_xor_sync(~0u, f[j], LANES_N));
                if (lane < LANES_N) shared.column[warp_m][place + j] = f[j];
            }
        }
    }
    if constexpr (COLUMN_SUM) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
            sum[j] += __shfl_xor_sync(~0u, sum[j], LANES_N);
            if (lane < LANES_N) shared.sum[warp_m][place + j] = sum[j];
        }
    }
}

// The maximum of a row or column over the warps that share it; `shared` and not a register keeps its scale.
template <int N> __device__ __forceinline__ float to_scale(float (&part)[N][SIDE], int t, const Rule& rule) {
    float top = part[0][t];
#pragma unroll
    for (int n = 1; n < N; ++n) top = fmaxf(top, part[n][t]);
    return part[0][t] = rule(top);
}

// The scales of a copy's pieces in this tile: `at` is a thread's row of the copy, `block` the piece's number.
__device__ __forceinline__ void store_piece(float* out, float scale, i64 block, i64 at, i64 height) {
    if (at < height) out[block * height + at] = __fdiv_rn(1.f, scale);
}

// The scale of a tile of a copy at (row, block) of `blocks`; the last in its row also fills up to a multiple of four.
__device__ __forceinline__ void store_tile(float* out, float scale, const Rule& rule, i64 row, i64 block, i64 blocks) {
    const i64 pitch = (blocks + 3) & ~i64(3), at = block + threadIdx.x;
    if (at < (block + 1 == blocks ? pitch : block + 1)) {
        out[row * pitch + at] = __fdiv_rn(1.f, threadIdx.x ? rule(0.f) : scale);
    }
}

struct Target {
    u8* rowwise;
    float* row_scale;
    u8* columnwise;
    float *column_scale, *column_sum;
};

// Tile number `block`, of `across` side by side.
__device__ __forceinline__ void quantize_tile(const T* x, const Target& target, float epsilon, int power_of_two,
                                              i64 rows, i64 cols, u32 across, u32 block) {
    const auto [rowwise, row_scale, columnwise, column_scale, column_sum] = target;
    __shared__ Exchange shared;
    extern __shared__ uint4 held[];
    const Rule rule = {epsilon, power_of_two};
    const int t = threadIdx.x % SIDE, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int warp_n = warp % WARPS_N, warp_m = warp / WARPS_N;
    const int left = (warp_n * LANES_N + lane % LANES_N) * V, top = (warp_m * (32 / LANES_N) + lane / LANES_N) * ROWS;
    const i64 tile_m = block / across, tile_n = block % across;
    const i64 row = tile_m * SIDE + top, col = tile_n * SIDE + left;
    const Place at = {col, cols, padded(cols), padded(rows)};
    uint4* mine = held + threadIdx.x;

    fetch_rows(x, mine, row, rows, col, cols);
    wait_copies<0>();
    gather(mine, shared, lane, warp_n, warp_m);
    __syncthreads();

    float tile_scale = 1.f;
    if constexpr (TILED) {
        float amax = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS_M * WARPS_N; ++w) amax = fmaxf(amax, shared.row[0][w]);
        tile_scale = rule(amax);
        const i64 down = (rows + SIDE - 1) / SIDE;
        if constexpr (ROWWISE) store_tile(row_scale, tile_scale, rule, tile_m, tile_n, across);
        if constexpr (COLUMNWISE) store_tile(column_scale, tile_scale, rule, tile_n, tile_m, down);
    } else {  // of 128 threads each has a row and a column, of 256 a row or a column
        if (ROWWISE && threadIdx.x < SIDE) {
            store_piece(row_scale, to_scale(shared.row, t, rule), tile_n, tile_m * SIDE + t, at.height);
        }
        if (COLUMNWISE && threadIdx.x >= THREADS - SIDE) {
            store_piece(column_scale, to_scale(shared.column, t, rule), tile_m, tile_n * SIDE + t, at.pitch);
        }
    }
    if (COLUMN_SUM && threadIdx.x < SIDE && tile_n * SIDE + t < cols) {
        float total = shared.sum[0][t];
#pragma unroll
        for (int w = 1; w < WARPS_M; ++w) total += shared.sum[COLUMN_SUM ? w : 0][t];
        column_sum[tile_m * cols + tile_n * SIDE + t] = total;
    }
    if constexpr (!TILED) __syncthreads();

    float across_scale[V];
#pragma unroll
    for (int j = 0; j < V; ++j) across_scale[j] = TILED ? tile_scale : shared.column[0][left + j];
    u32 column[1][V][4] = {};
    u8* to = rowwise + row * at.pitch + col;
    const bool inside = row < at.height && col < at.pitch;  // these sixteen rows and V columns are so as a whole
#pragma unroll(UNROLL)
    for (int g = 0; g < ROWS; g += 4) {
        u32 square[V / 4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i, to += at.pitch) {
            const float row_factor = TILED ? tile_scale : shared.row[0][top + g + i];
            float f[V];
            unpack<T>(held_row(mine, g + i), f);
            u32 words[V / 4];
#pragma unroll
            for (int w = 0; w < V / 4; ++w) {
                const float *p = f + 4 * w, *s = across_scale + 4 * w;
                if constexpr (ROWWISE || TILED) {
                    const float r = row_factor;
                    words[w] = to_fp8x4<FORMAT>(p[0] * r, p[1] * r, p[2] * r, p[3] * r);
                }
                if constexpr (COLUMNWISE) {
                    square[w][i] = TILED ? words[w]
                                         : to_fp8x4<FORMAT>(p[0] * s[0], p[1] * s[1], p[2] * s[2], p[3] * s[3]);
                }
            }
            if constexpr (ROWWISE) {
                if (inside) store_row<V, true>(to, words, col, at.pitch);
            }
        }
        if constexpr (COLUMNWISE) push_square<V>(square, column[0]);
    }
    if constexpr (COLUMNWISE) store_columns(columnwise, row, at, column);
}

#if GROUPED
struct Group {
    const T* x;
    Target target;
    i64 rows;
    u32 first, unused;
};
struct Table {
    Group group[CAPACITY];
    i64 cols;
    float epsilon;
    int power_of_two, count;
    u32 across;
};

extern "C" __global__ void __launch_bounds__(THREADS, sizeof(T) == 4 ? 3 : 6)
    quantize_block_grouped(const __grid_constant__ Table table) {
    const Group& g = table.group[group_of(table, blockIdx.x)];
    quantize_tile(g.x, g.target, table.epsilon, table.power_of_two, g.rows, table.cols, table.across,
                  blockIdx.x - g.first);
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, sizeof(T) == 4 ? 3 : 6)
    quantize_block(const T* x, u8* rowwise, float* row_scale, u8* columnwise, float* column_scale, float* column_sum,
                   float epsilon, int power_of_two, i64 rows, i64 cols, int across) {
    quantize_tile(x, {rowwise, row_scale, columnwise, column_scale, column_sum}, epsilon, power_of_two, rows, cols,
                  across, blockIdx.x);
}
#endif
