// Where the rows of a matrix go (te_core/ops/permute.py has the rules): the maps that permute.cu reads.
//
//   mask_count, mask_place      routing [tokens, experts], not 0 where routed -> map int32 [tokens, 2 * experts + 1]
//   index_count, index_place,   expert ids int32 [tokens, slots] -> map int32 [slots][tokens]
//   index_rest
//   chunk_map                   sizes and new order of chunks -> map int32 [rows]
//
// The first two are stable counting sorts in two launches, with nothing known to the host: blocks count their part,
// then each block adds up what stands before it and numbers its entries. A warp numbers 32 tokens: its lanes are
// experts, and a lane holds the 32 tokens of its expert as bits. Expert ids are sorted by their low ten bits; only if
// some have others (1024 experts or more, negative ids) does index_rest, one block, sort on by the rest.
//
// options: -default-device
// -D SOURCE=u8|int|i64 (of the mask or of the sizes)  ORDER=int|i64 (of the chunks' order)
// compile-check: SOURCE=int ORDER=int
// compile-check: SOURCE=u8 ORDER=int
// compile-check: SOURCE=i64 ORDER=i64
#include "common/numeric.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int REST_THREADS = 1024, REST_WARPS = REST_THREADS / 32;
constexpr int LOW_BITS = 10, BINS = 1 << LOW_BITS;  // of an expert id: index_count, index_place
constexpr int REST_BITS = 8, REST_BINS = 1 << REST_BITS;
constexpr int BATCH = 8;  // loads of a thread on their way

// ---- sums over a block -------------------------------------------------------------------------------------

// v[i] becomes the sum of those before it; the sum of all is returned. `scratch` holds an int for each warp.
template <int SIZE> __device__ __forceinline__ int exclusive_scan(int* v, int count, int* scratch) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int carry = 0;
    for (int first = 0; first < count; first += SIZE) {
        const int i = first + threadIdx.x, mine = i < count ? v[i] : 0;
        int sum = mine;
#pragma unroll
        for (int o = 1; o < 32; o <<= 1) {
            const int other = __shfl_up_sync(~0u, sum, o);
            if (lane >= o) sum += other;
        }
        if (lane == 31) scratch[warp] = sum;
        __syncthreads();
        int before = carry;
        for (int w = 0; w < SIZE / 32; ++w) {
            if (w < warp) before += scratch[w];
            carry += scratch[w];
        }
        if (i < count) v[i] = before + sum - mine;
        __syncthreads();
    }
    return carry;
}

// start[bin]: the entries of lower bins, and those of this bin in the blocks before this one.
__device__ __forceinline__ void find_starts(const int* __restrict__ counts, int bins, int* start, int* earlier,
                                            int* scratch) {
    for (int bin = threadIdx.x; bin < bins; bin += THREADS) start[bin] = earlier[bin] = 0;
    __syncthreads();
    const int all = gridDim.x * bins, mine = blockIdx.x * bins;
    for (int first = threadIdx.x; first < all; first += BATCH * THREADS) {
        int found[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int at = first + i * THREADS;
            found[i] = at < all ? counts[at] : 0;
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int at = first + i * THREADS;
            if (found[i] == 0) continue;
            atomicAdd(start + at % bins, found[i]);
            if (at < mine) atomicAdd(earlier + at % bins, found[i]);
        }
    }
    __syncthreads();
    exclusive_scan<THREADS>(start, bins, scratch);
    for (int bin = threadIdx.x; bin < bins; bin += THREADS) start[bin] += earlier[bin];
    __syncthreads();
}

// Counts of warps [warp][bin] become the places where each begins; `start` moves behind the last.
__device__ __forceinline__ void share_starts(int* of_warps, int* start, int bins, int warps) {
    for (int bin = threadIdx.x; bin < bins; bin += blockDim.x) {
        int next = start[bin];
        for (int w = 0; w < warps; ++w) {
            const int count = of_warps[w * bins + bin];
            of_warps[w * bins + bin] = next;
            next += count;
        }
        start[bin] = next;
    }
}

// ---- mask --------------------------------------------------------------------------------------------------

// Which of 32 tokens an expert gets, as bits.
__device__ __forceinline__ u32 column_of(const SOURCE* __restrict__ routing, i64 tokens, int experts, i64 first,
                                         int expert) {
    SOURCE found[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        found[i] = expert < experts && first + i < tokens ? routing[(first + i) * experts + expert] : SOURCE(0);
    }
    u32 column = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) column |= u32(found[i] != 0) << i;
    return column;
}

// A block has `tiles` tiles of THREADS tokens.
extern "C" __global__ void __launch_bounds__(THREADS)
    mask_count(const SOURCE* __restrict__ routing, int* __restrict__ counts, i64 tokens, int experts, int tiles) {
    extern __shared__ int total[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int e = threadIdx.x; e < experts; e += THREADS) total[e] = 0;
    __syncthreads();
    for (int tile = 0; tile < tiles; ++tile) {
        const i64 first = (i64(blockIdx.x) * tiles + tile) * THREADS + warp * 32;
        for (int group = 0; group < experts; group += 32) {
            const u32 column = column_of(routing, tokens, experts, first, group + lane);
            if (column) atomicAdd(total + group + lane, __popc(column));
        }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += THREADS) counts[blockIdx.x * experts + e] = total[e];
}

