// What the values of a matrix are like, and what a cast made of them, in one pass: te_core/ops/statistics.py has the rule.
//
//   statistics         x [rows, cols] dense, codes (q) of pitch `pitch`, scales -> parts [gridDim.x, SLOTS] float64
//                      256 threads, a thread takes VEC neighbouring elements at a time, adds those in float32
//   statistics_finish  parts [count, SLOTS] -> record [SLOTS], merged with what it holds; one block, a warp a slot
//
// KIND says what q is: NONE; VALUES float32 [rows, cols]; TENSOR, PIECES (1x128), TILES (128x128), MX (32 along a row),
// MX_COLUMNS (32 along a column): FP8 codes with their scales as te_core/quantized.py lays them out.
// INDEX is u32 where all vectors can be counted by it: division of 64 bits is slow. Bandwidth not measured yet.
//
// compile-check: DTYPE=bf16 KIND=NONE VEC=8 FORMAT=E4M3 INDEX=u32
// compile-check: DTYPE=bf16 KIND=TENSOR VEC=8 FORMAT=E4M3 INDEX=u32
// compile-check: DTYPE=fp16 KIND=TENSOR VEC=1 FORMAT=E5M2 INDEX=i64
// compile-check: DTYPE=float KIND=PIECES VEC=4 FORMAT=E4M3 INDEX=u32
// compile-check: DTYPE=bf16 KIND=TILES VEC=8 FORMAT=E4M3 INDEX=u32
// compile-check: DTYPE=bf16 KIND=MX VEC=8 FORMAT=E4M3 INDEX=u32
// compile-check: DTYPE=bf16 KIND=MX_COLUMNS VEC=8 FORMAT=E5M2 INDEX=u32
// compile-check: DTYPE=bf16 KIND=VALUES VEC=4 FORMAT=E4M3 INDEX=u32
#include "common/e8m0.cuh"

typedef DTYPE T;
typedef INDEX Index;
constexpr int THREADS = 256;
enum Kind { NONE, VALUES, TENSOR, PIECES, TILES, MX, MX_COLUMNS };
constexpr Kind K = KIND;
constexpr bool CODES = K > VALUES;  // FP8 with scales

// The places of a record: what adds up, what is raised, what is lowered (te_core/statistics.py).
enum Slot { COUNT, SUM, SQUARES, MAGNITUDES, NONZERO, NANS, INFINITIES, COMPARED, UNDERFLOWS, OVERFLOWS, SATURATED, NOISE,
            SIGNAL, TOP, AMAX, SCALE_TOP, BOTTOM, AMIN, SCALE_BOTTOM, SLOTS };

constexpr float LARGEST = FORMAT == E4M3 ? 448.f : 57344.f;
constexpr u32 TOP_CODE = FORMAT == E4M3 ? 0x7e : 0x7b;

struct Found {
    double sum = 0., squares = 0., magnitudes = 0., noise = 0.;
    u32 nonzero = 0, nans = 0, infinities = 0, underflows = 0, overflows = 0, saturated = 0;
    float top = -infinity(), amax = -infinity(), scale_top = -infinity();
    float bottom = infinity(), amin = infinity(), scale_bottom = infinity();
};

// Where the scale of an element lies. `across` is the pitch of the scales.
template <class S> __device__ __forceinline__ float scale_of(const S* scales, i64 across, Index row, Index col) {
    if constexpr (K == TENSOR) return scales[0];
    if constexpr (K == PIECES) return scales[i64(col / 128) * across + row];
    if constexpr (K == TILES) return scales[i64(row / 128) * across + col / 128];
    if constexpr (K == MX) return e8m0_value(scales[i64(row) * across + col / 32]);
    if constexpr (K == MX_COLUMNS) return e8m0_value(scales[i64(row / 32) * across + col]);
    return 1.f;
}

template <bool MANY, class S>
__device__ __forceinline__ void take(Found& f, const T* x, const void* q, const S* scales, i64 pitch, i64 across,
                                     Index row, Index col, i64 at) {
    constexpr int N = MANY ? VEC : 1;
    const Vec<T, N> v = load<N>(x + at);
    float sum = 0.f, squares = 0.f, magnitudes = 0.f, noise = 0.f, scale = 1.f;
    Vec<u8, CODES ? N : 1> codes;
    Vec<float, K == VALUES ? N : 1> values;
    if constexpr (CODES) {
        codes = load<N>(static_cast<const u8*>(q) + i64(row) * pitch + col);
        if constexpr (K != MX_COLUMNS) {
            scale = scale_of(scales, across, row, col);
            f.scale_top = fmaxf(f.scale_top, scale);
            f.scale_bottom = fminf(f.scale_bottom, scale);
        }
    }
    if constexpr (K == VALUES) values = load<N>(static_cast<const float*>(q) + at);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float a = to_float(v[i]), magnitude = fabsf(a);
        sum += a;
        squares = __fadd_rn(squares, __fmul_rn(a, a));
        magnitudes += magnitude;
        f.nonzero += a != 0.f;
        f.nans += isnan(a);
        f.infinities += isinf(a) != 0;
        f.top = fmaxf(f.top, a);
        f.bottom = fminf(f.bottom, a);
        f.amax = fmaxf(f.amax, magnitude);
        if (magnitude > 0.f) f.amin = fminf(f.amin, magnitude);
        if constexpr (K != NONE) {
            float back;
            bool zero;
            if constexpr (CODES) {
                if constexpr (K == MX_COLUMNS) {
                    scale = scale_of(scales, across, row, col + i);
                    f.scale_top = fmaxf(f.scale_top, scale);
                    f.scale_bottom = fminf(f.scale_bottom, scale);
                }
                const u32 code = codes[i] & 0x7fu;
                back = __fmul_rn(from_fp8<FORMAT>(codes[i]), scale);
                zero = code == 0u;
                f.saturated += code == TOP_CODE;
                f.overflows += magnitude > __fmul_rn(LARGEST, scale);
            } else {
                back = values[i];
                zero = back == 0.f;
            }
            f.underflows += zero && a != 0.f;
            const float d = __fsub_rn(a, back);
            noise = __fadd_rn(noise, __fmul_rn(d, d));
        }
    }
    f.sum += sum;
    f.squares += squares;
    f.magnitudes += magnitudes;
    if (K != NONE) f.noise += noise;
}

