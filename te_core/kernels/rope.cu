// Rotary position embedding, of heads (rope) and of a packed projection while it is split into q, k and v (rope_qkv;
// BACKWARD=1: packed again). te_core/ops/rope.py has the rule and the positions.
//
//   rope       t of T, strided [s][b][h][channels side by side]         out dense in the format
//   rope_qkv   packed [tokens, width] dense <-> q, k, v [tokens, heads, d] dense, whose null pointers are no heads
//   freqs      float32 [table, d2], null: copied. Tokens are numbered as they lie: s * B + b, b * S + s, or t.
//
// A block takes a token: its threads make the cosines and sines of each channel once, in shared memory, then walk the
// units of its heads. A unit is VEC channel pairs (two vectors, side by side with INTERLEAVED=1, else half of d2
// apart), or VEC channels that are copied. 256 threads at most, so that some blocks fill while others make tables; out
// may be t, so nothing goes through the read-only path.
// H200, 2026-11-21, 8192 tokens, 32 heads of 128 (8 of keys and values), bf16 (benchmarks/attention_kernels.py; of the
// speed of a copy): rope 82 %, neighbours 62 %; rope_qkv 80 %; its copy without angles 74 %.
//
// options: -default-device
// -D DTYPE=float|bf16|fp16  FORMAT=SBHD|BSHD|THD  INTERLEAVED=0|1  BACKWARD=0|1  VEC: channels of a vector
// compile-check: DTYPE=bf16 FORMAT=SBHD INTERLEAVED=0 BACKWARD=0 VEC=8
// compile-check: DTYPE=float FORMAT=THD INTERLEAVED=1 BACKWARD=1 VEC=4
// compile-check: DTYPE=fp16 FORMAT=BSHD INTERLEAVED=1 BACKWARD=0 VEC=1
// compile-check: DTYPE=bf16 FORMAT=THD INTERLEAVED=0 BACKWARD=1 VEC=2
#include "common/row.cuh"

enum Format { SBHD, BSHD, THD };
typedef DTYPE T;

// Where the block's token stands: its place in its sequence, and in a table of angles.
struct Token {
    i64 place, sequence, position;
    bool nowhere;  // in no sequence
};

__device__ __forceinline__ Token find_token(i64 row, i64 tokens, i64 sequences, const int* cu_seqlens,
                                            const int* starts, int cp_size, int cp_rank) {
    Token t = {};
    i64 length = tokens;
    if (FORMAT == SBHD) {
        t.place = row / sequences;
        t.sequence = row % sequences;
    } else if (FORMAT == BSHD) {
        t.place = row % tokens;
        t.sequence = row / tokens;
    } else if (cu_seqlens != nullptr) {  // the last of the sequences that begin here or before: empty ones lose
        i64 low = 0, high = sequences + 1;
        while (low < high) {
            const i64 middle = (low + high) / 2;
            if (cu_seqlens[middle] / cp_size <= row) low = middle + 1;
            else high = middle;
        }
        t.nowhere = low == 0 || low > sequences;
        if (t.nowhere) return t;
        t.sequence = low - 1;
        const i64 first = cu_seqlens[t.sequence] / cp_size;
        t.place = row - first;
        length = cu_seqlens[low] / cp_size - first;
    }
    t.position = t.place;
    if (cp_size > 1) {  // the rank's two chunks
        const i64 half = length / 2;
        t.position += t.place < half ? cp_rank * half : cp_size * length - (cp_rank + 1) * half - half;
    }
    if (starts != nullptr) t.position += starts[t.sequence];
    return t;
}

// The angles of a token: for the first channels of all pairs, then for the second ones. A unit's VEC pairs are read in
// pieces of PIECE; the first pieces of all units lie side by side, so that neighbouring threads read neighbouring banks.
constexpr int PIECE = VEC < 4 ? VEC : 4;
constexpr int COPIES = 4;
struct Angles {
    const float *cosines, *sines;
    int d2;
    __device__ __forceinline__ void read(const float* side, int unit, float (&f)[VEC]) const {
#pragma unroll
        for (int j = 0; j < VEC; j += PIECE) {
            const Vec<float, PIECE> v = load<PIECE>(side + j * (d2 / 2 / VEC) + unit * PIECE);
#pragma unroll
            for (int i = 0; i < PIECE; ++i) f[j + i] = v[i];
        }
    }
};

