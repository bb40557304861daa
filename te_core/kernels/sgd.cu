// A step of SGD on many tensors in one launch (te_core.ops.optimizer.SgdRule states the rule): no products are fused
// with sums.
//
// -D GRAD, PARAM, BUFFER, COPY=float|bf16|fp16  HAS_BUFFER=0|1  HAS_COPY=0|1
//    CAPACITY=… (48 bytes each: 84 fit the 4 KB of every device, 680 the 32,764 bytes of CUDA 12.1 and later)
// options: -default-device
// compile-check: GRAD=fp16 PARAM=float BUFFER=float COPY=fp16 HAS_BUFFER=1 HAS_COPY=1 CAPACITY=84
// compile-check: GRAD=bf16 PARAM=bf16 BUFFER=bf16 COPY=bf16 HAS_BUFFER=0 HAS_COPY=0 CAPACITY=680
#include "common/tensors.cuh"

struct Entry {
    const GRAD* grad;
    PARAM* param;
    BUFFER* buffer;
    COPY* copy;
    i64 count;
    u32 first;
    u32 vector;
};
struct Table {
    Entry group[CAPACITY];
    float lr, momentum, rest, decay, scale;
    int nesterov, first_run, decay_last;
    u32 count;
};

__device__ __forceinline__ void step(const Table& t, float g, float& p, float& b) {
    g = __fmul_rn(g, t.scale);
    if (!t.decay_last) g = __fadd_rn(g, __fmul_rn(t.decay, p));
    if (HAS_BUFFER) {
        b = t.first_run ? g : __fadd_rn(__fmul_rn(t.momentum, b), __fmul_rn(t.rest, g));
        g = t.nesterov ? __fadd_rn(g, __fmul_rn(t.momentum, b)) : b;
    }
    if (t.decay_last) g = __fadd_rn(g, __fmul_rn(t.decay, p));
    p = __fsub_rn(p, __fmul_rn(t.lr, g));
}

extern "C" __global__ void __launch_bounds__(TENSOR_THREADS) sgd(const __grid_constant__ Table table) {
    const Entry& e = table.group[group_of(table, blockIdx.x)];
    each_piece(blockIdx.x - e.first, e.count, e.vector != 0, [&](auto n, i64 at) {
        constexpr int N = decltype(n)::value;
        float g[N], p[N], b[N] = {};
        read_piece<N>(e.grad + at, g);
        read_piece<N>(e.param + at, p);
        if (HAS_BUFFER && !table.first_run) read_piece<N>(e.buffer + at, b);
#pragma unroll
        for (int j = 0; j < N; ++j) step(table, g[j], p[j], b[j]);
        write_piece<N>(e.param + at, p);
        if (HAS_BUFFER) write_piece<N>(e.buffer + at, b);
        if (HAS_COPY) write_piece<N>(e.copy + at, p);
    });
}
