// Rows divided by their length, forward and backward: y = x * r, r = 1 / sqrt(sum(x^2) + eps);
// dx = r * (dy - y * sum(dy * y)), with y = x * r unrounded and computed again.
//
//   x, y, dy, dx [rows, cols] of T, dense
//
// A team of SIZE threads takes a row, TEAMS teams make a block (common/row.cuh), a block takes TEAMS rows. A thread
// holds its ITERS vectors of a row in registers; ITERS=0 reads a long row again instead. Rows are heads of 64 to 256
// channels as a rule, so a row is a quarter of a warp or so.
// H200, 2026-11-21, 262144 rows of 128, bf16 (benchmarks/attention_kernels.py): forward 91 % of the speed of a copy.
//
// options: -default-device
// compile-check: DTYPE=bf16 VEC=8 SIZE=16 ITERS=1 FULL=1 TEAMS=16
// compile-check: DTYPE=float VEC=4 SIZE=128 ITERS=4 FULL=0 TEAMS=2
// compile-check: DTYPE=fp16 VEC=1 SIZE=1024 ITERS=0 FULL=0 TEAMS=1
#include "common/row.cuh"

typedef DTYPE T;
constexpr int THREADS = SIZE * TEAMS;
typedef Team<SIZE, TEAMS> RowTeam;
typedef RowOf<T, VEC, ITERS, SIZE, FULL>::type Row;

extern "C" __global__ void __launch_bounds__(THREADS)
    l2_norm_forward(const T* __restrict__ x, T* __restrict__ y, i64 rows, int cols, float eps) {
    __shared__ float2 scratch[RowTeam::SCRATCH];
    RowTeam team(scratch);
    const i64 at = i64(blockIdx.x) * TEAMS + team.index;
    Row row;
    // A team behind the last row keeps in step with the others, on the first row.
    row.read(x + (at < rows ? at : 0) * cols, team.rank, cols);
    float squares = 0.f;
    row.each(team.rank, cols, [&](int, const auto& v) {
        float f[VEC];
        to_floats(v, f);
#pragma unroll
        for (int j = 0; j < VEC; ++j) squares = fmaf(f[j], f[j], squares);
    });
    const float r = __frsqrt_rn(team.sum(squares) + eps);
    if (at >= rows) return;
    row.each(team.rank, cols, [&](int col, const auto& v) {
        float f[VEC];
        to_floats(v, f);
#pragma unroll
        for (int j = 0; j < VEC; ++j) f[j] *= r;
        store_vec(y + at * cols + col, round_to(f, T()));
    });
}

extern "C" __global__ void __launch_bounds__(THREADS)
    l2_norm_backward(const T* __restrict__ dy, const T* __restrict__ x, T* __restrict__ dx, i64 rows, int cols,
                     float eps) {
    __shared__ float2 scratch[RowTeam::SCRATCH];
    RowTeam team(scratch);
    const i64 at = i64(blockIdx.x) * TEAMS + team.index, begin = (at < rows ? at : 0) * cols;
    Row row;
    row.read(x + begin, team.rank, cols);
    float2 sums = make_float2(0.f, 0.f);  // x^2, x * dy
    row.each(team.rank, cols, [&](int col, const auto& v) {
        float f[VEC], g[VEC];
        to_floats(v, f);
        to_floats(load_vec<VEC>(dy + begin + col), g);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
            sums.x = fmaf(f[j], f[j], sums.x);
            sums.y = fmaf(f[j], g[j], sums.y);
        }
    });
    sums = team.sum(sums);
    if (at >= rows) return;
    const float r = __frsqrt_rn(sums.x + eps), along = sums.y * r;
    row.each(team.rank, cols, [&](int col, const auto& v) {  // dy comes from L1 this time
        float f[VEC], g[VEC];
        to_floats(v, f);
        to_floats(load_vec<VEC>(dy + begin + col), g);
#pragma unroll
        for (int j = 0; j < VEC; ++j) g[j] = (g[j] - f[j] * r * along) * r;
        store_vec(dx + begin + col, round_to(g, T()));
    });
}
