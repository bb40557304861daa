// Activations and their gradients, each delivered as values, as FP8 in one or both orientations, or as both.
//
// Forward   x [rows, cols] -> y [rows, cols];  gated: x [rows, 2 cols] = (a | b) -> act(a) * b
// Backward  dy [rows, cols], x as above -> dx of x's shape;  gated: (dy * b * act'(a) | dy * act(a))
// Everything is computed in float32 and rounded to T; amax, cast and column sums start from the rounded value.
// SCALING, tiling and transposition as in quantize.cu (common/fp8_tile.cuh). With BLOCKS=1 the file's kernel is
// activation_block: to FP8 with a scale for each block, as quantize_block.cu makes it of the rounded values.
// Measured 2026-11-21, H200, 8192 x 4096 bf16, against a copy's 4.25 TB/s, L2 flushed but dirty (a copy: 88 %): cast in
// both orientations after gelu 40.0 us (79 %), swiglu 55.9 us (85 %), dgelu with column sums 60.6 us (78 %; 84 %
// without them), dswiglu 97.3 us (81 %; 87 %); values alone: gelu 38.6 us (82 %), swiglu 52.8 us (90 %).
// In blocks 2026-11-28, H100, 8192 x 14336 bf16, both orientations, against a copy's 3.04 TB/s: swiglu 246 us (94 %; with
// a cast after it 397 us), dswiglu 436 us (89 %; 729 us).
//
// Accuracy. gelu, qgelu and silu are x * sigmoid(z), which for negative x keeps the relative accuracy that
// 1 + tanh loses. For 16-bit types the sigmoid is 1 / (1 + exp(-z)) by one ex2.approx (2 ulp) and one rcp.approx
// (1 ulp): with the rounding of z's exponent, an error under (2 + |z|) * 1.2e-7, far below the rounding to T. For
// float32 the exponent carries its rounding error along: 1e-6 of the value, as far as z itself goes. The
// approximations flush only results under 1e-38; everything else keeps subnormal numbers.
//
// -D DTYPE=…  FORMAT=…  SCALING=…  TALL=…  COLUMNWISE=…  COLUMN_SUM=…  ALIGNED=…  KEEP=0|1 (y is written)
//    BACKWARD=0|1  KIND=GELU|QGELU|RELU|SRELU|SILU|SIGMOID|CLAMPED (the last two gated only)  GATED=0|1
//    BLOCKS=1: TILED=0|1 and ROWWISE=0|1 in the place of SCALING, TALL and KEEP
// compile-check: DTYPE=bf16 FORMAT=E4M3 SCALING=GIVEN_SCALE TALL=1 COLUMNWISE=1 COLUMN_SUM=0 ALIGNED=1 KEEP=0 KIND=GELU GATED=0 BACKWARD=0
// compile-check: DTYPE=bf16 FORMAT=E5M2 SCALING=GIVEN_SCALE TALL=1 COLUMNWISE=1 COLUMN_SUM=1 ALIGNED=1 KEEP=0 KIND=SILU GATED=1 BACKWARD=1
// compile-check: DTYPE=float FORMAT=E4M3 SCALING=NO_CAST TALL=0 COLUMNWISE=0 COLUMN_SUM=0 ALIGNED=0 KEEP=1 KIND=QGELU GATED=0 BACKWARD=1
// compile-check: DTYPE=fp16 FORMAT=E4M3 SCALING=NO_CAST TALL=1 COLUMNWISE=0 COLUMN_SUM=1 ALIGNED=1 KEEP=1 KIND=SRELU GATED=1 BACKWARD=0
// compile-check: DTYPE=bf16 FORMAT=E4M3 SCALING=NO_CAST TALL=0 COLUMNWISE=0 COLUMN_SUM=0 ALIGNED=1 KEEP=1 KIND=RELU GATED=0 BACKWARD=0
// compile-check: DTYPE=bf16 FORMAT=E5M2 SCALING=GIVEN_SCALE TALL=1 COLUMNWISE=1 COLUMN_SUM=1 ALIGNED=1 KEEP=0 KIND=CLAMPED GATED=1 BACKWARD=1
// compile-check: DTYPE=bf16 FORMAT=E4M3 SCALING=GIVEN_SCALE TALL=1 COLUMNWISE=1 COLUMN_SUM=0 ALIGNED=1 KEEP=0 KIND=CLAMPED GATED=1 BACKWARD=0
// compile-check: DTYPE=float FORMAT=E4M3 SCALING=NO_CAST TALL=0 COLUMNWISE=0 COLUMN_SUM=0 ALIGNED=0 KEEP=1 KIND=SIGMOID GATED=1 BACKWARD=1
// compile-check: DTYPE=bf16 FORMAT=E5M2 SCALING=GIVEN_SCALE TALL=1 COLUMNWISE=1 COLUMN_SUM=1 ALIGNED=1 KEEP=0 KIND=SIGMOID GATED=1 BACKWARD=1
// compile-check: DTYPE=bf16 FORMAT=E4M3 BLOCKS=1 TILED=0 ROWWISE=1 COLUMNWISE=1 COLUMN_SUM=0 ALIGNED=1 KIND=SILU GATED=1 BACKWARD=0
// compile-check: DTYPE=bf16 FORMAT=E4M3 BLOCKS=1 TILED=0 ROWWISE=1 COLUMNWISE=1 COLUMN_SUM=0 ALIGNED=1 KIND=SILU GATED=1 BACKWARD=1
// compile-check: DTYPE=bf16 FORMAT=E4M3 BLOCKS=1 TILED=0 ROWWISE=1 COLUMNWISE=1 COLUMN_SUM=1 ALIGNED=1 KIND=GELU GATED=1 BACKWARD=1
// compile-check: DTYPE=bf16 FORMAT=E4M3 BLOCKS=1 TILED=0 ROWWISE=1 COLUMNWISE=1 COLUMN_SUM=1 ALIGNED=1 KIND=GELU GATED=0 BACKWARD=1
// compile-check: DTYPE=fp16 FORMAT=E4M3 BLOCKS=1 TILED=0 ROWWISE=1 COLUMNWISE=0 COLUMN_SUM=0 ALIGNED=0 KIND=GELU GATED=0 BACKWARD=0
// compile-check: DTYPE=fp16 FORMAT=E5M2 BLOCKS=1 TILED=1 ROWWISE=1 COLUMNWISE=1 COLUMN_SUM=1 ALIGNED=1 KIND=CLAMPED GATED=1 BACKWARD=1
// compile-check: DTYPE=float FORMAT=E4M3 BLOCKS=1 TILED=0 ROWWISE=1 COLUMNWISE=1 COLUMN_SUM=0 ALIGNED=1 KIND=CLAMPED GATED=1 BACKWARD=0
#include "common/block_tile.cuh"