__device__ __forceinline__ Angles make_angles(float* memory, const float* freqs, i64 rows, int d2, const Token& t) {
    float *cosines = memory, *sines = memory + d2;
    const bool inside = t.position >= 0 && t.position < rows;
    const int half = d2 / 2;
    for (int c = threadIdx.x; c < d2; c += blockDim.x) {
        const float angle = t.nowhere ? 0.f : inside ? freqs[t.position * d2 + c] : __int_as_float(0x7fffffff);
        const int pair = INTERLEAVED ? c / 2 : c % half, side = INTERLEAVED ? c % 2 : c / half;
        const int slot = side * half + pair % VEC / PIECE * (half / VEC * PIECE) + pair / VEC * PIECE + pair % PIECE;
        sincosf(angle, sines + slot, cosines + slot);
    }
    return {cosines, sines, d2};
}

__device__ __forceinline__ void turn_unit(const T* from, T* to, const Angles& angles, int unit) {
    const int half = angles.d2 / 2, pair = unit * VEC;
    const int first = INTERLEAVED ? 2 * pair : pair, second = INTERLEAVED ? first + VEC : pair + half;
    float x[2 * VEC], y[2 * VEC], low[VEC], high[VEC], cos_a[VEC], sin_a[VEC], cos_b[VEC], sin_b[VEC];
    to_floats(load<VEC>(from + first), low);
    to_floats(load<VEC>(from + second), high);
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
        x[j] = low[j];
        x[VEC + j] = high[j];
    }
    angles.read(angles.cosines, unit, cos_a);
    angles.read(angles.sines, unit, sin_a);
    angles.read(angles.cosines + half, unit, cos_b);
    angles.read(angles.sines + half, unit, sin_b);
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
        const int ia = INTERLEAVED ? 2 * j : j, ib = INTERLEAVED ? 2 * j + 1 : VEC + j;
        const float a = x[ia], b = x[ib];
        // No fused multiply-add: the CPU backend rounds the products, and the two shall agree.
        if (BACKWARD) {
            y[ia] = __fadd_rn(__fmul_rn(a, cos_a[j]), __fmul_rn(b, sin_b[j]));
            y[ib] = __fsub_rn(__fmul_rn(b, cos_b[j]), __fmul_rn(a, sin_a[j]));
        } else {
            y[ia] = __fsub_rn(__fmul_rn(a, cos_a[j]), __fmul_rn(b, sin_a[j]));
            y[ib] = __fadd_rn(__fmul_rn(b, cos_b[j]), __fmul_rn(a, sin_b[j]));
        }
    }
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
        low[j] = y[j];
        high[j] = y[VEC + j];
    }
    store<VEC>(to + first, round_to(low, T()));
    store<VEC>(to + second, round_to(high, T()));
}

