// Softmax over the rows of attention scores, forward and backward. te_core/ops/softmax.py has the formulas and who sees
// whom.
//
//   x, y, dy, dx [rows, cols] of T dense, rows = batch * heads * sq       share [batch, sq, heads] float32
//   mask u8 at b * mask_b + h * mask_h + i * mask_q + column              sink, partials of dsink: float32
//
// A team of SIZE threads takes a row: up to 32 threads of a warp (TEAMS of them in a block), or a block of its own. It
// holds ITERS vectors of VEC elements a thread in registers; ITERS=0 reads a longer row twice (forward: three times).
// BANDED=1: a row sees the columns first ... last - 1 only; what lies outside is written as zeros and never read, so a
// causal softmax reads half. FULL=1: the row is exactly the team's vectors and not banded, so nothing is asked about
// columns.
// H200, 2026-11-21, rows of 2048, bf16 (benchmarks/attention_kernels.py; of the speed of a copy): forward 100 %, with a
// mask 89 %; backward 100 %.
//
// options: -default-device
// compile-check: DTYPE=bf16 VEC=8 SIZE=32 ITERS=4 TEAMS=4 FULL=1 BANDED=0 MASK=0 SINK=0
// compile-check: DTYPE=bf16 VEC=8 SIZE=256 ITERS=2 TEAMS=1 FULL=0 BANDED=1 MASK=1 SINK=1
// compile-check: DTYPE=float VEC=4 SIZE=8 ITERS=1 TEAMS=16 FULL=0 BANDED=1 MASK=0 SINK=1
// compile-check: DTYPE=fp16 VEC=1 SIZE=1024 ITERS=0 TEAMS=1 FULL=0 BANDED=0 MASK=1 SINK=0
#include "common/row.cuh"

typedef DTYPE T;
constexpr int THREADS = SIZE * TEAMS, HELD = ITERS > 0 ? ITERS : 1;
static_assert(THREADS % 32 == 0 && (SIZE <= 32 || TEAMS == 1), "tiling");

__device__ __forceinline__ float nothing() { return __int_as_float(0xff800000); }  // minus infinity

// The sum or maximum over the team, in every thread of it.
template <bool MAXIMUM> __device__ __forceinline__ float over_team(float v, float* scratch) {
    if constexpr (SIZE > 32) {
        return MAXIMUM ? block_max<SIZE>(v, scratch) : block_sum<SIZE>(v, scratch);
    } else {
#pragma unroll
        for (int o = SIZE / 2; o; o >>= 1) {
            const float other = __shfl_xor_sync(~0u, v, o);
            v = MAXIMUM ? fmaxf(v, other) : v + other;
        }
        return v;
    }
}

struct Place {
    int head;
    i64 share;        // where the row's share of the sink is
    i64 mask;         // where its mask begins
    int first, last;  // the columns it sees
};

struct Shape {
    int rows, cols, sq, heads, left, right, bottom_right;
    i64 mask_b, mask_h, mask_q;
};

__device__ __forceinline__ Place find(const Shape& s, int row, const int* cu_q, const int* cu_kv) {
    Place p = {0, 0, 0, 0, s.cols};
    if (!BANDED && !MASK && !SINK) return p;
    const int i = row % s.sq, bh = row / s.sq, b = bh / s.heads;
    p.head = bh % s.heads;
    p.share = (i64(b) * s.sq + i) * s.heads + p.head;
    p.mask = b * s.mask_b + p.head * s.mask_h + i * s.mask_q;
    if (BANDED) {
        const int len_q = cu_q ? cu_q[b + 1] - cu_q[b] : s.sq, len_kv = cu_kv ? cu_kv[b + 1] - cu_kv[b] : s.cols;
        const i64 diagonal = i + (s.bottom_right ? i64(len_kv) - len_q : 0);
        i64 first = s.left < 0 ? 0 : diagonal - s.left, last = s.right < 0 ? len_kv : diagonal + s.right + 1;
        first = first < 0 ? 0 : first;
        last = last > len_kv ? len_kv : last;
        last = last > s.cols ? s.cols : last;
        p.first = int(first);
        p.last = i < len_q && last > first ? int(last) : p.first;
    }
    return p;
}

__device__ __forceinline__ bool touches(const Place& p, int col) {
    return FULL || (col < p.last && (!BANDED || col + VEC > p.first));
}
__device__ __forceinline__ bool sees(const Place& p, int col) { return !BANDED || (col >= p.first && col < p.last); }
__device__ __forceinline__ int column(int i, int rank) { return (i * SIZE + rank) * VEC; }

// Runs f(i, column) for this thread's vectors of the row.
template <class F> __device__ __forceinline__ void each(int rank, int cols, F f) {
    if constexpr (ITERS > 0) {
#pragma unroll
        for (int i = 0; i < ITERS; ++i) {
            if (FULL || column(i, rank) < cols) f(i, column(i, rank));
        }
    } else {
        for (int col = rank * VEC; col < cols; col += SIZE * VEC) f(0, col);
    }
}

