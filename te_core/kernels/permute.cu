// Rows of tokens to their experts and back by a map (row_map.cu makes it, te_core/ops/permute.py has the rules).
//
//   permute_rows          each token's row to all its places; with PROBS=1 the probabilities too, zero rows where 0
//   fill_rows             zeros into the rows of a result that no token went to, by the marks of those that got one
//   unpermute_rows        the rows of each token added up: SUM; WEIGHTED; GATED: but for those of probability 0
//   unpermute_backward    of WEIGHTED: gradient times weight to each place, and the dot products
//
// A token belongs to threads of a block (threadIdx.y numbers the block's tokens), so that permuting reads its row once
// and writes all its copies: with top 8 half the traffic of a gather. A thread has several 16-byte vectors on their
// way. Sums are in float32, in the map's order (last expert first), by fused multiply-adds; weights of an index map
// are rounded to T and the sum is kept in T.
// Speed: benchmarks/moe.py measures it against a copy.
//
// -D WIDTH=1|2|4|8|16: bytes of a vector  MASK=0|1: kind of map  PROB=float|bf16|fp16  FULL=0|1: whole vectors only
//    permute_rows: PROBS=0|1    unpermute_*: DTYPE=float|bf16|fp16  MODE=SUM|WEIGHTED|GATED  TEAM_SIZE=32|128
//    BATCH_ROWS, BATCH_COLUMNS: loads of a thread on their way
// compile-check: WIDTH=16 MASK=1 PROB=float FULL=1 PROBS=1 DTYPE=bf16 MODE=WEIGHTED TEAM_SIZE=128 BATCH_ROWS=8 BATCH_COLUMNS=1
// compile-check: WIDTH=16 MASK=0 PROB=float FULL=1 PROBS=0 DTYPE=bf16 MODE=WEIGHTED TEAM_SIZE=128 BATCH_ROWS=4 BATCH_COLUMNS=2
// compile-check: WIDTH=16 MASK=1 PROB=bf16 FULL=0 PROBS=1 DTYPE=fp16 MODE=GATED TEAM_SIZE=32 BATCH_ROWS=4 BATCH_COLUMNS=2
// compile-check: WIDTH=4 MASK=0 PROB=float FULL=0 PROBS=0 DTYPE=float MODE=SUM TEAM_SIZE=32 BATCH_ROWS=4 BATCH_COLUMNS=2
// compile-check: WIDTH=2 MASK=1 PROB=fp16 FULL=0 PROBS=1 DTYPE=bf16 MODE=WEIGHTED TEAM_SIZE=32 BATCH_ROWS=4 BATCH_COLUMNS=2
// compile-check: WIDTH=8 MASK=0 PROB=float FULL=0 PROBS=0 DTYPE=fp16 MODE=SUM TEAM_SIZE=32 BATCH_ROWS=1 BATCH_COLUMNS=4
// options: -default-device
#include "common/row.cuh"

enum Mode { SUM, WEIGHTED, GATED };
typedef Bits<WIDTH>::type V;
typedef DTYPE T;
typedef PROB P;
constexpr int N = WIDTH < int(sizeof(T)) ? 1 : WIDTH / int(sizeof(T));  // elements of a vector
constexpr int COPIES = 8, HELD = 4;  // permute_rows: vectors of a thread (as the launcher has it), rows known ahead
constexpr int COLUMNS = BATCH_COLUMNS, ROWS = BATCH_ROWS;                // vectors of a thread and rows: unpermute_*

// ---- the map -----------------------------------------------------------------------------------------------

// Copy j of a token: the row it lies in, and the expert (of a mask) or slot that it is for.
struct Map {
    const int* __restrict__ map;
    const i64* __restrict__ pad;  // null, or what is inserted before each expert
    i64 tokens, rows;
    int choices;  // experts of a mask, slots

