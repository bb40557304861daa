// The KV cache of inference (te_core/ops/kv_cache.py has the rules): copies whose places are read on the device.
//
//   kv_append   new k and v (sbhd, bshd, or thd: PACKED) -> behind the tokens of their sequences
//   kv_move     rows of a contiguous cache, in turn, through a spare one where they change places
//   kv_gather   pages -> contiguous rows, zeros behind the end of a sequence
//
// A thread moves one vector of WIDTH bytes of one token: threadIdx.x and blockIdx.y number the vectors of the token,
// those of k first, and threadIdx.y and blockIdx.x the tokens. So a decoding step of few tokens has all its loads in
// flight at once. Sizes and strides count in vectors.
// H200, 2026-11-21, 64 x 128 tokens of 8 heads of 128, bf16 (benchmarks/attention_kernels.py): 72 % of the speed of a
// copy into rows, 65 % into pages of 64.
//
// -D WIDTH=1|2|4|8|16  PACKED=0|1  PAGED=0|1
// compile-check: WIDTH=16 PACKED=0 PAGED=0
// compile-check: WIDTH=16 PACKED=1 PAGED=1
// compile-check: WIDTH=2 PACKED=1 PAGED=0
// compile-check: WIDTH=1 PACKED=0 PAGED=1
#include "common/numeric.cuh"

typedef Bits<WIDTH>::type T;

__device__ __forceinline__ int token_slot() { return blockIdx.x * blockDim.y + threadIdx.y; }
__device__ __forceinline__ int vector_slot() { return blockIdx.y * blockDim.x + threadIdx.x; }

// The token of the cache, rows or pages flattened, at a position of a sequence; -1 where there is none.
__device__ __forceinline__ i64 place(int row, int position, int capacity, const int* pages, int page_size,
                                     int page_count) {
    if (position < 0 || position >= capacity) return -1;
    if (!PAGED) return i64(row) * capacity + position;
    const int page = pages[i64(row) * (capacity / page_size) + position / page_size];
    if (page < 0 || page >= page_count) return -1;
    return i64(page) * page_size + position % page_size;
}

// The sequence that a packed token belongs to; `rows` behind the last one.
__device__ __forceinline__ int sequence_of(const int* cu, int rows, int token) {
    int low = 0, high = rows;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (cu[middle + 1] > token) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

// `tokens`: of a row, or all packed ones.
extern "C" __global__ void __launch_bounds__(256)
    kv_append(const T* __restrict__ new_k, const T* __restrict__ new_v, T* __restrict__ k_cache,
              T* __restrict__ v_cache, const int* __restrict__ cu_new, const int* __restrict__ cu_cached,
              const int* __restrict__ pages, i64 k_token, i64 k_row, i64 k_head, i64 v_token, i64 v_row, i64 v_head,
              int k_width, int v_width, int groups, int rows, int tokens, int capacity, int page_size,
              int page_count) {
    const int slot = token_slot(), vector = vector_slot();
    const int k_vectors = groups * k_width, v_vectors = groups * v_width;
    if (slot >= (PACKED ? tokens : rows * tokens) || vector >= k_vectors + v_vectors) return;
    const int row = PACKED ? sequence_of(cu_new, rows, slot) : slot / tokens;
    if (row >= rows) return;
    const int begin = cu_new[row], count = cu_new[row + 1] - begin;
    const int token = slot - (PACKED ? begin : row * tokens);
    if (token < 0 || token >= count) return;
    const int cached = cu_cached[row + 1] - cu_cached[row];
    const i64 to = place(row, cached - count + token, capacity, pages, page_size, page_count);
    if (to < 0) return;
    const int source = PACKED ? slot : token;
    if (vector < k_vectors) {
        k_cache[to * k_vectors + vector] =
            new_k[source * k_token + row * k_row + vector / k_width * k_head + vector % k_width];
    } else {
        const int mine = vector - k_vectors;
        v_cache[to * v_vectors + mine] =
            new_v[source * v_token + row * v_row + mine / v_width * v_head + mine % v_width];
    }
}

// Each thread makes all moves for its own place in the rows, so that moves need not wait for one another.
extern "C" __global__ void __launch_bounds__(256)
    kv_move(T* k_cache, T* v_cache, const int* __restrict__ moves, int count, int longest, int capacity, int k_vectors,
            int v_vectors, int rows) {
    const int token = token_slot(), vector = vector_slot();
    if (token >= longest || vector >= k_vectors + v_vectors) return;
    const bool of_k = vector < k_vectors;
    const i64 pitch = of_k ? k_vectors : v_vectors;
    T* const mine = (of_k ? k_cache + vector : v_cache + (vector - k_vectors)) + token * pitch;
    T spare = {};
    for (int i = 0; i < count; ++i) {
        const int to = moves[3 * i], from = moves[3 * i + 1];
        if (token >= moves[3 * i + 2] || to >= rows || from >= rows) continue;
        const T value = from < 0 ? spare : mine[i64(from) * capacity * pitch];
        if (to < 0) {
            spare = value;
        } else {
            mine[i64(to) * capacity * pitch] = value;
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    kv_gather(const T* __restrict__ k_cache, const T* __restrict__ v_cache, T* __restrict__ k, T* __restrict__ v,
              const int* __restrict__ cu_cached, const int* __restrict__ pages, int k_vectors, int v_vectors, int rows,
              int capacity, int page_size, int page_count) {
    const int slot = token_slot(), vector = vector_slot();
    if (slot >= rows * capacity || vector >= k_vectors + v_vectors) return;
    const int row = slot / capacity, position = slot - row * capacity;
    const bool held = position < cu_cached[row + 1] - cu_cached[row];
    const i64 from = held ? place(row, position, capacity, pages, page_size, page_count) : -1;
    if (vector < k_vectors) {
        k[i64(slot) * k_vectors + vector] = from < 0 ? T{} : k_cache[from * k_vectors + vector];
    } else {
        const int mine = vector - k_vectors;
        v[i64(slot) * v_vectors + mine] = from < 0 ? T{} : v_cache[from * v_vectors + mine];
    }
}
