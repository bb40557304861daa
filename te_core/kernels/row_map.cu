// Where the rows of a matrix go (te_core/ops/permute.py has the rules): the maps that permute.cu reads.
//
//   mask_count, mask_place      routing [tokens, experts], not 0 where routed -> map int32 [tokens, 2 * experts + 1] and,
//   mask_map                    if asked for, starts int32 [experts + 1]; mask_map is both in one block, for few tokens
//   index_count, index_place    expert ids int32 [tokens, slots] -> map int32 [slots][tokens]
//   chunk_map                   sizes and new order of chunks -> map int32 [rows]
//
// Stable counting sorts in two launches, with nothing known to the host: blocks count their part, then each block adds
// up what stands before it and numbers its entries. The first launch leaves a mask as bits: a word has the 32 tokens
// of an expert, so a warp, whose lanes are experts, numbers 32 tokens by ballots. Expert ids are sorted by their low
// ten bits; only if some have others (1024 experts or more, negative ids) the block that ends last sorts on by the rest.
//
// options: -default-device
// -D SOURCE=u8|int|i64 (of the mask or of the sizes)  ORDER=int|i64 (of the chunks' order)
// compile-check: SOURCE=int ORDER=int
// compile-check: SOURCE=u8 ORDER=int
// compile-check: SOURCE=i64 ORDER=i64
#include "common/numeric.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int TILE_GROUPS = 4, TILE = 32 * TILE_GROUPS;  // tokens of a mask that a block has at a time
constexpr int ITEMS = 4, PART = 32 * ITEMS;              // expert ids of a thread, of a warp at a time
constexpr int LOW_BITS = 10, BINS = 1 << LOW_BITS;       // of an expert id: index_count, index_place
constexpr int REST_BITS = 8, REST_BINS = 1 << REST_BITS;
constexpr int BATCH = 32;  // loads of a thread on their way

// ---- sums over a block -------------------------------------------------------------------------------------

// v[i] becomes the sum of those before it; the sum of all is returned. `scratch` holds an int for each warp.
__device__ __forceinline__ int exclusive_scan(int* v, int count, int* scratch) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int carry = 0;
    for (int first = 0; first < count; first += THREADS) {
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
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            if (w < warp) before += scratch[w];
            carry += scratch[w];
        }
        if (i < count) v[i] = before + sum - mine;
        __syncthreads();
    }
    return carry;
}

// start[bin]: the entries of lower bins, and those of this bin in the blocks before this one; the sum of all is returned.
// `counts` has `pitch` bins a block. Threads side by side read bins side by side, and share the blocks out.
__device__ __forceinline__ int find_starts(const int* __restrict__ counts, int bins, int pitch, int* start,
                                           int* earlier, int* scratch) {
    for (int bin = threadIdx.x; bin < bins; bin += THREADS) start[bin] = earlier[bin] = 0;
    __syncthreads();
    const int across = bins > THREADS / 2 ? THREADS : bins <= 1 ? 1 : 1 << (32 - __clz(bins - 1));
    const int parts = THREADS / across, blocks = gridDim.x, self = blockIdx.x;
    for (int bin = threadIdx.x % across; bin < bins; bin += across) {
        int all = 0, before = 0;
        for (int first = threadIdx.x / across; first < blocks; first += parts * BATCH) {
            int found[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int block = first + i * parts;
                found[i] = block < blocks ? counts[block * pitch + bin] : 0;
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                all += found[i];
                if (first + i * parts < self) before += found[i];
            }
        }
        atomicAdd(start + bin, all);
        atomicAdd(earlier + bin, before);
    }
    __syncthreads();
    const int total = exclusive_scan(start, bins, scratch);
    for (int bin = threadIdx.x; bin < bins; bin += THREADS) start[bin] += earlier[bin];
    __syncthreads();
    return total;
}

// ---- mask --------------------------------------------------------------------------------------------------

// Which of 32 tokens an expert gets, as bits.
__device__ __forceinline__ u32 column_of(const SOURCE* __restrict__ routing, i64 tokens, int experts, i64 first,
                                         int expert) {
    const SOURCE* const from = routing + first * experts + expert;
    const int count = expert < experts ? int(min(tokens - first, i64(32))) : 0;
    SOURCE found[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) found[i] = i < count ? from[i64(i) * experts] : SOURCE(0);
    u32 column = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) column |= u32(found[i] != 0) << i;
    return column;
}

