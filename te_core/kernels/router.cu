// The router of a mixture of experts: which experts each token goes to, with which gates, and the gradient.
// te_core/ops/router.py has the formulas.
//
//   logits, out [tokens, experts]; out is in T, or float for scores of all experts (DENSE=1)
//   routing  FORM 0: a byte an expert   1: a bit an expert, the lowest first   2: numbers [tokens, topk]
//   counts [experts] of all tokens; offsets [experts + 1], their running sums, each rounded up to a multiple of `align`
//   work [experts + 1]: zeros, which are left behind, where one of both is wanted
//   histogram [experts, bins], which is added to; bounds [2]
//
// A warp takes a token at a time. What experts are chosen by becomes a number whose order is theirs, in shared memory
// (`keys`, 0: not to be chosen), and with the expert's number behind it one that no other expert has (`entry`). Chosen are
// those whose entries are at least the topk-th largest. It is found by `topk` maxima, or for more than FEW bit by bit.
// What memory is read for again comes from L1: a row is a few KB.
// Measured 2026-11-30, H200, 16,384 tokens, us: top 8 of 64 experts 26, backward 18; of 256 57 and 39; top 32 of 1,024
// 421 and 140 (0.05 to 0.4 of a copy's speed over what it moves).
//
// options: -default-device
// compile-check: DTYPE=bf16 SCORE=0 DENSE=0 FORM=0 ROUTING=u8
// compile-check: DTYPE=float SCORE=1 DENSE=1 FORM=1 ROUTING=u8
// compile-check: DTYPE=fp16 SCORE=2 DENSE=0 FORM=2 ROUTING=short
// compile-check: DTYPE=float SCORE=3 DENSE=0 FORM=2 ROUTING=i64
// compile-check: DTYPE=bf16 SCORE=3 DENSE=1 FORM=2 ROUTING=int
#include "common/last_block.cuh"

enum { SOFTMAX, PRE_SOFTMAX, SIGMOID, SQRTSOFTPLUS };
enum { BYTES, BITS, NUMBERS };
typedef DTYPE T;
template <bool> struct Out { typedef T type; };
template <> struct Out<true> { typedef float type; };
typedef Out<DENSE>::type OUT;  // of the forward's result, and of its gradient

constexpr int FEW = 16, ID_BITS = 13;
constexpr u32 LAST_ID = (1u << ID_BITS) - 1, ALL = ~0u;
constexpr float TINY = 1e-20f;

// ---- scores --------------------------------------------------------------------------------------------------

__device__ __forceinline__ float sigmoid(float x) { return __fdiv_rn(1.f, 1.f + expf(-x)); }

// An expert's own score; `top` is the largest logit for a softmax over all.
__device__ __forceinline__ float score_of(float x, float top) {
    if (SCORE == PRE_SOFTMAX) return expf(x - top);
    if (SCORE == SIGMOID) return sigmoid(x);
    return SCORE == SQRTSOFTPLUS ? sqrtf(x > 20.f ? x : log1pf(expf(x))) : x;
}

// ---- order ---------------------------------------------------------------------------------------------------

// Numbers in the order of values: from minus infinity on more than 0, NaN the largest; -0 is 0.
__device__ __forceinline__ u32 key_of(float value) {
    const u32 bits = __float_as_uint(value + 0.f);
    if (isnan(value)) return ALL;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(u32 key) {
    return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key);
}
// The larger key first, and of equal ones the smaller number.
__device__ __forceinline__ u64 entry(u32 key, int id) { return u64(key) << ID_BITS | (LAST_ID - id); }
__device__ __forceinline__ u32 key_in(u64 entry) { return u32(entry >> ID_BITS); }

__device__ __forceinline__ u64 warp_largest(u64 mine) {
    const u32 high = __reduce_max_sync(ALL, u32(mine >> 32));
    const u32 low = __reduce_max_sync(ALL, u32(mine >> 32) == high ? u32(mine) : 0u);
    return u64(high) << 32 | low;
}

// The largest entry of keys [first, last) below `limit`.
__device__ __forceinline__ u64 largest_below(const u32* keys, int first, int last, u64 limit) {
    u64 best = 0;
    for (int id = first + (threadIdx.x & 31); id < last; id += 32) {
        const u64 mine = entry(keys[id], id);
        if (mine < limit && mine > best) best = mine;
    }
    return warp_largest(best);
}

// The count-th largest entry of keys [0, last).
__device__ __forceinline__ u64 nth_largest(const u32* keys, int last, int count) {
    if (count <= FEW) {
        u64 found = ~u64(0);
        for (int n = 0; n < count; ++n) found = largest_below(keys, 0, last, found);
        return found;
    }
    u64 found = 0;  // the largest number that at least `count` entries reach
    for (int bit = 31 + ID_BITS; bit >= 0; --bit) {
        const u64 higher = found | u64(1) << bit;
        u32 reach = 0;
        for (int id = threadIdx.x & 31; id < last; id += 32) reach += entry(keys[id], id) >= higher;
        if (int(__reduce_add_sync(ALL, reach)) >= count) found = higher;
    }
    return found;
}

