// Many tensors in one launch: scaled, or summed up in squares.
//
//   scale_many   out of OUT = in of IN * scale (*scale where that is not null); *flag = 1 where an input is not finite
//   square_many  partials[table.offset + block] = sum((in * *scale)^2) over the block's elements
//   norm_of_each  a block a tensor: the root of the sum of its partials, to its `out`
//   norm_of_all   one block: that of all partials
// Partial sums are added in an order that only sizes decide.
//
// -D IN, OUT=float|bf16|fp16  CAPACITY=… (32 bytes each: 124 fit the 4 KB of every device, 1016 the 32,764 bytes of CUDA
//    12.1 and later)
// options: -default-device
// compile-check: IN=bf16 OUT=float CAPACITY=124
// compile-check: IN=float OUT=float CAPACITY=1016
#include "common/tensors.cuh"

struct Entry {
    const IN* in;
    OUT* out;
    i64 count;
    u32 first;
    u32 vector;
};
struct Table {
    Entry group[CAPACITY];
    const float* scale;
    float* result;  // square_many: partials; norm_many: of each tensor
    u32* flag;
    i64 offset;  // of this launch's partials
    float factor;
    u32 count;
    u32 blocks;
};

extern "C" __global__ void __launch_bounds__(TENSOR_THREADS) scale_many(const __grid_constant__ Table table) {
    const Entry& e = table.group[group_of(table, blockIdx.x)];
    const float scale = table.scale ? *table.scale : table.factor;
    bool finite = true;
    each_piece(blockIdx.x - e.first, e.count, e.vector != 0, [&](auto n, i64 at) {
        constexpr int N = decltype(n)::value;
        float f[N];
        read_piece<N>(e.in + at, f);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            finite = finite && isfinite(f[j]);
            f[j] = __fmul_rn(f[j], scale);
        }
        write_piece<N>(e.out + at, f);
    });
    if (!finite && table.flag) *table.flag = 1;
}

extern "C" __global__ void __launch_bounds__(TENSOR_THREADS) square_many(const __grid_constant__ Table table) {
    __shared__ float scratch[32];
    const Entry& e = table.group[group_of(table, blockIdx.x)];
    const float scale = table.scale ? *table.scale : 1.f;
    float sum = 0.f;
    each_piece(blockIdx.x - e.first, e.count, e.vector != 0, [&](auto n, i64 at) {
        constexpr int N = decltype(n)::value;
        float f[N];
        read_piece<N>(e.in + at, f);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const float x = f[j] * scale;
            sum = fmaf(x, x, sum);
        }
    });
    sum = block_sum<TENSOR_THREADS>(sum, scratch);
    if (threadIdx.x == 0) table.result[table.offset + blockIdx.x] = sum;
}

// The root of the sum of some partials, by one block.
__device__ __forceinline__ void root_of(const float* partials, i64 count, float* out) {
    __shared__ float scratch[32];
    float sum = 0.f;
    for (i64 i = threadIdx.x; i < count; i += TENSOR_THREADS) sum += partials[i];
    sum = block_sum<TENSOR_THREADS>(sum, scratch);
    if (threadIdx.x == 0) *out = __fsqrt_rn(sum);
}

// The norm of all: partials [count] -> out [1].
extern "C" __global__ void __launch_bounds__(TENSOR_THREADS) norm_of_all(const float* partials, float* out, i64 count) {
    root_of(partials, count, out);
}

// The norm of each tensor of a table, whose partials square_many left: table.out.
extern "C" __global__ void __launch_bounds__(TENSOR_THREADS) norm_of_each(const __grid_constant__ Table table) {
    const u32 i = blockIdx.x, first = table.group[i].first;
    const u32 end = i + 1 < table.count ? table.group[i + 1].first : table.blocks;
    root_of(table.result + table.offset + first, end - first, reinterpret_cast<float*>(table.group[i].out));
}
