// Partial results of one attention put together (te_core/ops/attention_merge.py has the rules).
//
//   attention_merge   a, b, out [token, batch, head, width] and statistics [token, batch, head], any strides but the last
//   context_sum       out = a + b, rows of `width` vectors over up to four outer dimensions
//
// A row's threads are side by side in one block, so statistics may be replaced in place: all have read them before one
// writes. A thread reads VEC elements of a and of b, 16 bytes of the narrower type. A row of a sum that is longer than
// PER_BLOCK vectors is shared by several blocks. Sizes and strides of rows count in elements, `width` in vectors.
//
// -D A_TYPE, B_TYPE, OUT_TYPE=float|bf16|fp16  VEC=1|2|4|8  PAIR=0|1 (there is a b)
// compile-check: A_TYPE=bf16 B_TYPE=bf16 OUT_TYPE=float VEC=8 PAIR=1
// compile-check: A_TYPE=float B_TYPE=bf16 OUT_TYPE=float VEC=8 PAIR=1
// compile-check: A_TYPE=float B_TYPE=fp16 OUT_TYPE=fp16 VEC=1 PAIR=1
// compile-check: A_TYPE=float B_TYPE=float OUT_TYPE=bf16 VEC=4 PAIR=0
#include "common/row.cuh"

constexpr int PER_BLOCK = 1024;

// Where a row begins, by its place in the four outer dimensions.
struct Steps {
    i64 outer, token, batch, head;
};
struct Place {
    i64 outer, token, batch, head;
};
__device__ __forceinline__ Place place_of(i64 row, int tokens, int batches, int heads) {
    Place p;
    if (row < (i64(1) << 32)) {  // a division of 64 bits takes four times as long
        u32 rest = u32(row);
        p.head = rest % heads, rest /= heads;
        p.batch = rest % batches, rest /= batches;
        p.token = rest % tokens, p.outer = rest / tokens;
    } else {
        p.head = row % heads, row /= heads;
        p.batch = row % batches, row /= batches;
        p.token = row % tokens, p.outer = row / tokens;
    }
    return p;
}
__device__ __forceinline__ i64 offset(const Place& p, const Steps& s) {
    return p.outer * s.outer + p.token * s.token + p.batch * s.batch + p.head * s.head;
}

// What is read may be written in place: no read-only cache.
template <class T> __device__ __forceinline__ void read(const T* p, float (&f)[VEC]) {
    typedef Pieces<T, VEC> P;
    typedef typename Bits<P::PIECE>::type W;
    Vec<T, VEC> v;
#pragma unroll
    for (int i = 0; i < P::COUNT; ++i) reinterpret_cast<W*>(&v)[i] = reinterpret_cast<const W*>(p)[i];
    to_floats(v, f);
}

__device__ __forceinline__ bool is_infinite(float v) { return (__float_as_uint(v) & 0x7fffffffu) == 0x7f800000u; }

struct Weights {
    float a, b, log;
    bool has_a, has_b;
};

// The weights of both, relative to the largest exponent; a NaN spreads. softmax: 0 vanilla, 1 off-by-one, 2 learnable.
__device__ __forceinline__ Weights weigh(float a, float b, int softmax, const float* sink, i64 head) {
    const float none = -infinity();
    Weights w = {0.f, 0.f, infinity(), !is_infinite(a), PAIR && !is_infinite(b)};
    if (!w.has_a) a = none;
    if (!w.has_b) b = none;
    if (!w.has_a && !w.has_b) return w;
    const float term = softmax == 0 ? none : softmax == 1 ? 0.f : sink[head];
    float top = fmaxf(fmaxf(a, b), term);
    if (top == none) top = 0.f;
    w.a = expf(a - top), w.b = expf(b - top);
    const float total = w.a + w.b + (softmax ? expf(term - top) : 0.f);
    w.a = w.a / total, w.b = w.b / total, w.log = top + logf(total);
    return w;
}

extern "C" __global__ void __launch_bounds__(256)
    attention_merge(const A_TYPE* a, const B_TYPE* b, OUT_TYPE* out, const float* a_stats, const float* b_stats,
                    float* stats, const float* __restrict__ sink, i64 rows, int width, int lanes, int tokens, int batches,
                    int heads, int softmax, i64 a_token, i64 a_batch, i64 a_head, i64 b_token, i64 b_batch, i64 b_head,
                    i64 o_token, i64 o_batch, i64 o_head, i64 as_token, i64 as_batch, i64 as_head, i64 bs_token,
                    i64 bs_batch, i64 bs_head, i64 s_token, i64 s_batch, i64 s_head) {
    const int lane = threadIdx.x % lanes;
    const i64 row = i64(blockIdx.x) * (blockDim.x / lanes) + threadIdx.x / lanes;
    const bool here = row < rows;
    Place p = {0, 0, 0, 0};
    Weights w;
    if (here) {
        p = place_of(row, tokens, batches, heads);
        const float log_a = a_stats[offset(p, {0, as_token, as_batch, as_head})];
        const float log_b = PAIR ? b_stats[offset(p, {0, bs_token, bs_batch, bs_head})] : 0.f;
        w = weigh(log_a, log_b, softmax, sink, p.head);
    }
    __syncthreads();
    if (!here) return;
    if (lane == 0 && stats) stats[offset(p, {0, s_token, s_batch, s_head})] = w.log;
    a += offset(p, {0, a_token, a_batch, a_head});
    if (PAIR) b += offset(p, {0, b_token, b_batch, b_head});
    out += offset(p, {0, o_token, o_batch, o_head});
    for (int v = lane; v < width; v += lanes) {
        float sum[VEC], more[VEC];
        read(a + i64(v) * VEC, sum);
        if (PAIR) read(b + i64(v) * VEC, more);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            sum[j] = w.has_a ? sum[j] * w.a : 0.f;
            if (PAIR && w.has_b) sum[j] += more[j] * w.b;
        }
        store_vec(out + i64(v) * VEC, round_to(sum, OUT_TYPE()));
    }
}

extern "C" __global__ void __launch_bounds__(256)
    context_sum(const A_TYPE* a, const B_TYPE* b, OUT_TYPE* out, i64 rows, i64 width, int lanes, int segments, int tokens,
                int batches, int heads, i64 a_outer, i64 a_token, i64 a_batch, i64 a_head, i64 b_outer, i64 b_token,
                i64 b_batch, i64 b_head, i64 o_outer, i64 o_token, i64 o_batch, i64 o_head) {
    const i64 row = i64(blockIdx.x / segments) * (blockDim.x / lanes) + threadIdx.x / lanes;
    if (row >= rows) return;
    const i64 first = i64(blockIdx.x % segments) * PER_BLOCK;
    const i64 last = min(first + PER_BLOCK, width);
    const Place p = place_of(row, tokens, batches, heads);
    a += offset(p, {a_outer, a_token, a_batch, a_head});
    if (PAIR) b += offset(p, {b_outer, b_token, b_batch, b_head});
    out += offset(p, {o_outer, o_token, o_batch, o_head});
#pragma unroll 4
    for (i64 v = first + threadIdx.x % lanes; v < last; v += lanes) {
        float sum[VEC], more[VEC];
        read(a + v * VEC, sum);
        if (PAIR) {
            read(b + v * VEC, more);
#pragma unroll
            for (int j = 0; j < VEC; ++j) sum[j] = __fadd_rn(sum[j], more[j]);
        }
        store_vec(out + v * VEC, round_to(sum, OUT_TYPE()));
    }
}
