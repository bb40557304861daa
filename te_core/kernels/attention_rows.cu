// What cuDNN leaves as it pleases: zeros for queries that see no key and for keys that no query sees, for rows behind
// a sequence's end and between sequences. The statistics of such queries become infinity, so that their weights in
// backward, exp(score - statistic), are zeros.
//
// A warp a row, blockIdx.y the tensor: queries' first, then two of the keys'. Rows are 16-byte pieces.
#include "common/attention.cuh"

struct Rows {
    uint4* data;
    i64 batch, token, head;  // strides in pieces
    int heads, pieces;
};

extern "C" __global__ void __launch_bounds__(256)
    attention_rows(const int* cu_q, const int* cu_kv, const int* cu_q_padded, const int* cu_kv_padded, int batch,
                   int longest_q, int longest_kv, int left, int right, int bottom_right, int packed_q, int packed_kv,
                   i64 rows_q, i64 rows_kv, uint4* a, i64 a_batch, i64 a_token, i64 a_head, uint4* b, i64 b_batch,
                   i64 b_token, i64 b_head, uint4* c, i64 c_batch, i64 c_token, i64 c_head, int heads, int groups,
                   int pieces_a, int pieces_b, int pieces_c, float* stats, i64 s_batch, i64 s_token, i64 s_head) {
    const Sequences s = {cu_q, cu_kv, cu_q_padded, cu_kv_padded, batch, longest_q, longest_kv};
    const Band band = {left, right, bottom_right};
    const bool query = blockIdx.y == 0, packed = query ? packed_q : packed_kv;
    const i64 row = i64(blockIdx.x) * 8 + threadIdx.x / 32;
    if (row >= (query ? rows_q : rows_kv)) return;
    const int* padded = query ? cu_q_padded : cu_kv_padded;
    const Place at = place_of(row, packed, padded ? padded : query ? cu_q : cu_kv, batch,
                              query ? longest_q : longest_kv);
    const Lengths n = lengths_of(s, at.b);
    if (query ? sees_any(band, n, at.i) : seen_by_any(band, n, at.i)) return;
    const Rows t = query             ? Rows{a, a_batch, a_token, a_head, heads, pieces_a}
                   : blockIdx.y == 1 ? Rows{b, b_batch, b_token, b_head, groups, pieces_b}
                                     : Rows{c, c_batch, c_token, c_head, groups, pieces_c};
    const i64 outer = packed ? 0 : at.b, inner = packed ? row : at.i;
    uint4* line = t.data + outer * t.batch + inner * t.token;
    const int lane = threadIdx.x % 32;
    for (int k = lane; k < t.heads * t.pieces; k += 32) {
        line[(k / t.pieces) * t.head + k % t.pieces] = make_uint4(0, 0, 0, 0);
    }
    if (query && stats) {
        for (int h = lane; h < heads; h += 32) {
            stats[outer * s_batch + inner * s_token + h * s_head] = __uint_as_float(0x7f800000u);
        }
    }
}
