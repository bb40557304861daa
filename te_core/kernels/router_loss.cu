// The auxiliary loss of a router (te_core/ops/router.py has the formula), and its gradient.
//
//   probs [rows, columns] of T     weights [columns] of WEIGHT, the tokens of each expert     total [1]: N
//   partials: a float a block; arrived: 0, which is left behind
//
// A block has 32 columns of a part of the rows. The last block adds up what all have found, in the order of the blocks:
// the order of all additions depends on the shape alone.
//
// options: -default-device
// compile-check: DTYPE=float WEIGHT=i64 TOTAL=i64
// compile-check: DTYPE=bf16 WEIGHT=int TOTAL=int
// compile-check: DTYPE=fp16 WEIGHT=bf16 TOTAL=i64
#include "common/last_block.cuh"

typedef DTYPE T;
constexpr int THREADS = 256;

__device__ __forceinline__ float number(float v) { return v; }
__device__ __forceinline__ float number(bf16 v) { return to_float(v); }
__device__ __forceinline__ float number(int v) { return float(v); }
__device__ __forceinline__ float number(i64 v) { return float(v); }

__device__ __forceinline__ float factor_of(const TOTAL* total, int experts, int topk, float coeff) {
    const float n = float(*total);
    return __fdiv_rn(__fdiv_rn(__fdiv_rn(__fmul_rn(coeff, float(experts)), float(topk)), n), n);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    router_loss(const T* __restrict__ probs, const WEIGHT* __restrict__ weights, const TOTAL* __restrict__ total, T* loss,
                float* partials, int* arrived, i64 rows, i64 part, int columns, int experts, int topk,
                float coeff) {
    __shared__ float scratch[32];
    const int column = blockIdx.x * 32 + (threadIdx.x & 31), block = blockIdx.y * gridDim.x + blockIdx.x;
    const i64 first = blockIdx.y * part, last = min(first + part, rows);
    float sum = 0.f;
    if (column < columns) {
        for (i64 row = first + (threadIdx.x >> 5); row < last; row += THREADS / 32) {
            sum += to_float(probs[row * columns + column]);
        }
        sum *= number(weights[column]);
    }
    sum = block_sum<THREADS>(sum, scratch);
    if (threadIdx.x == 0) partials[block] = sum;
    if (!last_block(arrived)) return;
    const int blocks = gridDim.x * gridDim.y;
    sum = 0.f;
    for (int i = threadIdx.x; i < blocks; i += THREADS) sum += __ldcg(partials + i);
    sum = block_sum<THREADS>(sum, scratch);
    if (threadIdx.x == 0) *loss = from_float<T>(factor_of(total, experts, topk, coeff) * sum);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    router_loss_backward(const T* __restrict__ dloss, const WEIGHT* __restrict__ weights, const TOTAL* __restrict__ total,
                         T* __restrict__ out, i64 rows, i64 part, int columns, int experts, int topk,
                         float coeff) {
    const int column = blockIdx.x * 32 + (threadIdx.x & 31);
    const i64 first = blockIdx.y * part, last = min(first + part, rows);
    if (column >= columns) return;
    const float factor = factor_of(total, experts, topk, coeff);
    const T value = from_float<T>(factor * number(weights[column]) * to_float(*dloss));
    for (i64 row = first + (threadIdx.x >> 5); row < last; row += THREADS / 32) out[row * columns + column] = value;
}
