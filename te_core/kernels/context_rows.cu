// Rows of tokens between the ranks of context parallelism (te_core/ops/context_rows.py has the rules): copies.
//
//   HEADS   [token, batch, head] <-> [rank, token, batch, head of the rank]
//   ORDER   tokens in sequence order <-> [rank, token of the rank, ..]: chunks r and 2 * size - 1 - r of each sequence
//
// A token's vectors of WIDTH bytes are dealt to threadIdx.x, a thread several of them at once; threadIdx.y and blockIdx.x
// number the tokens of what is written (HEADS: of the buffer of all ranks), in the order of memory. Steps count in
// vectors. PACKED: a sequence is looked for in the running sums by each thread; they stay in L1.
//
// -D WIDTH=1|2|4|8|16  MOVE=HEADS|ORDER  TO_RANKS=0|1  PACKED=0|1  BATCH_FIRST=0|1
// compile-check: WIDTH=16 MOVE=HEADS TO_RANKS=1 PACKED=0 BATCH_FIRST=0
// compile-check: WIDTH=16 MOVE=ORDER TO_RANKS=0 PACKED=1 BATCH_FIRST=0
// compile-check: WIDTH=1 MOVE=ORDER TO_RANKS=1 PACKED=0 BATCH_FIRST=1
#include "common/numeric.cuh"

enum Move { HEADS, ORDER };
typedef Bits<WIDTH>::type T;
constexpr int AT_ONCE = 4;

struct Sequence {
    int whole, local, chunk;  // where it begins in sequence order and in a rank's tokens; 0 tokens in a chunk: no place
};

// The sequence that a token belongs to, of a tensor that holds 1 / `divisor` of each.
__device__ __forceinline__ Sequence find(const int* cu, int sequences, int token, int divisor, int size, int parts) {
    int low = 0, high = sequences;  // the last sequence that begins at or before the token
    const i64 bound = (i64(token) + 1) * divisor;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (cu[middle + 1] < bound) low = middle + 1; else high = middle;
    }
    if (low >= sequences || cu[low] >= bound) return {0, 0, 0};
    const int begin = cu[low], share = size * parts;
    return {begin / parts, begin / share, (cu[low + 1] - begin) / (2 * share)};
}

extern "C" __global__ void __launch_bounds__(256)
    context_rows(const T* __restrict__ from, T* __restrict__ to, const int* __restrict__ cu, int sequences, int size,
                 int parts, int repeats, int tokens, int whole, int batch, int heads, int pieces, i64 r_rank, i64 r_token,
                 i64 r_batch, i64 r_head, i64 p_token, i64 p_batch, i64 p_head) {
    constexpr bool over_ranks = MOVE == HEADS || TO_RANKS;
    const int count = over_ranks ? tokens : whole;
    int slot = blockIdx.x * blockDim.y + threadIdx.y;
    if (slot >= (over_ranks ? size : 1) * count * batch) return;
    const int inner = BATCH_FIRST ? count : batch, outer = BATCH_FIRST ? batch : count;
    const int x = slot % inner;
    slot /= inner;
    const int y = slot % outer, row = BATCH_FIRST ? y : x;
    int rank = slot / outer, token = BATCH_FIRST ? x : y, place = token, head = 0;
    bool held = true;
    if (MOVE == HEADS) {
        head = rank / repeats * heads;
    } else {
        Sequence s = {0, 0, tokens / 2};
        if (PACKED) s = find(cu, sequences, token, over_ranks ? parts * size : parts, size, parts);
        const int begin = over_ranks ? s.local : s.whole;
        const int number = s.chunk > 0 ? (token - begin) / s.chunk : 2 * size, within = token - begin - number * s.chunk;
        held = number < (over_ranks ? 2 : 2 * size);
        if (over_ranks) {
            place = s.whole + (number ? 2 * size - 1 - rank : rank) * s.chunk + within;
            held = held && u32(place) < u32(whole);  // running sums may say anything
        } else {
            rank = number < size ? number : 2 * size - 1 - number;
            token = s.local + (number < size ? 0 : s.chunk) + within;
            held = held && u32(token) < u32(tokens);
        }
    }
    const i64 ranked = rank * r_rank + token * r_token + row * r_batch;
    const i64 plain = place * p_token + row * p_batch + head * p_head;
    const int vectors = heads * pieces;
    for (int first = threadIdx.x; first < vectors; first += AT_ONCE * blockDim.x) {
        T values[AT_ONCE];
        i64 target[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int v = first + i * blockDim.x;
            if (v >= vectors) break;
            const int h = v / pieces, piece = v - h * pieces;
            const i64 in_ranks = ranked + h * r_head + piece, in_plain = plain + h * p_head + piece;
            values[i] = held ? from[TO_RANKS ? in_plain : in_ranks] : T{};
            target[i] = TO_RANKS ? in_ranks : in_plain;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (first + i * int(blockDim.x) < vectors) to[target[i]] = values[i];
        }
    }
}
