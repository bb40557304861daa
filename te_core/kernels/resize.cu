// A matrix cropped, or filled up with zeros: x [rows_in, cols_in] -> out [rows, cols], elements of SIZE bytes.
//
// One thread per element of out. Only shapes that are no multiples of 16 come here (layers/linear.py), so it is
// kept plain: its traffic is a small part of the GEMM that it follows.
//
// compile-check: SIZE=1
// compile-check: SIZE=2
// compile-check: SIZE=4
#include "common/numeric.cuh"

typedef Bits<SIZE>::type T;

extern "C" __global__ void __launch_bounds__(256)
resize(const T* __restrict__ x, T* __restrict__ out, i64 rows_in, i64 cols_in, i64 rows, i64 cols) {
    const i64 i = blockIdx.x * 256LL + threadIdx.x;
    if (i >= rows * cols) return;
    const i64 r = i / cols, c = i % cols;
    out[i] = r < rows_in && c < cols_in ? x[r * cols_in + c] : T(0);
}