// The scaled scores of a vector; minus infinity where they are hidden.
__device__ __forceinline__ void scores(const T* x, const u8* mask, const Place& p, int col, float scale,
                                       float (&f)[VEC]) {
#pragma unroll
    for (int j = 0; j < VEC; ++j) f[j] = nothing();
    if (!touches(p, col)) return;
    to_floats(load<VEC>(x + col), f);
    Vec<u8, VEC> hidden = {};
    if (MASK) hidden = load<VEC>(mask + p.mask + col);
#pragma unroll
    for (int j = 0; j < VEC; ++j) f[j] = sees(p, col + j) && !(MASK && hidden[j]) ? f[j] * scale : nothing();
}

extern "C" __global__ void __launch_bounds__(THREADS)
    softmax_forward(const T* x, T* y, const u8* __restrict__ mask, const float* __restrict__ sink, float* share,
                    const int* __restrict__ cu_q, const int* __restrict__ cu_kv, i64 mask_b, i64 mask_h, i64 mask_q,
                    int rows, int cols, int sq, int heads, int left, int right, int bottom_right, float scale) {
    __shared__ float scratch[32];
    const int rank = threadIdx.x % SIZE;
    const i64 mine = i64(blockIdx.x) * TEAMS + threadIdx.x / SIZE;
    const bool inside = mine < rows;
    const int row = inside ? int(mine) : rows - 1;  // a team behind the last row keeps in step
    const Shape shape = {rows, cols, sq, heads, left, right, bottom_right, mask_b, mask_h, mask_q};
    const Place p = find(shape, row, cu_q, cu_kv);
    const T* from = x + i64(row) * cols;
    T* to = y + i64(row) * cols;

    float f[HELD][VEC], top = nothing();
    each(rank, cols, [&](int i, int col) {
        scores(from, mask, p, col, scale, f[i]);
#pragma unroll
        for (int j = 0; j < VEC; ++j) top = fmaxf(top, f[i][j]);
    });
    top = over_team<true>(top, scratch);
    const float off = SINK ? sink[p.head] : nothing();
    if (SINK) top = fmaxf(top, off);
    const float base = top == nothing() ? 0.f : top;

    float sum = 0.f;
    each(rank, cols, [&](int i, int col) {
        if (ITERS == 0) scores(from, mask, p, col, scale, f[i]);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            f[i][j] = expf(f[i][j] - base);
            sum += f[i][j];
        }
    });
    sum = over_team<false>(sum, scratch);
    const float own = SINK ? expf(off - base) : 0.f;
    if (SINK) sum += own;
    const float inverse = sum == 0.f ? 0.f : __fdiv_rn(1.f, sum);
    if (!inside) return;
    if (SINK && rank == 0) share[p.share] = own * inverse;
    each(rank, cols, [&](int i, int col) {
        if (ITERS == 0) {
            scores(from, mask, p, col, scale, f[i]);
#pragma unroll
            for (int j = 0; j < VEC; ++j) f[i][j] = expf(f[i][j] - base);
        }
#pragma unroll
        for (int j = 0; j < VEC; ++j) f[i][j] *= inverse;
        store<VEC>(to + col, round_to(f[i], T()));
    });
}

// Two vectors of the row as floats, zero where nothing is seen.
__device__ __forceinline__ void weights(const T* y, const T* dy, const Place& p, int col, float (&w)[VEC],
                                        float (&g)[VEC]) {
#pragma unroll
    for (int j = 0; j < VEC; ++j) w[j] = g[j] = 0.f;
    if (!touches(p, col)) return;
    to_floats(load<VEC>(y + col), w);
    to_floats(load<VEC>(dy + col), g);
    if (!BANDED) return;
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
        if (!sees(p, col + j)) w[j] = g[j] = 0.f;
    }
}

// partials [batch * sq, heads]: what each row adds to dsink. MASK is not looked at: y is zero there.
extern "C" __global__ void __launch_bounds__(THREADS)
    softmax_backward(const T* __restrict__ dy, const T* __restrict__ y, T* dx, const float* __restrict__ share,
                     float* partials, const int* __restrict__ cu_q, const int* __restrict__ cu_kv, int rows, int cols,
                     int sq, int heads, int left, int right, int bottom_right, float scale) {
    __shared__ float scratch[32];
    const int rank = threadIdx.x % SIZE;
    const i64 mine = i64(blockIdx.x) * TEAMS + threadIdx.x / SIZE;
    const bool inside = mine < rows;
    const int row = inside ? int(mine) : rows - 1;
    const Shape shape = {rows, cols, sq, heads, left, right, bottom_right, 0, 0, 0};
    const Place p = find(shape, row, cu_q, cu_kv);
    const i64 begin = i64(row) * cols;

    float w[HELD][VEC], g[HELD][VEC], along = 0.f;
    each(rank, cols, [&](int i, int col) {
        weights(y + begin, dy + begin, p, col, w[i], g[i]);
#pragma unroll
        for (int j = 0; j < VEC; ++j) along = fmaf(w[i][j], g[i][j], along);
    });
    along = over_team<false>(along, scratch);
    if (!inside) return;
    if (SINK && rank == 0) partials[p.share] = -share[p.share] * along;
    each(rank, cols, [&](int i, int col) {
        if (ITERS == 0) weights(y + begin, dy + begin, p, col, w[i], g[i]);
#pragma unroll
        for (int j = 0; j < VEC; ++j) w[i][j] = scale * (w[i][j] * (g[i][j] - along));
        store<VEC>(dx + begin + col, round_to(w[i], T()));
    });
}
