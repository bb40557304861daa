// A step of Adam or AdamW on the masters of quantized matrices, and the matrices' new bytes in the same pass: bit for bit
// what adam.cu and then quantize.cu (a given scale a tensor) or quantize_block.cu (128x128 tiles) make of the masters.
//
//   grad of GRAD, m of MEAN, v of SQUARE, master float [rows, cols], dense
//   rowwise [padded(rows), padded(cols)], columnwise its transpose (COLUMNWISE), scales as in those kernels
//
// A block takes a tile of 128 x 128 of one matrix. A warp has eight whole rows of it, a lane four neighbouring columns, so
// every access is of a whole row of the tile; the bytes are turned in shared memory. VECTOR: rows are a multiple of four
// elements, and all tensors begin on 16 bytes.
//
// -D CAPACITY=… (96 bytes each: 40 fit the 4 KB of every device, 336 the 32,764 bytes of CUDA 12.1 and later)
// options: -default-device
// compile-check: GRAD=bf16 MEAN=bf16 SQUARE=bf16 DECOUPLED=1 FORMAT=E4M3 TILED=0 ROWWISE=1 COLUMNWISE=1 VECTOR=1 CAPACITY=336
// compile-check: GRAD=bf16 MEAN=float SQUARE=float DECOUPLED=1 FORMAT=E4M3 TILED=1 ROWWISE=1 COLUMNWISE=1 VECTOR=1 CAPACITY=40
// compile-check: GRAD=float MEAN=float SQUARE=bf16 DECOUPLED=0 FORMAT=E5M2 TILED=1 ROWWISE=0 COLUMNWISE=1 VECTOR=0 CAPACITY=40
// compile-check: GRAD=fp16 MEAN=bf16 SQUARE=float DECOUPLED=1 FORMAT=E5M2 TILED=0 ROWWISE=1 COLUMNWISE=0 VECTOR=0 CAPACITY=40
#include "common/adam.cuh"
#include "common/tensors.cuh"

constexpr int SIDE = 128, THREADS = 512, ROWS = 8, V = 4;  // rows of a thread, and its columns
constexpr float LIMIT = FORMAT == E4M3 ? 448.f : 57344.f;

struct Entry {
    const GRAD* grad;
    MEAN* m;
    SQUARE* v;
    float* master;
    u8* rowwise;
    u8* columnwise;
    float* row_scale;     // of tiles; of a tensor: scale_inv
    float* column_scale;  // of tiles
    const float* scale;   // of a tensor: given
    float* amax;          // of a tensor: raised, or null
    int rows, cols;
    u32 first;
    u32 across;  // tiles
};
struct Table {
    Entry group[CAPACITY];
    AdamRule rule;
    float epsilon;
    int power_of_two;
    u32 count;
};

__device__ __forceinline__ int padded(int n) { return (n + 15) & ~15; }

// A step of N neighbouring elements, which are left in p.
template <int N>
__device__ __forceinline__ void step(const Entry& e, i64 at, const AdamRule& rule, float (&p)[N]) {
    float g[N], m[N], v[N];
    read_piece<N>(e.grad + at, g);
    read_piece<N>(e.m + at, m);
    read_piece<N>(e.v + at, v);
    read_piece<N>(e.master + at, p);
#pragma unroll
    for (int j = 0; j < N; ++j) adam_step<DECOUPLED>(rule, g[j], p[j], m[j], v[j]);
    write_piece<N>(e.m + at, m);
    write_piece<N>(e.v + at, v);
    write_piece<N>(e.master + at, p);
}

// The scale of a tile at (row, block) of `blocks`; the last of a row fills it up to a multiple of four with scales of zeros.
__device__ __forceinline__ void store_tile(float* out, float scale, const Table& t, int row, int block, int blocks) {
    const int pitch = (blocks + 3) & ~3, at = block + threadIdx.x;
    if (at >= (block + 1 == blocks ? pitch : block + 1)) return;
    out[i64(row) * pitch + at] =
        __fdiv_rn(1.f, threadIdx.x ? scale_from_amax(0.f, LIMIT, t.epsilon, t.power_of_two != 0) : scale);
}