// Dynamic shared memory: (2 + WARPS) * experts ints.
extern "C" __global__ void __launch_bounds__(THREADS)
    mask_place(const SOURCE* __restrict__ routing, const int* __restrict__ counts, int* __restrict__ map, i64 tokens,
               int experts, int tiles) {
    extern __shared__ int start[];
    __shared__ int scratch[WARPS];
    int* const of_warps = start + 2 * experts;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, width = 2 * experts + 1;
    int* const mine = of_warps + warp * experts;
    find_starts(counts, experts, start, start + experts, scratch);
    for (int tile = 0; tile < tiles; ++tile) {
        const i64 first = (i64(blockIdx.x) * tiles + tile) * THREADS + warp * 32;
        for (int e = lane; e < experts; e += 32) mine[e] = 0;
        for (int group = 0; group < experts; group += 32) {
            const u32 column = column_of(routing, tokens, experts, first, group + lane);
            if (group + lane < experts) mine[group + lane] = __popc(column);
        }
        __syncthreads();
        share_starts(of_warps, start, experts, WARPS);
        __syncthreads();
        int above = 0;  // copies of token `lane` for experts of the groups behind: the map lists the last expert first
        for (int group = (experts - 1) & ~31; group >= 0; group -= 32) {
            const int expert = group + lane;
            const u32 column = column_of(routing, tokens, experts, first, expert);
            const int begin = expert < experts ? mine[expert] : 0;
            for (int i = 0; i < 32; ++i) {
                const bool routed = column >> i & 1;
                const u32 row = __ballot_sync(~0u, routed);
                if (row == 0) continue;
                const int before = __shfl_sync(~0u, above, i);
                if (routed) {
                    int* const entry = map + (first + i) * width + before + __popc(row >> lane >> 1);
                    entry[0] = begin + __popc(column & ((1u << i) - 1));
                    entry[experts] = expert;
                }
                if (lane == i) above += __popc(row);
            }
        }
        if (first + lane < tokens) map[(first + lane) * width + 2 * experts] = above;
        __syncthreads();
    }
}

// ---- index -------------------------------------------------------------------------------------------------

// Ids in the order of unsigned numbers; of the usual ones the bits above the low ones are these.
__device__ __forceinline__ u32 key_of(int id) { return u32(id) ^ 0x80000000u; }
constexpr u32 USUAL = 0x80000000u >> LOW_BITS;

// The entries first .. last of a warp in turn: put(entry, its place). `next` is where the warp's entries of a bin go.
template <class Bin, class Put>
__device__ __forceinline__ void number_entries(i64 first, i64 last, int* next, Bin bin_of, Put put) {
    const int lane = threadIdx.x & 31;
    for (i64 i = first; i < last; i += 32) {
        const bool there = i + lane < last;
        const int bin = there ? bin_of(i + lane) : -1;
        const u32 alike = __match_any_sync(~0u, bin);
        const int rank = __popc(alike & ((1u << lane) - 1));
        const int begin = there ? next[bin] : 0;
        __syncwarp();
        if (there && rank == 0) next[bin] = begin + __popc(alike);
        __syncwarp();
        if (there) put(i + lane, begin + rank);
    }
}

__device__ __forceinline__ void note(int* __restrict__ map, i64 entry, int place, i64 tokens, int slots, i64 rows) {
    map[entry % slots * tokens + entry / slots] = place < rows ? place : -1;
}

// A block has `share` entries, a multiple of THREADS. odd[block]: whether some ids are not in 0 .. BINS - 1.
extern "C" __global__ void __launch_bounds__(THREADS)
    index_count(const int* __restrict__ ids, int* __restrict__ counts, int* __restrict__ odd, i64 entries, i64 share) {
    __shared__ int total[BINS];
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) total[bin] = 0;
    __syncthreads();
    const i64 first = blockIdx.x * share, last = min(first + share, entries);
    int others = 0;
    for (i64 i = first + threadIdx.x; i < last; i += THREADS) {
        const u32 key = key_of(ids[i]);
        atomicAdd(total + key % BINS, 1);
        others |= key >> LOW_BITS != USUAL;
    }
    others = __syncthreads_or(others);
    if (threadIdx.x == 0) odd[blockIdx.x] = others;
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) counts[blockIdx.x * BINS + bin] = total[bin];
}