// Tokens first .. first + TILE - 1: each word of `columns` [groups of 32 tokens][experts], and total[expert] raised.
__device__ __forceinline__ void count_tile(const SOURCE* __restrict__ routing, u32* columns, int* total, i64 tokens,
                                           int experts, i64 first) {
    const int lane = threadIdx.x & 31, units = TILE_GROUPS * ((experts + 31) / 32);
    for (int unit = threadIdx.x >> 5; unit < units; unit += WARPS) {
        const i64 group = first + unit % TILE_GROUPS * 32;
        const int expert = unit / TILE_GROUPS * 32 + lane;
        if (group >= tokens) continue;
        const u32 column = column_of(routing, tokens, experts, group, expert);
        if (expert < experts) columns[(group >> 5) * experts + expert] = column;
        if (column) atomicAdd(total + expert, __popc(column));
    }
}

// A unit of a tile: 32 tokens and 32 experts, of a warp.
struct Unit {
    i64 group;  // its first token
    int expert;
    u32 column;   // of this lane's expert
    int earlier;  // tokens that this expert has in the groups of the tile before

    __device__ __forceinline__ Unit(const u32* columns, i64 tokens, int experts, i64 first, int unit) {
        const int mine = unit % TILE_GROUPS;
        group = first + mine * 32;
        expert = unit / TILE_GROUPS * 32 + int(threadIdx.x & 31);
        const u32* const from = columns + (first >> 5) * experts + expert;
        column = 0;
        earlier = 0;
#pragma unroll
        for (int g = 0; g < TILE_GROUPS; ++g) {
            const bool there = g <= mine && first + g * 32 < tokens && expert < experts;
            const u32 found = there ? from[i64(g) * experts] : 0u;
            if (g == mine) column = found;
            else earlier += __popc(found);
        }
    }
};

// The lines of a tile's tokens. start[expert] is where its first token here goes, and moves behind the last.
// `routed` [groups of 32 experts][TILE]: how many of these experts a token goes to.
__device__ __forceinline__ void place_tile(const u32* columns, int* __restrict__ map, int* start, u8* routed,
                                           i64 tokens, int experts, i64 first) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, width = 2 * experts + 1;
    const int groups = (experts + 31) / 32, units = TILE_GROUPS * groups;
    for (int u = warp; u < units; u += WARPS) {
        const Unit unit(columns, tokens, experts, first, u);
        u32 mine = 0;  // experts of token `lane`
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const u32 row = __ballot_sync(~0u, unit.column >> i & 1);
            if (lane == i) mine = row;
        }
        routed[u / TILE_GROUPS * TILE + u % TILE_GROUPS * 32 + lane] = u8(__popc(mine));
    }
    __syncthreads();
    for (int u = warp; u < units; u += WARPS) {
        const Unit unit(columns, tokens, experts, first, u);
        const u8* const counts = routed + u % TILE_GROUPS * 32 + lane;
        int above = 0;  // copies of token `lane` for higher experts: the map lists the last expert first
        for (int g = groups - 1; g > u / TILE_GROUPS; --g) above += counts[g * TILE];
        int next = unit.expert < experts ? start[unit.expert] + unit.earlier : 0;
        int* const lines = map + unit.group * width;
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const bool here = unit.column >> i & 1;
            const u32 row = __ballot_sync(~0u, here);
            const int before = __shfl_sync(~0u, above, i);
            if (here) {
                int* const entry = lines + (i * width + before + __popc(row >> lane >> 1));
                entry[0] = next++;
                entry[experts] = unit.expert;
            }
        }
        if (u < TILE_GROUPS && unit.group + lane < tokens) lines[lane * width + 2 * experts] = above + counts[0];
    }
    __syncthreads();
    for (int expert = threadIdx.x; expert < experts; expert += THREADS) {
        for (int g = 0; g < TILE_GROUPS && first + g * 32 < tokens; ++g) {
            start[expert] += __popc(columns[((first >> 5) + g) * experts + expert]);
        }
    }
    __syncthreads();
}

// A block has `tiles` tiles. counts [blocks][experts]
extern "C" __global__ void __launch_bounds__(THREADS)
    mask_count(const SOURCE* __restrict__ routing, u32* columns, int* __restrict__ counts, i64 tokens, int experts,
               int tiles) {
    extern __shared__ int total[];
    for (int e = threadIdx.x; e < experts; e += THREADS) total[e] = 0;
    __syncthreads();
    for (int tile = 0; tile < tiles; ++tile) {
        count_tile(routing, columns, total, tokens, experts, (i64(blockIdx.x) * tiles + tile) * TILE);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += THREADS) counts[blockIdx.x * experts + e] = total[e];
}