    __device__ __forceinline__ int count(i64 token) const {
        return MASK ? map[token * (2 * choices + 1) + 2 * choices] : choices;
    }
    __device__ __forceinline__ int choice(i64 token, int j) const {
        return MASK ? map[token * (2 * choices + 1) + choices + j] : j;
    }
    // -1 where there is none
    __device__ __forceinline__ i64 row(i64 token, int j) const {
        i64 row = MASK ? map[token * (2 * choices + 1) + j] : map[j * tokens + token];
        if (MASK && pad != nullptr) row += pad[choice(token, j)];
        return row >= 0 && row < rows ? row : -1;
    }
    // The copy that is for this expert or slot; -1 if none is.
    __device__ __forceinline__ int copy_for(i64 token, int wanted, int copies) const {
        if (!MASK) return wanted;
        for (int j = 0; j < copies; ++j) {
            if (choice(token, j) == wanted) return j;
        }
        return -1;
    }
};

// ---- to the experts ----------------------------------------------------------------------------------------

// Zeros into the rows that no token goes to, if `starts` [experts + 1] says where an expert's rows begin before padding
// moves them: those inserted before experts, a block for each of these gaps, and all behind the last, by all blocks.
__device__ __forceinline__ void fill_gaps(V* __restrict__ out, P* __restrict__ row_probs, const int* __restrict__ starts,
                                          const i64* __restrict__ pad, i64 vectors, i64 rows, i64 behind,
                                          int experts) {
    const int rank = threadIdx.y * blockDim.x + threadIdx.x, lane = rank & 31, warp = rank >> 5;
    const int warps = int(blockDim.x * blockDim.y) >> 5;
    const auto zero = [&](i64 first, i64 last, i64 step) {
        for (i64 row = first; row < last; row += step) {
            if (PROBS && lane == 0) row_probs[row] = from_float<P>(0.f);
            for (i64 v = lane; v < vectors; v += 32) out[row * vectors + v] = V{};
        }
    };
    for (int e = blockIdx.x; pad != nullptr && e < experts; e += gridDim.x) {
        const i64 begin = starts[e], before = e > 0 ? pad[e - 1] : 0;
        zero(begin + before + warp, min(begin + pad[e], rows), warps);
    }
    zero(behind + i64(blockIdx.x) * warps + warp, rows, i64(gridDim.x) * warps);
}

// HELD copies of a token from the first on: all that says where they go is on its way at once.
struct Places {
    int row[HELD];  // -1: nowhere
    bool zero[HELD];

    __device__ __forceinline__ Places(const Map& map, const P* __restrict__ probs, i64 token, int first, int copies) {
#pragma unroll
        for (int k = 0; k < HELD; ++k) {
            const int j = first + k;
            row[k] = j < copies ? int(map.row(token, j)) : -1;
            zero[k] = PROBS && j < copies && to_float(probs[token * map.choices + map.choice(token, j)]) == 0.f;
        }
    }
};

// A thread's vectors of a row, of which so many are left from its first on; or zeros.
__device__ __forceinline__ void put_all(V* to, const V (&held)[COPIES], i64 left, bool zero) {
    const int step = blockDim.x;
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
        if (FULL || i * step < left) __stcs(to + i * step, zero ? V{} : held[i]);  // 2 % faster than plain stores
    }
}

// What is written of copy j beside the row.
__device__ __forceinline__ void note_row(const Map& map, const P* __restrict__ probs, P* __restrict__ row_probs,
                                         u8* __restrict__ marks, i64 token, int j, i64 row) {
    if (marks != nullptr) marks[row] = 1;
    if (PROBS) row_probs[row] = probs[token * map.choices + map.choice(token, j)];
}

