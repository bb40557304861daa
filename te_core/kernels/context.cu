// Small things that context parallelism asks of a batch (te_core/ops/context.py has the rules).
//
//   context_lengths   running sums of the valid tokens of spans of chunks, and where spans begin: a block a span
//   context_mark      NaN into the tokens of sequences that cannot be cut into chunks: a block a sequence
//   context_draws     seeds of their own for numbers
//   context_max       maxima of columns, among columns of minus infinity
//
// compile-check:
#include "common/numeric.cuh"

constexpr int THREADS = 1024, WARPS = THREADS / 32;

struct Span {
    int low[2], high[2];  // ranges of chunks; the second may be empty
    int parts, skip, before, unused;
};
struct Spans {  // as te_core/backends/cuda/context.py packs it
    const int *cu, *padded;
    int* out;  // [2 * spans][sequences + 1]
    int sequences, size, chunk, unused;
    Span spans[96];
};

__device__ __forceinline__ int count_in(int length, int low, int high, int before, int chunk) {
    if (low >= high || length <= low * chunk) return 0;
    return max(min(length, high * chunk) - max(low * chunk - before, 0), 0);
}

extern "C" __global__ void __launch_bounds__(THREADS) context_lengths(const __grid_constant__ Spans table) {
    __shared__ int of_warps[WARPS];
    const Span& span = table.spans[blockIdx.x];
    int* const sums = table.out + i64(blockIdx.x) * 2 * (table.sequences + 1);
    int* const places = sums + table.sequences + 1;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int earlier = 0;
    if (threadIdx.x == 0) {
        sums[0] = 0;
        places[table.sequences] = table.chunk ? max(span.skip * table.chunk - span.before, 0)
                                              : table.padded[table.sequences] / span.parts;
    }
    for (int first = 0; first < table.sequences; first += THREADS) {
        const int i = first + threadIdx.x;
        int sum = 0;
        if (i < table.sequences) {
            const int length = table.cu[i + 1] - table.cu[i];
            int chunk = table.chunk, begin = 0;
            if (!chunk) {
                begin = table.padded[i];
                chunk = (table.padded[i + 1] - begin) / (2 * table.size);
            }
            sum = count_in(length, span.low[0], span.high[0], span.before, chunk) +
                  count_in(length, span.low[1], span.high[1], span.before, chunk);
            places[i] = begin / span.parts + max(span.skip * chunk - span.before, 0);
        }
#pragma unroll
        for (int o = 1; o < 32; o <<= 1) {
            const int other = __shfl_up_sync(~0u, sum, o);
            if (lane >= o) sum += other;
        }
        if (lane == 31) of_warps[warp] = sum;
        __syncthreads();
        int before = earlier;
        for (int w = 0; w < WARPS; ++w) {
            if (w < warp) before += of_warps[w];
            earlier += of_warps[w];
        }
        __syncthreads();
        if (i < table.sequences) sums[i + 1] = before + sum;
    }
}

extern "C" __global__ void __launch_bounds__(256)
    context_mark(u8* t, const int* __restrict__ padded, int size, int tokens, int heads, i64 width, i64 token_step,
                 i64 head_step) {
    const int begin = padded[blockIdx.x], end = padded[blockIdx.x + 1];
    if ((end - begin) % (2 * size) == 0) return;
    const i64 row = heads * width;
    for (i64 token = max(begin / size, 0); token < min(end / size, tokens); ++token) {
        for (i64 i = threadIdx.x; i < row; i += blockDim.x) {
            t[token * token_step + i / width * head_step + i % width] = 255;
        }
    }
}

struct Numbers {
    const i64* rng;
    i64* out;
    i64 count;
    i64 numbers[256];
};

extern "C" __global__ void __launch_bounds__(256) context_draws(const __grid_constant__ Numbers table) {
    const int i = threadIdx.x;
    if (i >= table.count) return;
    u64 z = u64(table.rng[0]) + (u64(table.numbers[i]) + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    table.out[2 * i] = i64(z ^ (z >> 31));
    table.out[2 * i + 1] = table.rng[1];
}

extern "C" __global__ void __launch_bounds__(256)
    context_max(const float* __restrict__ parts, float* __restrict__ out, int rows, int width, int heads, int first) {
    const int head = blockIdx.x * blockDim.x + threadIdx.x, mine = head - first;
    if (head >= heads) return;
    float top = -infinity();
    if (mine >= 0 && mine < width) {
        for (int i = 0; i < rows; ++i) top = fmaxf(top, parts[i64(i) * width + mine]);
    }
    out[head] = top;
}