// Sets the keys of experts outside of the best groups to 0. `sums` has room for a number of each group.
__device__ __forceinline__ void keep_best_groups(u32* keys, u32* sums, int experts, int groups, int best, int each) {
    const int lane = threadIdx.x & 31, size = experts / groups;
    for (int g = 0; g < groups; ++g) {
        u64 found = ~u64(0);
        float sum = 0.f;
        for (int n = 0; n < each; ++n) {
            found = largest_below(keys, g * size, (g + 1) * size, found);
            sum += value_of(key_in(found));
        }
        if (lane == 0) sums[g] = key_of(sum);
    }
    __syncwarp();
    const u64 limit = nth_largest(sums, groups, best);
    for (int id = lane; id < experts; id += 32) {
        if (entry(sums[id / size], id / size) < limit) keys[id] = 0;
    }
    __syncwarp();
}

// ---- forward -------------------------------------------------------------------------------------------------

// Dynamic shared memory: (experts + groups) numbers a warp; with work `experts` more.
extern "C" __global__ void __launch_bounds__(256)
    router_forward(const T* __restrict__ logits, const float* __restrict__ bias, OUT* __restrict__ out,
                   ROUTING* __restrict__ routing, int* counts, int* offsets, int* work, int* histogram,
                   const float* __restrict__ bounds, i64 tokens, int experts, int topk, int groups, int group_topk,
                   int bins, int align, float scale) {
    extern __shared__ u32 shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    u32* const keys = shared + warp * (experts + groups);
    int* const here = reinterpret_cast<int*>(shared + warps * (experts + groups));
    if (work) {
        for (int id = threadIdx.x; id < experts; id += blockDim.x) here[id] = 0;
        __syncthreads();
    }
    for (i64 token = i64(blockIdx.x) * warps + warp; token < tokens; token += i64(gridDim.x) * warps) {
        const T* const x = logits + token * experts;
        OUT* const to = out + token * experts;
        const auto base = [&](int id) { return bias ? bias[id] : 0.f; };
        float top = -infinity(), total = 0.f;
        if (SCORE == PRE_SOFTMAX) {
            for (int id = lane; id < experts; id += 32) top = fmaxf(top, to_float(x[id]));
            top = warp_max(top);
        }
        if (SCORE == PRE_SOFTMAX || DENSE) {
            for (int id = lane; id < experts; id += 32) total += score_of(to_float(x[id]), top);
            total = warp_sum(total) + (SCORE == PRE_SOFTMAX ? 0.f : TINY);
        }
        const auto score = [&](int id) {
            const float own = score_of(to_float(x[id]), top);
            return SCORE == PRE_SOFTMAX || DENSE ? __fdiv_rn(own, total) : own;
        };
        for (int id = lane; id < experts; id += 32) keys[id] = key_of(score(id) + base(id));
        __syncwarp();
        if (groups) keep_best_groups(keys, shared + warp * (experts + groups) + experts, experts, groups, group_topk,
                                     topk / group_topk);
        const u64 limit = nth_largest(keys, experts, topk);
        if (histogram) {
            const float cutoff = value_of(key_in(largest_below(keys, 0, experts, limit)));
            const float factor = __fdiv_rn(float(bins), bounds[1] - bounds[0]);
            for (int id = lane; id < experts; id += 32) {
                const float place = floorf(__fmul_rn(cutoff - score(id) - bounds[0], factor));
                atomicAdd(histogram + i64(id) * bins + int(fminf(fmaxf(place, 0.f), float(bins - 1))), 1);
            }
        }
        // The gate is weight(id) / sum.
        float most = 0.f, sum = 1.f;
        if (SCORE == SOFTMAX && !DENSE) most = value_of(key_in(largest_below(keys, 0, experts, ~u64(0))));
        const auto weight = [&](int id) {
            const float value = value_of(keys[id]);
            return SCORE == SOFTMAX ? expf(value - most) : SCORE == PRE_SOFTMAX ? value : value - base(id);
        };
        if (!DENSE && (SCORE == SOFTMAX || (SCORE != PRE_SOFTMAX && topk > 1))) {
            sum = 0.f;
            for (int id = lane; id < experts; id += 32) sum += entry(keys[id], id) >= limit ? weight(id) : 0.f;
            sum = warp_sum(sum) + (SCORE == SOFTMAX ? 0.f : TINY);
        }
        int before = 0;
        for (int begin = 0; begin < experts; begin += 32) {
            const int id = begin + lane;
            const bool there = id < experts, chosen = there && entry(keys[id], id) >= limit;
            const u32 word = __ballot_sync(ALL, chosen);
            if (there && DENSE) to[id] = from_float<OUT>(score(id));
            if (there && !DENSE) to[id] = from_float<OUT>(chosen ? __fdiv_rn(weight(id), sum) * scale : 0.f);
            if (there && FORM == BYTES) routing[token * experts + id] = chosen;
            if (FORM == BITS && lane < 4 && begin + lane * 8 < experts) {
                routing[token * ((experts + 7) / 8) + begin / 8 + lane] = ROUTING(word >> (8 * lane) & 255);
            }
            if (chosen && FORM == NUMBERS) {
                routing[token * topk + before + __popc(word & ((1u << lane) - 1))] = ROUTING(id);
            }
            if (chosen && work) atomicAdd(here + id, 1);
            before += __popc(word);
        }
        __syncwarp();
    }
    if (!work) return;
    __syncthreads();
    for (int id = threadIdx.x; id < experts; id += blockDim.x) {
        if (here[id]) atomicAdd(work + id, here[id]);
    }
    if (!last_block(work + experts)) return;
    int first = 0;  // row of the next 32 experts
    for (int begin = 0; begin < experts && warp == 0; begin += 32) {
        const int id = begin + lane, count = id < experts ? __ldcg(work + id) : 0;
        int sum = (count + align - 1) / align * align;
        if (id < experts) work[id] = 0;
        if (id < experts && counts) counts[id] = count;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int before = __shfl_up_sync(ALL, sum, step);
            if (lane >= step) sum += before;
        }
        if (id < experts && offsets) offsets[id + 1] = first + sum;
        first += __shfl_sync(ALL, sum, 31);
    }
    if (offsets && threadIdx.x == 0) offsets[0] = 0;
}