// The scale of this tile's values, known to every thread; its inverse goes where it is kept.
__device__ __forceinline__ float find_scale(const Entry& e, const Table& t, float top, int down, int right) {
    __shared__ float scratch[32];
    if constexpr (!TILED) {
        const float scale = *e.scale;
        if (blockIdx.x == e.first && threadIdx.x == 0) *e.row_scale = __fdiv_rn(1.f, scale);
        if (e.amax != nullptr) {
            top = block_max<THREADS>(top, scratch);
            if (threadIdx.x == 0) atomic_raise(e.amax, top);
        }
        return scale;
    }
    const float scale = scale_from_amax(block_max<THREADS>(top, scratch), LIMIT, t.epsilon, t.power_of_two != 0);
    const int tiles_down = (e.rows + SIDE - 1) / SIDE;
    if (ROWWISE) store_tile(e.row_scale, scale, t, down, right, e.across);
    if (COLUMNWISE) store_tile(e.column_scale, scale, t, right, down, tiles_down);
    return scale;
}

// The tile's bytes as columns: a thread takes eight rows of four columns.
__device__ __forceinline__ void store_columns(const Entry& e, const u32 (&tile)[SIDE][SIDE / V + 1], int row, int col) {
    const int up = threadIdx.x % 16 * 8, word = threadIdx.x / 16;
    u32 low[4], high[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) low[k] = tile[up + k][word], high[k] = tile[up + 4 + k][word];
    transpose_4x4(low[0], low[1], low[2], low[3]);
    transpose_4x4(high[0], high[1], high[2], high[3]);
    const int height = padded(e.rows);
    if (row + up >= height) return;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const int at = col + word * V + k;
        if (at < padded(e.cols)) {
            *reinterpret_cast<uint2*>(e.columnwise + i64(at) * height + row + up) = make_uint2(low[k], high[k]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) adam_quantized(const __grid_constant__ Table table) {
    __shared__ u32 tile[SIDE][SIDE / V + 1];
    if (skips(table.rule)) return;
    const Entry& e = table.group[group_of(table, blockIdx.x)];
    const AdamRule rule = with_numbers(table.rule);
    const int number = blockIdx.x - e.first, down = number / e.across, right = number % e.across;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int col = right * SIDE + lane * V, row = down * SIDE + warp * ROWS;
    float p[ROWS][V] = {}, top = 0.f;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const i64 at = i64(row + i) * e.cols + col;
        if (row + i < e.rows && col < e.cols) {
            if constexpr (VECTOR) {
                step<V>(e, at, rule, p[i]);
            } else {
                for (int j = 0; j < V && col + j < e.cols; ++j) {
                    float one[1];
                    step<1>(e, at + j, rule, one);
#pragma unroll
                    for (int k = 0; k < V; ++k) p[i][k] = k == j ? one[0] : p[i][k];
                }
            }
        }
#pragma unroll
        for (int j = 0; j < V; ++j) top = fmaxf(top, fabsf(p[i][j]));
    }
    const float scale = find_scale(e, table, top, down, right);
    const int height = padded(e.rows), pitch = padded(e.cols);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const u32 word = to_fp8x4<FORMAT>(__fmul_rn(p[i][0], scale), __fmul_rn(p[i][1], scale),
                                          __fmul_rn(p[i][2], scale), __fmul_rn(p[i][3], scale));
        if (ROWWISE && row + i < height && col < pitch) {
            *reinterpret_cast<u32*>(e.rowwise + i64(row + i) * pitch + col) = word;
        }
        if (COLUMNWISE) tile[warp * ROWS + i][lane] = word;
    }
    if constexpr (COLUMNWISE) {
        __syncthreads();
        store_columns(e, tile, down * SIDE, right * SIDE);
    }
}