// Writes the map, or, if some ids are unusual, the entries sorted by their low bits.
extern "C" __global__ void __launch_bounds__(THREADS)
    index_place(const int* __restrict__ ids, const int* __restrict__ counts, const int* __restrict__ odd,
                int* __restrict__ map, int* __restrict__ sorted, i64 entries, i64 share, i64 tokens, i64 rows,
                int slots) {
    __shared__ int start[BINS], of_warps[WARPS * BINS], scratch[WARPS];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    find_starts(counts, BINS, start, of_warps, scratch);
    int others = 0;
    for (int block = threadIdx.x; block < gridDim.x; block += THREADS) others |= odd[block];
    others = __syncthreads_or(others);
    int* const mine = of_warps + warp * BINS;
    for (int bin = lane; bin < BINS; bin += 32) mine[bin] = 0;
    __syncwarp();
    const i64 first = blockIdx.x * share + warp * (share / WARPS), last = min(first + share / WARPS, entries);
    for (i64 i = first + lane; i < last; i += 32) atomicAdd(mine + key_of(ids[i]) % BINS, 1);
    __syncthreads();
    share_starts(of_warps, start, BINS, WARPS);
    __syncthreads();
    number_entries(
        first, last, mine, [&](i64 i) { return int(key_of(ids[i]) % BINS); },
        [&](i64 i, int place) {
            if (others) {
                sorted[place] = int(i);
            } else {
                note(map, i, place, tokens, slots, rows);
            }
        });
}

// One block: what index_place left sorted by the low bits, stably by the others. `spare` is as long as `sorted`.
extern "C" __global__ void __launch_bounds__(REST_THREADS)
    index_rest(const int* __restrict__ ids, const int* __restrict__ odd, int* map, int* sorted, int* spare,
               i64 entries, i64 tokens, i64 rows, int slots, int blocks) {
    __shared__ int start[REST_BINS], of_warps[REST_WARPS * REST_BINS], scratch[REST_WARPS];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int others = 0;
    for (int block = threadIdx.x; block < blocks; block += REST_THREADS) others |= odd[block];
    if (!__syncthreads_or(others)) return;
    const i64 share = ((entries + REST_THREADS - 1) / REST_THREADS) * 32;
    const i64 first = warp * share, last = min(first + share, entries);
    int* const mine = of_warps + warp * REST_BINS;
    for (int shift = LOW_BITS; shift < 32; shift += REST_BITS) {
        const bool at_last = shift + REST_BITS >= 32;
        const auto bin_of = [&](i64 i) { return int(key_of(ids[sorted[i]]) >> shift) & (REST_BINS - 1); };
        for (int bin = lane; bin < REST_BINS; bin += 32) mine[bin] = 0;
        __syncwarp();
        for (i64 i = first + lane; i < last; i += 32) atomicAdd(mine + bin_of(i), 1);
        __syncthreads();
        for (int bin = threadIdx.x; bin < REST_BINS; bin += REST_THREADS) {
            start[bin] = 0;
            for (int w = 0; w < REST_WARPS; ++w) start[bin] += of_warps[w * REST_BINS + bin];
        }
        __syncthreads();
        exclusive_scan<REST_THREADS>(start, REST_BINS, scratch);
        share_starts(of_warps, start, REST_BINS, REST_WARPS);
        __syncthreads();
        number_entries(first, last, mine, bin_of, [&](i64 i, int place) {
            if (at_last) {
                note(map, sorted[i], place, tokens, slots, rows);
            } else {
                spare[place] = sorted[i];
            }
        });
        __syncthreads();
        int* const other = sorted;
        sorted = spare;
        spare = other;
    }
}

// ---- chunks ------------------------------------------------------------------------------------------------

// Dynamic shared memory: 3 * chunks ints. A chunk that `order` does not name goes nowhere.
extern "C" __global__ void __launch_bounds__(THREADS)
    chunk_map(const SOURCE* __restrict__ sizes, const ORDER* __restrict__ order, int* __restrict__ map, i64 rows,
              int chunks, int share) {
    extern __shared__ int begin[];
    __shared__ int scratch[WARPS];
    int *const behind = begin + chunks, *const target = behind + chunks;
    for (int c = threadIdx.x; c < chunks; c += THREADS) {
        const i64 chunk = order[c];
        begin[c] = max(int(sizes[c]), 0);
        behind[c] = chunk >= 0 && chunk < chunks ? max(int(sizes[chunk]), 0) : 0;
        target[c] = -1;
    }
    __syncthreads();
    const int total = exclusive_scan<THREADS>(begin, chunks, scratch);
    exclusive_scan<THREADS>(behind, chunks, scratch);
    for (int c = threadIdx.x; c < chunks; c += THREADS) {
        const i64 chunk = order[c];
        if (chunk >= 0 && chunk < chunks) target[chunk] = behind[c];
    }
    __syncthreads();
    const i64 first = i64(blockIdx.x) * share, last = min(first + share, rows);
    for (i64 row = first + threadIdx.x; row < last; row += THREADS) {
        int low = 0, high = chunks;  // the last chunk that begins here or before: empty ones lose
        while (low < high) {
            const int middle = (low + high) / 2;
            if (begin[middle] <= row) low = middle + 1;
            else high = middle;
        }
        const int chunk = low - 1;
        int to = int(row);
        if (row < total) to = target[chunk] < 0 ? -1 : target[chunk] + int(row) - begin[chunk];
        map[row] = to;
    }
}
