// Cross entropy over rows of logits: what a row has to tell (facts), and the gradient. te_core/ops/loss.py has the
// formulas.
//
//   x, dx [rows, cols] of T dense, dx may be x        target [rows]
//   facts [rows, 3] float32: lse, sum, x_target       known [ranks, rows, 3], those of all ranks
//
// A block takes a row and holds its first HELD vectors a thread in shared memory, where asynchronous copies bring them:
// all of a row is on its way at once, and what is held is read from memory once. The few vectors behind those of a very
// long row are read again, from L2. Each thread reads what it has copied itself, so that no barrier is needed.
// PEEL=1: rows are no whole vectors, so that each begins elsewhere between two 16-byte boundaries, x and dx alike; what
// lies before the first boundary and behind the last is taken by single threads.
// FIND=1 finds the facts; GRADIENT=1 writes dx, by the facts that it has found or by those of all ranks.
// Exponentials are powers of two; that of log2(e) is multiplied the same way everywhere, so that its rounding goes off.
// H100, 2026-11-27, bf16 (benchmarks/loss.py; of the speed of a copy): loss and gradient 97 % at 32000 classes, 87 % at
// 128256.
//
// options: -default-device
// compile-check: DTYPE=bf16 TARGET=i64 VEC=8 SIZE=512 HELD=8 PEEL=0 FIND=1 GRADIENT=1
// compile-check: DTYPE=bf16 TARGET=i64 VEC=8 SIZE=1024 HELD=14 PEEL=1 FIND=1 GRADIENT=1
// compile-check: DTYPE=float TARGET=int VEC=4 SIZE=256 HELD=8 PEEL=1 FIND=1 GRADIENT=0
// compile-check: DTYPE=fp16 TARGET=i64 VEC=1 SIZE=128 HELD=8 PEEL=0 FIND=0 GRADIENT=1
#include "common/row.cuh"

typedef DTYPE T;
typedef Vec<T, VEC> V;
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fffffff); }

// Where a row's target is: in `at` (its column here), if it is one of these columns.
struct Goal {
    bool ignored, wrong, here;
    int at;
};

__device__ __forceinline__ Goal find(i64 target, int cols, i64 first, i64 classes, i64 ignore) {
    Goal g = {target == ignore, false, false, -1};
    g.wrong = !g.ignored && (target < 0 || target >= classes);
    g.here = !g.ignored && target >= first && target < first + cols;
    if (g.here) g.at = int(target - first);
    return g;
}

// This thread's part of a row: vectors in shared memory, those behind them, and a value where the row is no whole vectors.
struct Row {
    const T* x;
    V* held;
    int cols, begin, end;  // vectors lie from begin to end

    __device__ __forceinline__ Row(const T* row, void* memory, int n)
        : x(row), held(static_cast<V*>(memory)), cols(n), begin(0), end(n) {
        if (!PEEL) return;
        begin = min(cols, int((16 - (reinterpret_cast<u64>(row) & 15)) % 16 / sizeof(T)));
        end = begin + (cols - begin) / VEC * VEC;
    }
    __device__ __forceinline__ int column(int i) const { return begin + (i * SIZE + int(threadIdx.x)) * VEC; }
    // Runs f(column) for this thread's values that are in no vector.
    template <class F> __device__ __forceinline__ void edges(F f) const {
        const int n = threadIdx.x;
        if (PEEL && n < begin) f(n);
        if (PEEL && end + n < cols) f(end + n);
    }
    __device__ __forceinline__ void fetch() const {
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            if (column(i) < end) copy_async(&held[i * SIZE + threadIdx.x], x + column(i));
        }
        commit_copies();
    }
    // Runs f(column, values) for each; what is behind comes first, while the rest is on its way.
    template <class F> __device__ __forceinline__ void each(F f) const {
        edges([&](int col) { f(col, load<1>(x + col)); });
        for (int i = HELD; column(i) < end; ++i) f(column(i), load<VEC>(x + column(i)));
        wait_copies<0>();
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            if (column(i) < end) f(column(i), held[i * SIZE + threadIdx.x]);
        }
    }
};