enum Way { ADD, RAISE, LOWER };

template <int WAY> __device__ __forceinline__ double joined(double a, double b) {
    return WAY == ADD ? a + b : WAY == RAISE ? fmax(a, b) : fmin(a, b);
}

template <int WAY> __device__ __forceinline__ double warp_joined(double v) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v = joined<WAY>(v, __shfl_xor_sync(~0u, v, o));
    return v;
}

template <int WAY> __device__ __forceinline__ void leave(double v, int slot, double (*shared)[SLOTS]) {
    v = warp_joined<WAY>(v);
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5][slot] = v;
}

template <class S>
__device__ __forceinline__ void run(const T* x, const void* q, const S* scales, double* parts, i64 rows, i64 cols,
                                    i64 pitch, i64 across) {
    __shared__ double shared[THREADS / 32][SLOTS];
    Found f;
    const Index wide = Index(cols / VEC), count = Index(rows) * wide;
    for (Index i = Index(blockIdx.x) * THREADS + threadIdx.x; i < count; i += Index(gridDim.x) * THREADS) {
        const Index row = i / wide, col = (i - row * wide) * VEC;
        take<true>(f, x, q, scales, pitch, across, row, col, i64(i) * VEC);
    }
    // Only a matrix of one row, which nothing is compared with, has columns behind its last whole vector.
    for (i64 at = i64(wide) * VEC + threadIdx.x; blockIdx.x == 0 && at < cols; at += THREADS)
        take<false>(f, x, q, scales, pitch, across, 0, Index(at), at);
    const double all = double(rows) * double(cols);
    const bool first = blockIdx.x == 0 && threadIdx.x == 0;
    leave<ADD>(first ? all : 0., COUNT, shared);
    leave<ADD>(f.sum, SUM, shared);
    leave<ADD>(f.squares, SQUARES, shared);
    leave<ADD>(f.magnitudes, MAGNITUDES, shared);
    leave<ADD>(f.nonzero, NONZERO, shared);
    leave<ADD>(f.nans, NANS, shared);
    leave<ADD>(f.infinities, INFINITIES, shared);
    leave<ADD>(first && K != NONE ? all : 0., COMPARED, shared);
    leave<ADD>(f.underflows, UNDERFLOWS, shared);
    leave<ADD>(f.overflows, OVERFLOWS, shared);
    leave<ADD>(f.saturated, SATURATED, shared);
    leave<ADD>(f.noise, NOISE, shared);
    leave<ADD>(K != NONE ? f.squares : 0., SIGNAL, shared);
    leave<RAISE>(f.top, TOP, shared);
    leave<RAISE>(f.amax, AMAX, shared);
    leave<RAISE>(f.scale_top, SCALE_TOP, shared);
    leave<LOWER>(f.bottom, BOTTOM, shared);
    leave<LOWER>(f.amin, AMIN, shared);
    leave<LOWER>(f.scale_bottom, SCALE_BOTTOM, shared);
    __syncthreads();
    if (threadIdx.x < SLOTS) {
        const int slot = threadIdx.x;
        double v = shared[0][slot];
        for (int w = 1; w < THREADS / 32; ++w) {
            const double other = shared[w][slot];
            v = slot < TOP ? v + other : slot < BOTTOM ? fmax(v, other) : fmin(v, other);
        }
        parts[i64(blockIdx.x) * SLOTS + slot] = v;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    statistics(const T* x, const void* q, const void* scales, double* parts, i64 rows, i64 cols, i64 pitch,
               i64 across) {
    if constexpr (K == MX || K == MX_COLUMNS)
        run(x, q, static_cast<const u8*>(scales), parts, rows, cols, pitch, across);
    else
        run(x, q, static_cast<const float*>(scales), parts, rows, cols, pitch, across);
}

template <int WAY> __device__ __forceinline__ void finish(const double* parts, double* record, int count, int slot) {
    const int lane = threadIdx.x & 31;
    double v = record[slot];
    if (WAY == ADD && lane) v = 0.;
    for (int i = lane; i < count; i += 32) v = joined<WAY>(v, parts[i * SLOTS + slot]);
    v = warp_joined<WAY>(v);
    if (lane == 0) record[slot] = v;
}

extern "C" __global__ void __launch_bounds__(32 * SLOTS)
    statistics_finish(const double* parts, double* record, int count) {
    const int slot = threadIdx.x >> 5;
    if (slot < TOP) finish<ADD>(parts, record, count, slot);
    else if (slot < BOTTOM) finish<RAISE>(parts, record, count, slot);
    else finish<LOWER>(parts, record, count, slot);
}