// Rows that no token goes to are filled by `starts`, or marks get a 1 for each row that is written; both may be null.
extern "C" __global__ void __launch_bounds__(256)
    permute_rows(const V* __restrict__ x, V* __restrict__ out, const int* __restrict__ row_map,
                 const i64* __restrict__ pad, const P* __restrict__ probs, P* __restrict__ row_probs,
                 u8* __restrict__ marks, const int* __restrict__ starts, i64 vectors, i64 tokens, i64 rows,
                 int choices) {
    const i64 token = i64(blockIdx.x) * blockDim.y + threadIdx.y;
    const Map map = {row_map, pad, tokens, rows, choices};
    const int copies = token < tokens ? map.count(token) : 0, step = blockDim.x;
    i64 behind = rows;  // the first row that no expert has; asked for early
    if (starts != nullptr) behind = starts[choices] + (pad == nullptr ? 0 : pad[choices - 1]);
    for (i64 first = threadIdx.x; token < tokens && first < vectors; first += COPIES * step) {
        const V* const from = x + token * vectors + first;
        V held[COPIES];
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            if (FULL || first + i * step < vectors) held[i] = from[i * step];
        }
        for (int j = 0; j < copies; j += HELD) {
            const Places places(map, probs, token, j, copies);
#pragma unroll
            for (int k = 0; k < HELD; ++k) {
                if (places.row[k] < 0) continue;
                put_all(out + i64(places.row[k]) * vectors + first, held, vectors - first, places.zero[k]);
            }
        }
    }
    for (int j = threadIdx.x; (PROBS || marks != nullptr) && j < copies; j += step) {
        const i64 row = map.row(token, j);
        if (row >= 0) note_row(map, probs, row_probs, marks, token, j, row);
    }
    if (starts != nullptr) fill_gaps(out, row_probs, starts, pad, vectors, rows, behind, choices);
}

// A warp looks at 32 rows, and leaves zeros for the next who marks.
extern "C" __global__ void __launch_bounds__(256)
    fill_rows(V* __restrict__ out, P* __restrict__ row_probs, u8* __restrict__ marks, i64 vectors, i64 rows) {
    const int lane = threadIdx.x & 31;
    const i64 first = i64(blockIdx.x) * 256 + (threadIdx.x & ~31);
    const bool there = first + lane < rows, bare = there && marks[first + lane] == 0;
    if (there) marks[first + lane] = 0;
    if (PROBS && bare) row_probs[first + lane] = from_float<P>(0.f);
    for (u32 left = __ballot_sync(~0u, bare); left; left &= left - 1) {
        V* const to = out + (first + __ffs(left) - 1) * vectors;
        for (i64 v = lane; v < vectors; v += 32) to[v] = V{};
    }
}

// ---- back --------------------------------------------------------------------------------------------------

// The elements at p, or zeros, by a predicate: no branch stands between the loads.
__device__ __forceinline__ void read_if(uint4& v, const void* p, bool on) {
    asm volatile("{.reg .pred q; setp.ne.s32 q, %5, 0; @q ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];}"
                 : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(p), "r"(int(on)));
}
__device__ __forceinline__ void read_if(uint2& v, const void* p, bool on) {
    asm volatile("{.reg .pred q; setp.ne.s32 q, %3, 0; @q ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];}"
                 : "+r"(v.x), "+r"(v.y) : "l"(p), "r"(int(on)));
}
__device__ __forceinline__ void read_if(u32& v, const void* p, bool on) {
    asm volatile("{.reg .pred q; setp.ne.s32 q, %2, 0; @q ld.global.nc.L1::no_allocate.u32 %0, [%1];}"
                 : "+r"(v) : "l"(p), "r"(int(on)));
}
__device__ __forceinline__ void read_if(unsigned short& v, const void* p, bool on) {
    if (on) v = __ldg(static_cast<const unsigned short*>(p));
}
__device__ __forceinline__ Vec<T, N> load_if(const T* p, bool on) {
    Bits<sizeof(T) * N>::type word = {};
    read_if(word, p, on);
    Vec<T, N> v;
    reinterpret_cast<Bits<sizeof(T) * N>::type&>(v) = word;
    return v;
}

