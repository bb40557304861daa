// Residual add and dropout: streams that read and write each element once. te_core/ops/elementwise.py has the rules.
//
//   add                 out = round(float32(a) + float32(b)), dense, any length
//   bias_dropout_add    out = round(residual + keep * (x + bias)); keep = 0 or 1 / (1 - p)
//   dropout_backward    dx = round(keep * dy), and the column sums of the rounded dx (partials, see column_sum.cu)
//
// add: a thread moves 16-byte packs, four loads in flight. The other two: a thread owns the V columns of one pack
// and every ROWS rows of a strip, so that bias and column sums stay in registers; with cols a multiple of four a
// Philox draw serves four elements, otherwise each element draws its own. ALIGNED=0 goes element by element.
// Bandwidth not measured yet: benchmarks/quantize.py prints it.
//
// -D DTYPE=float|bf16|fp16  ALIGNED=0|1  (DROPOUT=0|1  COLUMN_SUM=0|1)
// compile-check: DTYPE=bf16 ALIGNED=1 DROPOUT=1 COLUMN_SUM=1
// compile-check: DTYPE=float ALIGNED=0 DROPOUT=1 COLUMN_SUM=1
// compile-check: DTYPE=fp16 ALIGNED=1 DROPOUT=0 COLUMN_SUM=0
#include "common/fp8_tile.cuh"
#include "common/dropout.cuh"

typedef DTYPE T;
constexpr int V = 16 / sizeof(T), THREADS = 256;

// ---- add ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ Pack add_packs(const uint4& a, const uint4& b) {
    float f[V], g[V];
    unpack<T>(Pack{{a.x, a.y, a.z, a.w}}, f);
    unpack<T>(Pack{{b.x, b.y, b.z, b.w}}, g);
#pragma unroll
    for (int j = 0; j < V; ++j) f[j] += g[j];
    return rounded_pack<T>(f);
}

// `out` may be `a` or `b`: no __ldg here, and each thread reads an element before it writes it.
extern "C" __global__ void __launch_bounds__(THREADS) add(const T* a, const T* b, T* out, i64 count) {
    const i64 stride = i64(gridDim.x) * THREADS, first = i64(blockIdx.x) * THREADS + threadIdx.x;
    const i64 packs = ALIGNED ? count / V : 0;
    const uint4* a4 = reinterpret_cast<const uint4*>(a);
    const uint4* b4 = reinterpret_cast<const uint4*>(b);
    i64 i = first;
    for (; i + stride < packs; i += 2 * stride) {
        const uint4 a0 = a4[i], b0 = b4[i], a1 = a4[i + stride], b1 = b4[i + stride];
        store_pack<T, true>(out + i * V, add_packs(a0, b0), 0, 1);
        store_pack<T, true>(out + (i + stride) * V, add_packs(a1, b1), 0, 1);
    }
    if (i < packs) store_pack<T, true>(out + i * V, add_packs(a4[i], b4[i]), 0, 1);
    for (i64 k = packs * V + first; k < count; k += stride) out[k] = from_float<T>(to_float(a[k]) + to_float(b[k]));
}

// ---- dropout -----------------------------------------------------------------------------------------------

constexpr int ROWS = 4;

// keep[j] = factor where the mask keeps element row * cols + col + j, else 0.
__device__ __forceinline__ void draw_mask(const Philox& philox, u64 element, u32 threshold, float factor,
                                          float (&keep)[V]) {
    if constexpr (ALIGNED) {  // cols is a multiple of V
        draw_keep(philox, element, threshold, factor, keep);
    } else {
        u32 word[4];
#pragma unroll 1
        for (int j = 0; j < V; ++j) {
            philox.draw((element + j) / 4, word);
            const int k = int((element + j) % 4);
            const u32 mine = k < 2 ? (k == 0 ? word[0] : word[1]) : (k == 2 ? word[2] : word[3]);
#pragma unroll
            for (int i = 0; i < V; ++i) {  // a constant index keeps `keep` in registers
                if (i == j) keep[i] = mine >= threshold ? factor : 0.f;
            }
        }
    }
}

// bias and residual may be null. DROPOUT=0 reads neither rng nor the last three arguments.
extern "C" __global__ void __launch_bounds__(TILE_THREADS)
    bias_dropout_add(const T* x, const T* bias, const T* residual, T* out, const i64* rng, i64 rows, i64 cols,
                     int steps, int site, int threshold, float factor) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i64 col = (i64(blockIdx.x) * 32 + lane) * V;
    const i64 row0 = i64(blockIdx.y) * steps * (4 * ROWS) + warp * ROWS;
    const Philox philox(DROPOUT ? rng : nullptr, site);
    float b[V] = {};
    if (bias != nullptr) unpack<T>(fetch_pack<T, ALIGNED>(bias, 0, 1, cols, col, cols), b);
    for (int step = 0; step < steps; ++step) {
        const i64 row = row0 + step * (4 * ROWS);
        Pack raw[ROWS], old[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            raw[i] = fetch_pack<T, ALIGNED>(x, row + i, rows, cols, col, cols);
            if (residual != nullptr) old[i] = fetch_pack<T, ALIGNED>(residual, row + i, rows, cols, col, cols);
        }
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if (row + i >= rows) break;
            float f[V], keep[V], r[V] = {};
            unpack<T>(raw[i], f);
            if (residual != nullptr) unpack<T>(old[i], r);
            if constexpr (DROPOUT) draw_mask(philox, (row + i) * cols + col, u32(threshold), factor, keep);
#pragma unroll
            for (int j = 0; j < V; ++j) f[j] = residual_sum<DROPOUT>(f[j], b[j], keep[j], r[j]);
            store_pack<T, ALIGNED>(out + (row + i) * cols + col, rounded_pack<T>(f), col, cols);
        }
    }
}

extern "C" __global__ void __launch_bounds__(TILE_THREADS)
    dropout_backward(const T* dy, T* dx, const i64* rng, float* column_sum, i64 rows, i64 cols, int steps, int site,
                     int threshold, float factor) {
    using Shape = TileShape<T, false>;
    __shared__ float scratch[3 * Shape::N];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i64 col = (i64(blockIdx.x) * 32 + lane) * V;
    const i64 row0 = i64(blockIdx.y) * steps * (4 * ROWS) + warp * ROWS;
    const Philox philox(DROPOUT ? rng : nullptr, site);
    float sum[1][V] = {};
    for (int step = 0; step < steps; ++step) {
        const i64 row = row0 + step * (4 * ROWS);
        Pack raw[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) raw[i] = fetch_pack<T, ALIGNED>(dy, row + i, rows, cols, col, cols);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if (row + i >= rows) break;
            float f[V], keep[V];
            unpack<T>(raw[i], f);
            if constexpr (DROPOUT) {
                draw_mask(philox, (row + i) * cols + col, u32(threshold), factor, keep);
#pragma unroll
                for (int j = 0; j < V; ++j) f[j] = keep[j] != 0.f ? __fmul_rn(f[j], keep[j]) : 0.f;
            }
            const Pack pack = rounded_pack<T>(f);
            store_pack<T, ALIGNED>(dx + (row + i) * cols + col, pack, col, cols);
            if constexpr (COLUMN_SUM) {
                unpack<T>(pack, f);
#pragma unroll
                for (int j = 0; j < V; ++j) sum[0][j] += col + j < cols ? f[j] : 0.f;
            }
        }
    }
    if constexpr (COLUMN_SUM) write_column_sums<Shape>(sum, column_sum, col, cols, scratch);
}