// All heads of a token, head h from place(h).x to place(h).y.
template <class Place> __device__ __forceinline__ void turn_heads(int heads, int d, const Angles& angles, Place place) {
    const int turned = angles.d2 / (2 * VEC), units = turned + (d - angles.d2) / VEC;
    for (int u = threadIdx.x; u < heads * units; u += blockDim.x) {
        const int head = u / units, unit = u - head * units;
        const T* from;
        T* to;
        place(head, from, to);
        if (unit < turned) {
            turn_unit(from, to, angles, unit);
        } else {
            const int channel = angles.d2 + (unit - turned) * VEC;
            store<VEC>(to + channel, load<VEC>(from + channel));
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
    rope(const T* t, T* out, const float* __restrict__ freqs, const int* __restrict__ cu_seqlens,
         const int* __restrict__ starts, i64 tokens, i64 sequences, i64 token_step, i64 sequence_step, i64 head_step,
         i64 table, int heads, int d, int d2, int cp_size, int cp_rank) {
    extern __shared__ float4 dynamic[];
    const i64 row = blockIdx.x;
    const Token token = find_token(row, tokens, sequences, cu_seqlens, starts, cp_size, cp_rank);
    const Angles angles = make_angles(reinterpret_cast<float*>(dynamic), freqs, table, d2, token);
    __syncthreads();
    // In thd a token's place in memory is its number.
    const i64 begin = FORMAT == THD ? row * token_step : token.place * token_step + token.sequence * sequence_step;
    const T* from_token = t + begin;
    T* to_token = out + row * heads * d;
    turn_heads(heads, d, angles, [&](int head, const T*& from, T*& to) {
        from = from_token + head * head_step;
        to = to_token + head * d;
    });
}

extern "C" __global__ void __launch_bounds__(256)
    rope_qkv(T* packed, T* q, T* k, T* v, const float* __restrict__ q_freqs, const float* __restrict__ k_freqs,
             const int* __restrict__ cu_seqlens, const int* __restrict__ starts, i64 tokens, i64 sequences, i64 q_table,
             i64 k_table, int heads, int groups, int dq, int dk, int dv, int dq2, int dk2, int grouped, int cp_size,
             int cp_rank) {
    extern __shared__ float4 dynamic[];
    const i64 row = blockIdx.x;
    const Token token = find_token(row, tokens, sequences, cu_seqlens, starts, cp_size, cp_rank);
    float* memory = reinterpret_cast<float*>(dynamic);
    const Angles q_angles = make_angles(memory, q_freqs, q_table, dq2, token);
    const bool same = k_freqs == q_freqs && k_table == q_table && dk2 == dq2;
    const Angles k_angles = same ? q_angles : make_angles(memory + 2 * dq2, k_freqs, k_table, dk2, token);
    __syncthreads();

    const int per = heads / groups, group_width = per * dq + dk + dv;
    T* base = packed + row * groups * group_width;
    const auto q_offset = [&](int h) { return grouped ? h / per * group_width + h % per * dq : h * dq; };
    const auto k_offset = [&](int g) { return grouped ? g * group_width + per * dq : heads * dq + g * dk; };
    const auto v_offset = [&](int g) {
        return grouped ? g * group_width + per * dq + dk : heads * dq + groups * dk + g * dv;
    };
    const auto walk = [&](T* part, int count, int d, const Angles& angles, auto offset) {
        T* dense = part + row * count * d;
        turn_heads(count, d, angles, [&](int head, const T*& from, T*& to) {
            T *inside = base + offset(head), *outside = dense + head * d;
            from = BACKWARD ? outside : inside;
            to = BACKWARD ? inside : outside;
        });
    };
    if (dq2 + dk2 > 0) {
        if (heads > 0) walk(q, heads, dq, q_angles, q_offset);
        walk(k, groups, dk, k_angles, k_offset);
        walk(v, groups, dv, Angles{nullptr, nullptr, 0}, v_offset);
        return;
    }
    // Nothing to turn: one walk over all parts, several vectors of a thread on their way at a time.
    const int q_units = heads * dq / VEC, k_units = groups * dk / VEC, units = q_units + k_units + groups * dv / VEC;
    const auto vector_in = [](T* part, i64 token, int count, int d, int unit, T* packed_row, auto offset, T*& inside,
                              T*& outside) {
        const int head = unit / (d / VEC), channel = (unit - head * (d / VEC)) * VEC;
        inside = packed_row + offset(head) + channel;
        outside = part + (token * count + head) * d + channel;
    };
    for (int first = threadIdx.x; first < units; first += COPIES * blockDim.x) {
        Vec<T, VEC> held[COPIES];
        T* to[COPIES];
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            const int u = first + i * blockDim.x;
            if (u >= units) continue;
            T *inside, *outside;
            if (u < q_units) vector_in(q, row, heads, dq, u, base, q_offset, inside, outside);
            else if (u < q_units + k_units) vector_in(k, row, groups, dk, u - q_units, base, k_offset, inside, outside);
            else vector_in(v, row, groups, dv, u - q_units - k_units, base, v_offset, inside, outside);
            held[i] = load<VEC>(BACKWARD ? outside : inside);
            to[i] = BACKWARD ? inside : outside;
        }
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            if (first + i * blockDim.x < units) store<VEC>(to[i], held[i]);
        }
    }
}