// ROWS copies of a token at a time.
struct Batch {
    i64 row[ROWS];
    float weight[ROWS];
    bool on[ROWS];

    __device__ __forceinline__ Batch(const Map& map, const P* __restrict__ probs, i64 token, int first, int copies) {
#pragma unroll
        for (int k = 0; k < ROWS; ++k) {
            const int j = first + k;
            row[k] = j < copies ? map.row(token, j) : -1;
            on[k] = row[k] >= 0;
            weight[k] = 1.f;
            if (MODE != SUM && on[k]) {
                const float p = to_float(probs[token * map.choices + map.choice(token, j)]);
                if (MODE == GATED) on[k] = p != 0.f;
                else weight[k] = MASK ? p : rounded<T>(p);
            }
        }
    }
};

__device__ __forceinline__ float fused(float w, float x, float sum) { return fmaf(w, x, sum); }
__device__ __forceinline__ bf16 fused(bf16 w, bf16 x, bf16 sum) { return __hfma(w, x, sum); }
__device__ __forceinline__ fp16 fused(fp16 w, fp16 x, fp16 sum) { return __hfma(w, x, sum); }

// sum + w * x, rounded once: to float32, or, with an index map, to T.
__device__ __forceinline__ float add_product(float w, float x, float sum) {
    if (MODE != WEIGHTED) return sum + x;
    if (MASK) return fmaf(w, x, sum);
    return to_float(fused(from_float<T>(w), from_float<T>(x), from_float<T>(sum)));
}

// GATED: probs_out [tokens, experts], if given, gets what row_probs has in each copy's row, 0 where there is none.
extern "C" __global__ void __launch_bounds__(256)
    unpermute_rows(const T* __restrict__ x, T* __restrict__ out, const int* __restrict__ row_map,
                   const i64* __restrict__ pad, const P* __restrict__ probs, const P* __restrict__ row_probs,
                   P* __restrict__ probs_out, i64 vectors, i64 tokens, i64 rows, int choices) {
    const i64 token = i64(blockIdx.x) * blockDim.y + threadIdx.y;
    if (token >= tokens) return;
    const Map map = {row_map, pad, tokens, rows, choices};
    const int copies = map.count(token), step = blockDim.x;
    if (MODE == GATED && probs_out != nullptr) {
        for (int c = threadIdx.x; c < choices; c += step) {
            const int j = map.copy_for(token, c, copies);
            const i64 row = j < 0 ? -1 : map.row(token, j);
            probs_out[token * choices + c] = row < 0 ? from_float<P>(0.f) : row_probs[row];
        }
    }
    for (i64 first = threadIdx.x; first < vectors; first += COLUMNS * step) {
        float sum[COLUMNS][N] = {};
        for (int j = 0; j < copies; j += ROWS) {
            const Batch batch(map, probs, token, j, copies);
            Vec<T, N> raw[ROWS][COLUMNS];
#pragma unroll
            for (int k = 0; k < ROWS; ++k) {
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) {
                    const i64 vector = first + c * step;
                    const bool there = batch.on[k] && (FULL || vector < vectors);
                    raw[k][c] = load_if(x + (batch.row[k] * vectors + vector) * N, there);
                }
            }
#pragma unroll
            for (int k = 0; k < ROWS; ++k) {
                if (!batch.on[k]) continue;
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) {
                    float f[N];
                    to_floats(raw[k][c], f);
#pragma unroll
                    for (int i = 0; i < N; ++i) sum[c][i] = add_product(batch.weight[k], f[i], sum[c][i]);
                }
            }
        }
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            if (FULL || first + c * step < vectors) {
                store_vec<N>(out + (token * vectors + first + c * step) * N, round_to(sum[c], T()));
            }
        }
    }
}

