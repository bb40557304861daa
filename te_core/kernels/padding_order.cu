// The order of tokens in rows with padding (te_core/ops/padding_order.py has the rules), for attention.
//
//   mask [rows][length], a byte each, not 0 where padding is ->
//   there, again int64 [rows * length], cu int32 [rows + 1]
//
// A block for each row: it counts the row's tokens, then numbers tokens and padding, a tile of 4096 places at a time.
// Warps read 32 places side by side and count them by ballots. The last block counts the tokens of all rows, a warp for
// each 512 places, and adds them up, 1024 rows at a time. So one launch does, and no memory has to be zero before it.
#include "common/numeric.cuh"

constexpr int THREADS = 1024, WARPS = THREADS / 32;
constexpr int GROUPS = 4, TILE = THREADS * GROUPS;           // 32 places side by side: of a warp in a tile
constexpr int CHUNK_GROUPS = 16, CHUNK = 32 * CHUNK_GROUPS;  // places that a warp counts at a time

__device__ __forceinline__ bool is_token(const u8* __restrict__ row, i64 place, int length) {
    return place < length && row[place] == 0;
}

// The tokens among the places of a chunk, in all lanes of a warp.
__device__ __forceinline__ int tokens_of(const u8* __restrict__ row, i64 first, int length) {
    bool found[CHUNK_GROUPS];
#pragma unroll
    for (int i = 0; i < CHUNK_GROUPS; ++i) found[i] = is_token(row, first + 32 * i + (threadIdx.x & 31), length);
    int count = 0;
#pragma unroll
    for (int i = 0; i < CHUNK_GROUPS; ++i) count += __popc(__ballot_sync(~0u, found[i]));
    return count;
}

// The sum of a number of each warp over those before this one; `all` gets that over all. `scratch` [WARPS].
__device__ __forceinline__ int sum_before(int of_warp, int* scratch, int& all) {
    const int warp = threadIdx.x >> 5;
    if ((threadIdx.x & 31) == 0) scratch[warp] = of_warp;
    __syncthreads();
    int before = 0;
    all = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        if (w < warp) before += scratch[w];
        all += scratch[w];
    }
    __syncthreads();
    return before;
}

__device__ __forceinline__ void add_up(const u8* __restrict__ mask, int* __restrict__ cu, int rows, int length,
                                       int* counts, int* scratch) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int chunks = int((i64(length) + CHUNK - 1) / CHUNK);
    int earlier = 0;  // tokens of the rows before these
    if (threadIdx.x == 0) cu[0] = 0;
    for (i64 first = 0; first < rows; first += THREADS) {
        const int here = int(min(i64(rows) - first, i64(THREADS)));
        counts[threadIdx.x] = 0;
        __syncthreads();
        for (int unit = warp; unit < here * chunks; unit += WARPS) {
            const int row = unit / chunks;
            const i64 place = i64(unit - row * chunks) * CHUNK;
            const int count = tokens_of(mask + (first + row) * length, place, length);
            if (lane == 0 && count) atomicAdd(counts + row, count);
        }
        __syncthreads();
        int sum = counts[threadIdx.x];
#pragma unroll
        for (int o = 1; o < 32; o <<= 1) {
            const int other = __shfl_up_sync(~0u, sum, o);
            if (lane >= o) sum += other;
        }
        int all;
        const int before = sum_before(__shfl_sync(~0u, sum, 31), scratch, all);
        if (int(threadIdx.x) < here) cu[first + threadIdx.x + 1] = earlier + before + sum;
        earlier += all;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    padding_order(const u8* __restrict__ mask, i64* __restrict__ there, i64* __restrict__ again, int* __restrict__ cu,
                  int rows, int length, i64 token_step, i64 row_step) {
    __shared__ int counts[THREADS], scratch[WARPS];
    if (int(blockIdx.x) == rows) {
        add_up(mask, cu, rows, length, counts, scratch);
        return;
    }
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u8* const row = mask + i64(blockIdx.x) * length;
    const i64 base = blockIdx.x * row_step;
    int mine = 0, tokens;
    for (i64 first = i64(warp) * CHUNK; first < length; first += WARPS * CHUNK) mine += tokens_of(row, first, length);
    sum_before(mine, scratch, tokens);
    int earlier = 0;  // tokens before this tile
    for (i64 first = 0; first < length; first += TILE) {
        const i64 begin = first + warp * (32 * GROUPS) + lane;
        u32 groups[GROUPS];
        int count = 0, all;
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) {
            groups[i] = __ballot_sync(~0u, is_token(row, begin + 32 * i, length));
            count += __popc(groups[i]);
        }
        int before = earlier + sum_before(count, scratch, all);
#pragma unroll
        for (int i = 0; i < GROUPS; ++i) {
            const i64 place = begin + 32 * i;
            const int nth = before + __popc(groups[i] & ((1u << lane) - 1));  // tokens before this place
            const i64 to = groups[i] >> lane & 1 ? nth : tokens + (place - nth);
            if (place < length) {
                again[base + place * token_step] = base + to * token_step;
                there[base + to * token_step] = base + place * token_step;
            }
            before += __popc(groups[i]);
        }
        earlier += all;
    }
}