// Dynamic shared memory of both: 3 * experts ints, in whole groups of 32 experts.
extern "C" __global__ void __launch_bounds__(THREADS)
    mask_place(const u32* columns, const int* __restrict__ counts, int* __restrict__ map, int* __restrict__ starts,
               i64 tokens, int experts, int tiles) {
    extern __shared__ int start[];
    __shared__ int scratch[WARPS];
    const int total = find_starts(counts, experts, experts, start, start + experts, scratch);
    if (starts != nullptr && blockIdx.x == 0) {
        for (int e = threadIdx.x; e <= experts; e += THREADS) starts[e] = e < experts ? start[e] : total;
        __syncthreads();
    }
    u8* const routed = reinterpret_cast<u8*>(start + 2 * experts);
    for (int tile = 0; tile < tiles; ++tile) {
        const i64 first = (i64(blockIdx.x) * tiles + tile) * TILE;
        if (first < tokens) place_tile(columns, map, start, routed, tokens, experts, first);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    mask_map(const SOURCE* __restrict__ routing, u32* columns, int* __restrict__ map, int* __restrict__ starts,
             i64 tokens, int experts) {
    extern __shared__ int start[];
    __shared__ int scratch[WARPS];
    for (int e = threadIdx.x; e < experts; e += THREADS) start[e] = 0;
    __syncthreads();
    for (i64 first = 0; first < tokens; first += TILE) count_tile(routing, columns, start, tokens, experts, first);
    __syncthreads();
    const int total = exclusive_scan(start, experts, scratch);
    for (int e = threadIdx.x; starts != nullptr && e <= experts; e += THREADS) starts[e] = e < experts ? start[e] : total;
    __syncthreads();
    u8* const routed = reinterpret_cast<u8*>(start + 2 * experts);
    for (i64 first = 0; first < tokens; first += TILE) {
        place_tile(columns, map, start, routed, tokens, experts, first);
    }
}

// ---- index -------------------------------------------------------------------------------------------------

// Ids in the order of unsigned numbers; of the usual ones the bits above the low ones are these.
__device__ __forceinline__ u32 key_of(int id) { return u32(id) ^ 0x80000000u; }
constexpr u32 USUAL = 0x80000000u >> LOW_BITS;

__device__ __forceinline__ void note(int* __restrict__ map, u32 entry, int place, i64 tokens, u32 slots, i64 rows) {
    map[entry % slots * tokens + entry / slots] = place < rows ? place : -1;
}

// Counts of warps [warp][pitch] become the places where each begins; `start` moves behind the last.
__device__ __forceinline__ void share_starts(int* of_warps, int* start, int bins, int pitch) {
    for (int bin = threadIdx.x; bin < bins; bin += THREADS) {
        int next = start[bin];
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const int count = of_warps[w * pitch + bin];
            of_warps[w * pitch + bin] = next;
            next += count;
        }
        start[bin] = next;
    }
}

// The place of this lane's entry, which is of this bin (-1: there is none); all lanes of a warp. `next` moves on.
__device__ __forceinline__ int number_entry(int bin, int* next) {
    const u32 alike = __match_any_sync(~0u, bin);
    const int rank = __popc(alike & ((1u << (threadIdx.x & 31)) - 1));
    const int begin = bin < 0 ? 0 : next[bin];
    __syncwarp();
    if (bin >= 0 && rank == 0) next[bin] = begin + __popc(alike);
    __syncwarp();
    return begin + rank;
}

// A block has `share` entries, a multiple of WARPS * PART. used[block]: the bins up to its highest, more than BINS if
// some ids are not in 0 .. BINS - 1. `done` becomes 0 for index_place.
extern "C" __global__ void __launch_bounds__(THREADS)
    index_count(const int* __restrict__ ids, int* __restrict__ counts, int* __restrict__ used, int* __restrict__ done,
                i64 entries, i64 share) {
    __shared__ int total[BINS], most;
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) total[bin] = 0;
    if (threadIdx.x == 0) {
        most = 0;
        if (blockIdx.x == 0) *done = 0;
    }
    __syncthreads();
    const i64 first = blockIdx.x * share, last = min(first + share, entries);
    int highest = 0;
#pragma unroll 4
    for (i64 i = first + threadIdx.x; i < last; i += THREADS) {
        const u32 key = key_of(ids[i]);
        atomicAdd(total + key % BINS, 1);
        highest = max(highest, key >> LOW_BITS == USUAL ? int(key % BINS) + 1 : BINS + 1);
    }
    atomicMax(&most, highest);
    __syncthreads();
    if (threadIdx.x == 0) used[blockIdx.x] = most;
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) counts[blockIdx.x * BINS + bin] = total[bin];
}