// The largest value so far, and the sum of powers relative to it.
struct Powers {
    float top = -infinity(), sum = 0.f;
    __device__ __forceinline__ static float base(float top) { return top == -infinity() ? 0.f : top * LOG2E; }

    template <int N> __device__ __forceinline__ void add(const float (&f)[N]) {
        float most = f[0];
#pragma unroll
        for (int j = 1; j < N; ++j) most = fmaxf(most, f[j]);
        if (most > top) {
            sum *= exp2f(top * LOG2E - base(most));
            top = most;
        }
        const float shift = base(top);
#pragma unroll
        for (int j = 0; j < N; ++j) sum += exp2f(fmaf(f[j], LOG2E, -shift));
    }
    // The logarithm of the sum of the exponentials of the whole row, in every thread.
    __device__ __forceinline__ float log_sum(float* scratch) const {
        const float whole = block_max<SIZE>(top, scratch);
        const float total = block_sum<SIZE>(sum * exp2f(top * LOG2E - base(whole)), scratch);
        return (base(whole) + log2f(total)) * LN2;
    }
};

// The same over all ranks.
__device__ __forceinline__ float log_sum_of(const float* known, int ranks, i64 rows, i64 row) {
    if (ranks == 1) return known[row * 3];
    float top = -infinity(), sum = 0.f;
    for (int r = 0; r < ranks; ++r) top = fmaxf(top, known[(r * rows + row) * 3]);
    for (int r = 0; r < ranks; ++r) sum += expf(known[(r * rows + row) * 3] - (top == -infinity() ? 0.f : top));
    return top + logf(sum);
}

extern "C" __global__ void __launch_bounds__(SIZE)
    loss(const T* x, const TARGET* __restrict__ target, float* facts, const float* known, const float* __restrict__ grad,
         T* dx, i64 rows, i64 first, i64 classes, i64 ignore, int cols, int ranks,
         int grad_step, float smoothing, float z_loss) {
    extern __shared__ uint4 dynamic[];
    __shared__ float scratch[32];
    const i64 row = blockIdx.x;
    const Goal goal = find(target[row], cols, first, classes, ignore);
    const Row values(x + row * cols, dynamic, cols);
    T* to = dx + row * cols;
    if (goal.ignored) {
        if (FIND && threadIdx.x < 3) facts[row * 3 + threadIdx.x] = 0.f;
        if (GRADIENT) {
            values.edges([&](int col) { to[col] = from_float<T>(0.f); });
            const V zeros = {};
            for (int i = 0; values.column(i) < values.end; ++i) store<VEC>(to + values.column(i), zeros);
        }
        return;
    }
    values.fetch();
    float lse;
    if (FIND) {
        // Before any of dx is written, which may be x.
        const float seen = goal.wrong ? not_a_number() : goal.here ? to_float(values.x[goal.at]) : 0.f;
        Powers powers;
        float sum = 0.f;
        values.each([&](int, const auto& v) {
            constexpr int N = sizeof(v) / sizeof(T);
            float f[N];
            to_floats(v, f);
            powers.add(f);
#pragma unroll
            for (int j = 0; j < N; ++j) sum += f[j];
        });
        lse = powers.log_sum(scratch);
        sum = block_sum<SIZE>(sum, scratch);
        if (threadIdx.x == 0) {
            facts[row * 3] = lse;
            facts[row * 3 + 1] = sum;
            facts[row * 3 + 2] = seen;
        }
    } else {
        lse = log_sum_of(known, ranks, rows, row);
    }
    if (!GRADIENT) return;
    float g = grad ? grad[row * grad_step] : 1.f;
    if (goal.wrong) g = not_a_number();
    const float shift = lse * LOG2E, factor = g * fmaf(2.f * z_loss, lse, 1.f);
    const float even = g * smoothing / float(classes), own = g * (1.f - smoothing);
    values.each([&](int col, const auto& v) {
        constexpr int N = sizeof(v) / sizeof(T);
        float f[N];
        to_floats(v, f);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            f[j] = fmaf(factor, exp2f(fmaf(f[j], LOG2E, -shift)), -even);
            if (col + j == goal.at) f[j] -= own;
        }
        store<N>(to + col, round_to(f, T()));
    });
}