// The sum over a team, in an order that depends on nothing but its size. TEAM_SIZE=128: `scratch` of ROWS * 4 floats.
__device__ __forceinline__ void team_sums(float (&v)[ROWS], float* scratch) {
#pragma unroll
    for (int k = 0; k < ROWS; ++k) v[k] = warp_sum(v[k]);
    if (TEAM_SIZE == 32) return;
    const int warp = threadIdx.x >> 5;
    __syncthreads();
    if ((threadIdx.x & 31) == 0) {
#pragma unroll
        for (int k = 0; k < ROWS; ++k) scratch[warp * ROWS + k] = v[k];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
        v[k] = 0.f;
        for (int w = 0; w < TEAM_SIZE / 32; ++w) v[k] += scratch[w * ROWS + k];
    }
}

// weight * gradient is stored; returned is dot + (gradient, x).
__device__ __forceinline__ float weigh(const float (&gradient)[N], const Vec<T, N>& x, float weight, float dot, T* to) {
    float f[N];
    to_floats(x, f);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        dot = fmaf(gradient[i], f[i], dot);
        f[i] = weight * gradient[i];
    }
    store_vec<N>(to, round_to(f, T()));
    return dot;
}

// Blocks of 128 threads. dx: as permute_rows writes it, weighted; d_weights [tokens, choices], 0 where not routed.
extern "C" __global__ void __launch_bounds__(128)
    unpermute_backward(const T* __restrict__ dy, const T* __restrict__ x, T* __restrict__ dx,
                       const int* __restrict__ row_map, const i64* __restrict__ pad, const P* __restrict__ weights,
                       P* __restrict__ d_weights, u8* __restrict__ marks, i64 vectors, i64 tokens, i64 rows,
                       int choices) {
    __shared__ float scratch[ROWS * 4];
    const int rank = threadIdx.x % TEAM_SIZE;
    const i64 token = i64(blockIdx.x) * (128 / TEAM_SIZE) + threadIdx.x / TEAM_SIZE;
    if (token >= tokens) return;  // all of a team
    const Map map = {row_map, pad, tokens, rows, choices};
    const int copies = map.count(token);
    for (int c = rank; MASK && c < choices; c += TEAM_SIZE) {
        if (map.copy_for(token, c, copies) < 0) d_weights[token * choices + c] = from_float<P>(0.f);
    }
    const T* const gradient = dy + token * vectors * N;
    for (int j = 0; j < copies; j += ROWS) {
        const Batch batch(map, weights, token, j, copies);
        float dot[ROWS] = {};
        for (i64 first = rank; first < vectors; first += COLUMNS * TEAM_SIZE) {
            Vec<T, N> given[COLUMNS], raw[ROWS][COLUMNS];
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                const i64 vector = first + c * TEAM_SIZE;
                const bool inside = FULL || vector < vectors;
                given[c] = load_if(gradient + vector * N, inside);
#pragma unroll
                for (int k = 0; k < ROWS; ++k) {
                    raw[k][c] = load_if(x + (batch.row[k] * vectors + vector) * N, batch.on[k] && inside);
                }
            }
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {
                if (!FULL && first + c * TEAM_SIZE >= vectors) continue;
                float g[N];
                to_floats(given[c], g);
#pragma unroll
                for (int k = 0; k < ROWS; ++k) {
                    T* const to = dx + (batch.row[k] * vectors + first + c * TEAM_SIZE) * N;
                    if (batch.on[k]) dot[k] = weigh(g, raw[k][c], batch.weight[k], dot[k], to);
                }
            }
        }
        team_sums(dot, scratch);
        if (rank == 0) {
#pragma unroll
            for (int k = 0; k < ROWS; ++k) {
                if (j + k >= copies) break;
                d_weights[token * choices + map.choice(token, j + k)] = from_float<P>(batch.on[k] ? dot[k] : 0.f);
                if (marks != nullptr && batch.on[k]) marks[batch.row[k]] = 1;
            }
        }
    }
}