// One block: what is sorted by the low bits, stably by the others. `spare` is as long as `sorted`.
__device__ __noinline__ void sort_on(const int* __restrict__ ids, int* map, int* sorted, int* spare, int* start,
                                     int* of_warps, int* scratch, i64 entries, i64 tokens, i64 rows, int slots) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const i64 share = ((entries + THREADS - 1) / THREADS) * 32;
    const i64 first = warp * share, last = min(first + share, entries);
    int* const mine = of_warps + warp * REST_BINS;
    for (int shift = LOW_BITS; shift < 32; shift += REST_BITS) {
        const bool at_last = shift + REST_BITS >= 32;
        const auto bin_of = [&](i64 i) { return int(key_of(ids[sorted[i]]) >> shift) & (REST_BINS - 1); };
        for (int bin = lane; bin < REST_BINS; bin += 32) mine[bin] = 0;
        __syncwarp();
        for (i64 i = first + lane; i < last; i += 32) atomicAdd(mine + bin_of(i), 1);
        __syncthreads();
        for (int bin = threadIdx.x; bin < REST_BINS; bin += THREADS) {
            start[bin] = 0;
            for (int w = 0; w < WARPS; ++w) start[bin] += of_warps[w * REST_BINS + bin];
        }
        __syncthreads();
        exclusive_scan(start, REST_BINS, scratch);
        share_starts(of_warps, start, REST_BINS, REST_BINS);
        __syncthreads();
        for (i64 i = first; i < last; i += 32) {
            const bool there = i + lane < last;
            const int place = number_entry(there ? bin_of(i + lane) : -1, mine);
            if (there && at_last) note(map, u32(sorted[i + lane]), place, tokens, slots, rows);
            if (there && !at_last) spare[place] = sorted[i + lane];
        }
        __syncthreads();
        int* const other = sorted;
        sorted = spare;
        spare = other;
    }
}

// Writes the map, or, if some ids are unusual, the entries sorted by their low bits, which the last block sorts on.
extern "C" __global__ void __launch_bounds__(THREADS)
    index_place(const int* __restrict__ ids, const int* __restrict__ counts, const int* __restrict__ used, int* done,
                int* map, int* sorted, int* spare, i64 entries, i64 share, i64 tokens, i64 rows, int slots) {
    __shared__ int start[BINS], of_warps[WARPS * BINS], scratch[WARPS], most;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    if (threadIdx.x == 0) most = 0;
    __syncthreads();
    for (int block = threadIdx.x; block < gridDim.x; block += THREADS) atomicMax(&most, used[block]);
    __syncthreads();
    const bool others = most > BINS;
    const int bins = min(most, BINS);
    find_starts(counts, bins, BINS, start, of_warps, scratch);
    int* const mine = of_warps + warp * BINS;
    const i64 behind = min((blockIdx.x + 1) * share, entries);
    for (i64 tile = blockIdx.x * share; tile < behind; tile += WARPS * PART) {
        const i64 first = tile + warp * PART + lane;
        int bin[ITEMS];
#pragma unroll
        for (int k = 0; k < ITEMS; ++k) bin[k] = first + k * 32 < behind ? int(key_of(ids[first + k * 32]) % BINS) : -1;
        for (int b = lane; b < bins; b += 32) mine[b] = 0;
        __syncwarp();
#pragma unroll
        for (int k = 0; k < ITEMS; ++k) {
            if (bin[k] >= 0) atomicAdd(mine + bin[k], 1);
        }
        __syncthreads();
        share_starts(of_warps, start, bins, BINS);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < ITEMS; ++k) {
            const int place = number_entry(bin[k], mine);
            const u32 entry = u32(first) + k * 32;
            if (bin[k] >= 0 && others) sorted[place] = int(entry);
            if (bin[k] >= 0 && !others) note(map, entry, place, tokens, slots, rows);
        }
    }
    if (!others) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) most = atomicAdd(done, 1);
    __syncthreads();
    if (most != int(gridDim.x) - 1) return;
    __threadfence();
    sort_on(ids, map, sorted, spare, start, of_warps, scratch, entries, tokens, rows, slots);
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
    const int total = exclusive_scan(begin, chunks, scratch);
    exclusive_scan(behind, chunks, scratch);
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
