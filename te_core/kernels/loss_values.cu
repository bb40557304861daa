// The losses of rows from their facts (te_core/ops/loss.py), and their total: sum or mean. One block, so that the order
// of the additions depends on the number of rows alone; a row is 12 bytes beside its logits' thousands.
//
//   known [ranks, rows, 3] float32: lse, sum, x_target       losses [rows]       total [2]: it, and its gradient's scale
//
// HOW: 0 the sum; 1 the mean, NaN over no rows; 2 the mean, 0 over no rows.
//
// options: -default-device
// compile-check: TARGET=i64 HOW=1
// compile-check: TARGET=int HOW=0
#include "common/numeric.cuh"

constexpr int THREADS = 1024;

extern "C" __global__ void __launch_bounds__(THREADS)
    loss_values(const float* __restrict__ known, const TARGET* __restrict__ target, float* losses, float* total,
                i64 rows, i64 classes, i64 ignore, int ranks, float smoothing, float z_loss) {
    __shared__ float scratch[32];
    double sum = 0.;
    i64 count = 0;
    for (i64 row = threadIdx.x; row < rows; row += THREADS) {
        float loss = 0.f;
        if (i64(target[row]) != ignore) {
            float top = __int_as_float(0xff800000), powers = 0.f, all = 0.f, seen = 0.f;
            for (int r = 0; r < ranks; ++r) {
                const float* fact = known + (r * rows + row) * 3;
                top = fmaxf(top, fact[0]);
                all += fact[1];
                seen += fact[2];
            }
            for (int r = 0; r < ranks; ++r) powers += expf(known[(r * rows + row) * 3] - top);
            const float lse = ranks == 1 ? known[row * 3] : top + logf(powers);
            loss = fmaf(z_loss * lse, lse, lse - (1.f - smoothing) * seen);
            // A class that is masked by minus infinity counts where it is smoothed only.
            if (smoothing != 0.f) loss -= smoothing / float(classes) * all;
            sum += loss;
            ++count;
        }
        losses[row] = loss;
    }
    const float all = block_sum<THREADS>(float(sum), scratch), counted = block_sum<THREADS>(float(count), scratch);
    if (threadIdx.x == 0) {
        total[0] = HOW == 0 || (HOW == 2 && counted == 0.f) ? all : __fdiv_rn(all, counted);
        total[1] = HOW == 0 ? 1.f : __fdiv_rn(1.f, fmaxf(counted, 1.f));
    }
}
