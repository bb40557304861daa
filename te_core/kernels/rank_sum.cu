// The summands of all ranks added in float32, in the order of the ranks, and rounded once (te_core/ops/elementwise.py).
//
// parts [ranks, rows, width] dense; out [rows, width], rows `step` apart. A row is shared by `segments` blocks of
// PER_BLOCK vectors of VEC elements, 16 bytes where addresses allow; a thread has one load of every rank in flight.
// Sizes count in vectors, `step` in elements. Bandwidth not measured yet.
//
// -D DTYPE=float|bf16|fp16  VEC=1|2|4|8  RANKS=2..8, or 0: any number
// compile-check: DTYPE=bf16 VEC=8 RANKS=2
// compile-check: DTYPE=float VEC=4 RANKS=4
// compile-check: DTYPE=fp16 VEC=1 RANKS=0
#include "common/row.cuh"

constexpr int THREADS = 256, PER_BLOCK = 1024;

extern "C" __global__ void __launch_bounds__(THREADS)
    rank_sum(const DTYPE* __restrict__ parts, DTYPE* __restrict__ out, i64 rows, i64 width, int segments, int ranks,
             i64 step) {
    const i64 row = blockIdx.x / segments, first = i64(blockIdx.x % segments) * PER_BLOCK;
    const i64 last = min(first + PER_BLOCK, width), apart = rows * width * VEC;
    const int count = RANKS ? RANKS : ranks;
    parts += row * width * VEC;
    out += row * step;
    for (i64 v = first + threadIdx.x; v < last; v += THREADS) {
        float sum[VEC], more[VEC];
        to_floats(load_once<VEC>(parts + v * VEC), sum);
#pragma unroll
        for (int rank = 1; rank < count; ++rank) {
            to_floats(load_once<VEC>(parts + rank * apart + v * VEC), more);
#pragma unroll
            for (int j = 0; j < VEC; ++j) sum[j] = __fadd_rn(sum[j], more[j]);
        }
        store_vec(out + v * VEC, round_to(sum, DTYPE()));
    }
}