#ifndef BLOCKS
#define BLOCKS 0
#endif

typedef DTYPE T;

enum Kind { GELU, QGELU, RELU, SRELU, SILU, SIGMOID, CLAMPED };

// The parameters of CLAMPED: a' = min(a, limit), b' = b between -limit and limit; a' sigmoid(alpha a') (b' + offset).
struct Clamp {
    float limit, alpha, offset;
};

// Stages of the queue and blocks of a multiprocessor: what was fastest on the H200, without register spills.
#if BLOCKS
constexpr int STAGES = 1;  // there is no queue
#else
constexpr int STAGES = TALL && !GATED && !BACKWARD ? 4 : 2, LOAD = GATED + BACKWARD;
constexpr int MIN_BLOCKS = TALL ? (LOAD == 0 ? 6 : (LOAD == 1 ? 5 : 3)) : (LOAD == 0 ? 8 : (LOAD == 1 ? 6 : 4));
#endif

// 0.5 x (1 + tanh(u)) = x sigmoid(2u);  2u = x (GELU_1 + GELU_3 x^2)
constexpr float GELU_1 = 2.f * 0.7978845608f, GELU_3 = GELU_1 * 0.044715f, QGELU_1 = 1.702f;
constexpr float LOG2_E = 1.4426950408889634f;

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float reciprocal(float x) {  // of x >= 1
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The sigmoid of z, and its slope s (1 - s).
struct Sigmoid {
    float s, slope;
};

__device__ __forceinline__ Sigmoid sigmoid_precise(float z) {
    // e = exp(-|z|) as a power of two whose exponent carries its rounding error along.
    constexpr float C = -LOG2_E, C_LOW = -1.925963e-8f;  // C + C_LOW = -log2(e)
    const float t = fabsf(z) * C, lost = fmaf(fabsf(z), C_LOW, fmaf(fabsf(z), C, -t));
    // Two halves, because the exponential alone would leave the normal range where z * sigmoid has not yet.
    float h = exp2_approx(0.5f * t);
    const float better = fmaf(h, 0.5f * 0.69314718f * lost, h);
    h = t > -252.f ? better : h;  // beyond, `lost` of an infinite z is a NaN
    const float e = h * h, r = reciprocal(1.f + e);
    return {(z >= 0.f ? 1.f : e) * r, e * r * r};
}

// `reach` becomes x dz/dx. The slopes of gelu stop growing at 1e4, where s (1 - s) has long been 0 and infinity times
// that would make a NaN.
__device__ __forceinline__ Sigmoid sigmoid_of(float x, float* reach, const Clamp& clamp) {
    float linear = 1.f, square = 0.f;
    if (KIND == CLAMPED) linear = clamp.alpha;
    if (KIND == QGELU) linear = QGELU_1;
    if (KIND == GELU) {
        const float near = fminf(fmaxf(x, -1e4f), 1e4f);
        square = BACKWARD ? near * near : x * x;
        *reach = near * fmaf(square, 3.f * GELU_3, GELU_1);
    } else {
        *reach = linear * x;
    }
    if (sizeof(T) == 4) return sigmoid_precise(KIND == GELU ? x * fmaf(square, GELU_3, GELU_1) : linear * x);
    // 1 / (1 + exp(-z)): an overflow of the exponential makes 0, right to 1e-38. -log2(e) is folded into z.
    const float t = x * (KIND == GELU ? fmaf(square, -LOG2_E * GELU_3, -LOG2_E * GELU_1) : -LOG2_E * linear);
    const float s = reciprocal(1.f + exp2_approx(t));
    return {s, fmaf(-s, s, s)};
}

// The sigmoid alone, whose slope e / (1 + e)^2, e = exp(-|x|), is accurate far out where s (1 - s) cancels.
__device__ __forceinline__ Sigmoid sigmoid_alone(float x) {
    if (sizeof(T) == 4) return sigmoid_precise(x);
    const float e = exp2_approx(fabsf(x) * -LOG2_E), r = reciprocal(1.f + e);
    return {(x >= 0.f ? 1.f : e) * r, e * r * r};
}

__device__ __forceinline__ float activate(float x, const Clamp& clamp) {
    if (KIND == RELU) return x <= 0.f ? 0.f : x;  // a NaN stays
    if (KIND == SRELU) return x <= 0.f ? 0.f : x * x;
    if (KIND == SIGMOID) return sigmoid_alone(x).s;
    if (KIND == CLAMPED) x = x > clamp.limit ? clamp.limit : x;
    float reach;
    return x * sigmoid_of(x, &reach, clamp).s;
}

// act(x) and act'(x)
__device__ __forceinline__ float2 activate_with_slope(float x, const Clamp& clamp) {
    if (KIND == RELU) return x <= 0.f ? make_float2(0.f, 0.f) : make_float2(x, 1.f);
    if (KIND == SRELU) return x <= 0.f ? make_float2(0.f, 0.f) : make_float2(x * x, 2.f * x);
    if (KIND == SIGMOID) {
        const Sigmoid g = sigmoid_alone(x);
        return make_float2(g.s, g.slope);
    }
    const bool beyond = KIND == CLAMPED && x > clamp.limit;
    if (beyond) x = clamp.limit;
    float reach;
    const Sigmoid g = sigmoid_of(x, &reach, clamp);
    return make_float2(x * g.s, beyond ? 0.f : fmaf(reach, g.slope, g.s));
}

// What the activation of the first half is multiplied by.
__device__ __forceinline__ float gate_of(float b, const Clamp& clamp) {
    if (KIND != CLAMPED) return b;
    b = b > clamp.limit ? clamp.limit : b;  // a NaN stays
    return (b < -clamp.limit ? -clamp.limit : b) + clamp.offset;
}

constexpr int V = 16 / sizeof(T);

#if BACKWARD
struct Producer {  // operands: dy, a (or x), b
    static constexpr int OUTPUTS = 1 + GATED, OPERANDS = 2 + GATED, DEPTH = STAGES, FLAT_ROWS = 4;
    static constexpr bool AS_IT_IS = false;
    const T* dy;
    const T* x;
    i64 cols;
    Clamp clamp;
    __device__ __forceinline__ const T* operand(int k) const { return k == 0 ? dy : (k == 1 ? x : x + cols); }
    __device__ __forceinline__ i64 pitch(int k) const { return k == 0 ? cols : (1 + GATED) * cols; }
    __device__ __forceinline__ void values(const Pack (&raw)[OPERANDS], Pack (&out)[OUTPUTS], i64, i64) const {
        float g[V], a[V], b[V];
        unpack<T>(raw[0], g);
        unpack<T>(raw[1], a);
        if (GATED) unpack<T>(raw[OPERANDS - 1], b);
#pragma unroll
        for (int j = 0; j < V; ++j) {
            const float2 act = activate_with_slope(a[j], clamp);
            const bool beyond = KIND == CLAMPED && fabsf(b[j]) > clamp.limit;
            a[j] = GATED ? g[j] * gate_of(b[j], clamp) * act.y : g[j] * act.y;
            if (KIND == CLAMPED) a[j] += 0.f;  // no -0: below an offset < 0 the padding, too, would come out so
            b[j] = beyond ? 0.f : g[j] * act.x;
        }
        out[0] = rounded_pack<T>(a);
        if (GATED) out[OUTPUTS - 1] = rounded_pack<T>(b);
    }
};
#else
struct Producer {  // operands: a (or x), b
    static constexpr int OUTPUTS = 1, OPERANDS = 1 + GATED, DEPTH = STAGES, FLAT_ROWS = 4;
    static constexpr bool AS_IT_IS = false;
    const T* dy;
    const T* x;
    i64 cols;
    Clamp clamp;
    __device__ __forceinline__ const T* operand(int k) const { return k == 0 ? x : x + cols; }
    __device__ __forceinline__ i64 pitch(int) const { return (1 + GATED) * cols; }
    __device__ __forceinline__ void values(const Pack (&raw)[OPERANDS], Pack (&out)[1], i64, i64) const {
        float a[V], b[V];
        unpack<T>(raw[0], a);
        if (GATED) unpack<T>(raw[OPERANDS - 1], b);
#pragma unroll
        for (int j = 0; j < V; ++j) {
            const float act = activate(a[j], clamp);
            a[j] = GATED ? act * gate_of(b[j], clamp) : act;
            if (KIND == CLAMPED) a[j] += 0.f;  // as in backward
        }
        out[0] = rounded_pack<T>(a);
    }
};
#endif

// One entry for both directions: BACKWARD=1 reads dy, BACKWARD=0 ignores it.
#if BLOCKS
typedef BlockShape<T> Shape;
typedef BlockCast<FORMAT, TILED, ROWWISE, COLUMNWISE, COLUMN_SUM, ALIGNED> Delivered;

extern "C" __global__ void __launch_bounds__(Shape::THREADS, Shape::RESIDENT / Producer::OUTPUTS)
    activation_block(const T* dy, const T* x, u8* rowwise, float* row_scale, u8* columnwise, float* column_scale,
                     float* column_sum, float epsilon, int power_of_two, i64 rows, i64 cols, int across, float limit,
                     float alpha, float offset) {
    const Producer producer = {dy, x, cols, {limit, alpha, offset}};
    const BlockSink sink = {rowwise, row_scale, columnwise, column_scale, column_sum};
    quantize_tile<T, Delivered>(producer, sink, epsilon, power_of_two, rows, cols, across, blockIdx.x);
}
#else
extern "C" __global__ void __launch_bounds__(TILE_THREADS, MIN_BLOCKS)
    activation(const T* dy, const T* x, T* y, u8* rowwise, u8* columnwise, const float* source, float* scale_inv,
               float* amax, float* column_sum, i64 rows, i64 cols, int steps, float limit, float alpha, float offset) {
    const TileSink<T> sink = {y, rowwise, columnwise, amax, column_sum};
    const TileScale scaling = {source, 0, 0.f, 0, scale_inv};
    const Producer producer = {dy, x, cols, {limit, alpha, offset}};
    walk_tiles<T, FORMAT, SCALING, TALL, COLUMNWISE, COLUMN_SUM, KEEP, ALIGNED>(producer, sink, scaling, rows, cols,
                                                                                steps);
}
#endif