// ---- backward ------------------------------------------------------------------------------------------------

// Dynamic shared memory: a bit an expert for each warp, in words. Of DENSE there is no routing, and scale is 1.
extern "C" __global__ void __launch_bounds__(256)
    router_backward(const OUT* __restrict__ grad, const T* __restrict__ logits, const ROUTING* __restrict__ routing,
                    T* __restrict__ dx, i64 tokens, int experts, int topk, float scale) {
    extern __shared__ u32 shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, words = (experts + 31) / 32;
    u32* const bits = shared + warp * words;
    for (i64 token = i64(blockIdx.x) * warps + warp; token < tokens; token += i64(gridDim.x) * warps) {
        const i64 row = token * experts;
        const auto x = [&](int id) { return to_float(logits[row + id]); };
        __syncwarp();  // the last token's bits have been read
        if (!DENSE && FORM == BYTES) {
            for (int begin = 0; begin < experts; begin += 32) {
                const u32 word = __ballot_sync(ALL, begin + lane < experts && routing[row + begin + lane] != 0);
                if (lane == 0) bits[begin / 32] = word;
            }
        } else if (!DENSE && FORM == BITS) {
            const int width = (experts + 7) / 8;
            for (int i = lane; i < words * 4; i += 32) {
                reinterpret_cast<u8*>(bits)[i] = i < width ? u8(routing[token * width + i]) : u8(0);
            }
        } else if (!DENSE) {
            for (int i = lane; i < words; i += 32) bits[i] = 0;
            __syncwarp();
            for (int i = lane; i < topk; i += 32) {
                const i64 id = routing[token * topk + i];
                if (id >= 0 && id < experts) atomicOr(bits + id / 32, 1u << (id % 32));
            }
        }
        __syncwarp();
        const auto chosen = [&](int id) { return DENSE || (bits[id / 32] >> (id % 32) & 1); };
        const auto given = [&](int id) { return chosen(id) ? to_float(grad[row + id]) * scale : 0.f; };
        const auto counts = [&](int id) { return SCORE == PRE_SOFTMAX || chosen(id); };  // in the sum
        constexpr bool EXPONENTIAL = SCORE == SOFTMAX || SCORE == PRE_SOFTMAX;
        float top = -infinity();
        if (EXPONENTIAL) {
            for (int id = lane; id < experts; id += 32) top = counts(id) ? fmaxf(top, x(id)) : top;
            top = warp_max(top);
        }
        const auto own = [&](int id) { return EXPONENTIAL ? expf(x(id) - top) : score_of(x(id), top); };
        float total = 1.f, mean = 0.f;  // of the gradient, weighted by the scores
        if (EXPONENTIAL || DENSE || topk > 1) {
            total = 0.f;
            for (int id = lane; id < experts; id += 32) {
                const float y = counts(id) ? own(id) : 0.f;
                total += y;
                mean += y * given(id);
            }
            total = warp_sum(total) + (EXPONENTIAL ? 0.f : TINY);
            mean = __fdiv_rn(warp_sum(mean), total);
        }
        for (int id = lane; id < experts; id += 32) {
            float d = 0.f;
            if (counts(id)) {
                const float y = own(id);
                d = __fdiv_rn(given(id) - mean, total);
                if (EXPONENTIAL) d *= y;
                if (SCORE == SIGMOID) d *= y * (1.f - y);
                if (SCORE == SQRTSOFTPLUS) d *= __fdiv_rn(x(id) > 20.f ? 1.f : sigmoid(x(id)), 2.f * y + TINY);
            }
            dx[row + id] = from_float<T>(d);
        }
    }
}
