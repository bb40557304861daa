// From a producer of values to everything a cast delivers: the values themselves, FP8 in one or both orientations,
// the amax and the column sums. Quantize, activations and their backward are producers; the rest is here once.
//
// A thread owns V = 16 / sizeof(T) neighbouring columns and ROWS consecutive rows. In a tall tile ROWS is 16, so that
// the sixteen FP8 bytes of one of its columns are one 16-byte store into the transposed copy: the transposition
// happens in registers (4x4 bytes at a time, eight byte permutes) and needs neither shared memory nor a barrier.
// The four lanes below one another make 64 contiguous bytes of a transposed row, two warps a whole 128-byte line.
// Wider or narrower lanes, other block orders and cached or uncached loads were tried and made no difference or less.
//
// Output i of OUTPUTS lies i * cols columns to the right: the gradients (da | db) of a gated activation.
#pragma once
#include "common/numeric.cuh"

// Where the scale comes from: nothing is cast; a given scale (delayed scaling); the maximum of partial amaxes
// (current scaling, second pass).
enum Scaling { NO_CAST = 0, GIVEN_SCALE = 1, OWN_SCALE = 2 };

constexpr int TILE_THREADS = 128;

// Tall tiles serve the transposed copy and column sums (few partial rows); flat ones give whole rows to a warp.
template <class T, bool Tall, int FlatRows = 4> struct TileShape {
    static constexpr int V = 16 / sizeof(T);
    static constexpr int LANES_N = Tall ? 8 : 32, LANES_M = 32 / LANES_N;
    static constexpr int WARPS_N = Tall ? 2 : 1, WARPS_M = TILE_THREADS / 32 / WARPS_N;
    static constexpr int ROWS = Tall ? 16 : FlatRows;
    static constexpr int M = WARPS_M * LANES_M * ROWS, N = WARPS_N * LANES_N * V;
};

template <class T> struct TileSink {
    T* y;               // [rows, OUTPUTS * cols] (Keep only)
    u8* rowwise;        // [padded(rows), padded(OUTPUTS * cols)], or null
    u8* columnwise;     // its transpose (Columnwise only)
    float* amax;        // raised (or null); NO_CAST: one partial for each block (or null)
    float* column_sum;  // [gridDim.y, OUTPUTS * cols]: the sums of each block's rows
};

struct TileScale {
    const float* source;  // GIVEN_SCALE: the scale; OWN_SCALE: partial amaxes
    int n_partials;
    float epsilon;
    int power_of_two;
    float* scale_inv;
};

// Which block of a launch this is, and of how many. Where one launch serves several matrices: of its own matrix.
struct BlockPlace {
    u32 x, y, across, down;
};
__device__ __forceinline__ BlockPlace own_place() { return {blockIdx.x, blockIdx.y, gridDim.x, gridDim.y}; }

__device__ __forceinline__ i64 padded(i64 n) { return (n + 15) & ~i64(15); }

// Sixteen bytes of a row: V elements of T, kept as words so that 16-bit elements are handled two an instruction.
struct Pack {
    u32 w[4];
};

// V elements of a row, zeros beyond the edge. Aligned: rows start on 16 bytes and hold whole packs.
template <class T, bool Aligned>
__device__ __forceinline__ Pack fetch_pack(const T* p, i64 row, i64 rows, i64 pitch, i64 col, i64 cols) {
    constexpr int V = 16 / sizeof(T);
    Pack pack = {};
    if constexpr (Aligned) {
        if (row < rows && col < cols) {
            const uint4 raw = __ldg(reinterpret_cast<const uint4*>(p + row * pitch + col));
            pack.w[0] = raw.x, pack.w[1] = raw.y, pack.w[2] = raw.z, pack.w[3] = raw.w;
        }
    } else {
        T v[V];
#pragma unroll
        for (int j = 0; j < V; ++j) {
            v[j] = row < rows && col + j < cols ? p[row * pitch + col + j] : from_float<T>(0.f);
        }
        memcpy(&pack, v, 16);
    }
    return pack;
}

template <class T, bool Aligned>
__device__ __forceinline__ void store_pack(T* p, const Pack& pack, i64 col, i64 cols) {
    constexpr int V = 16 / sizeof(T);
    if constexpr (Aligned) {
        if (col < cols) *reinterpret_cast<uint4*>(p) = make_uint4(pack.w[0], pack.w[1], pack.w[2], pack.w[3]);
    } else {
        T v[V];
        memcpy(v, &pack, 16);
#pragma unroll
        for (int j = 0; j < V; ++j) {
            if (col + j < cols) p[j] = v[j];
        }
    }
}

// Per type: floats from a word and back (rounded to nearest even), and a running max |x| in which a NaN loses to
// every number.
template <class T> struct Words;
template <> struct Words<float> {
    static constexpr int PER_WORD = 1;
    static __device__ __forceinline__ void unpack(u32 w, float* f) { f[0] = __uint_as_float(w); }
    static __device__ __forceinline__ u32 pack(const float* f) { return __float_as_uint(f[0]); }
    static __device__ __forceinline__ u32 raise(u32 top, u32 w) {
        return __float_as_uint(fmaxf(__uint_as_float(top), fabsf(__uint_as_float(w))));
    }
};
template <> struct Words<bf16> {
    static constexpr int PER_WORD = 2;
    static __device__ __forceinline__ void unpack(u32 w, float* f) {
        f[0] = __uint_as_float(w << 16);
        f[1] = __uint_as_float(w & 0xffff0000u);
    }
    static __device__ __forceinline__ u32 pack(const float* f) {
        u32 w;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(f[1]), "f"(f[0]));
        return w;
    }
    static __device__ __forceinline__ u32 raise(u32 top, u32 w) {
        asm("max.bf16x2 %0, %0, %1;" : "+r"(top) : "r"(w & 0x7fff7fffu));
        return top;
    }
};
template <> struct Words<fp16> {
    static constexpr int PER_WORD = 2;
    static __device__ __forceinline__ void unpack(u32 w, float* f) {
        __half2 two;
        memcpy(&two, &w, 4);
        f[0] = __low2float(two);
        f[1] = __high2float(two);
    }
    static __device__ __forceinline__ u32 pack(const float* f) {
        u32 w;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(f[1]), "f"(f[0]));
        return w;
    }
    static __device__ __forceinline__ u32 raise(u32 top, u32 w) {
        asm("max.f16x2 %0, %0, %1;" : "+r"(top) : "r"(w & 0x7fff7fffu));
        return top;
    }
};

template <class T> __device__ __forceinline__ void unpack(const Pack& pack, float (&f)[16 / sizeof(T)]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) Words<T>::unpack(pack.w[i], f + i * Words<T>::PER_WORD);
}
template <class T> __device__ __forceinline__ Pack rounded_pack(const float (&f)[16 / sizeof(T)]) {
    Pack pack;
#pragma unroll
    for (int i = 0; i < 4; ++i) pack.w[i] = Words<T>::pack(f + i * Words<T>::PER_WORD);
    return pack;
}
template <class T> __device__ __forceinline__ void raise(u32& top, const Pack& pack) {
#pragma unroll
    for (int i = 0; i < 4; ++i) top = Words<T>::raise(top, pack.w[i]);
}
template <class T> __device__ __forceinline__ float highest(u32 top) {
    float f[2] = {};
    Words<T>::unpack(top, f);
    return fmaxf(f[0], f[1]);
}

// ---- the pieces of a cast ----------------------------------------------------------------------------------

// Four rows of V bytes join the columns. The older bytes move up instead of being indexed by row, so that the loop
// over batches need not be unrolled; where it is, the moves cost nothing.
template <int V> __device__ __forceinline__ void push_square(u32 (&square)[V / 4][4], u32 (&column)[V][4]) {
#pragma unroll
    for (int w = 0; w < V / 4; ++w) {
        u32(&q)[4] = square[w];
        transpose_4x4(q[0], q[1], q[2], q[3]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            u32(&c)[4] = column[4 * w + j];
            c[0] = c[1], c[1] = c[2], c[2] = c[3], c[3] = q[j];
        }
    }
}

// The scale of this launch, known to every thread; the first block also writes its inverse. For OWN_SCALE every block
// takes the maximum of the partials itself (they lie in L2), which saves a launch between the two passes.
template <int Format, int Mode>
__device__ __forceinline__ float find_scale(const TileScale& s, float* amax, float* scratch, const BlockPlace& block) {
    const bool first = threadIdx.x == 0 && block.x == 0 && block.y == 0;
    float scale = 1.f;
    if (Mode == GIVEN_SCALE) scale = *s.source;
    if (Mode == OWN_SCALE) {
        float top = 0.f;
        for (int i = threadIdx.x; i < s.n_partials; i += TILE_THREADS) top = fmaxf(top, s.source[i]);
        top = block_max<TILE_THREADS>(top, scratch);
        scale = scale_from_amax(top, Format == E4M3 ? 448.f : 57344.f, s.epsilon, s.power_of_two != 0);
        if (first && amax != nullptr) atomic_raise(amax, top);
    }
    if (first) *s.scale_inv = __fdiv_rn(1.f, scale);
    return scale;
}

// Adds the threads' column sums over the block's rows, in a fixed order, and writes one row of partials.
template <class Shape, int O, int V>
__device__ __forceinline__ void write_column_sums(float (&sum)[O][V], float* out, i64 col, i64 cols, float* scratch,
                                                  u32 part = blockIdx.y) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int warp_n = warp % Shape::WARPS_N, warp_m = warp / Shape::WARPS_N;
    const int place = (warp_n * Shape::LANES_N + lane % Shape::LANES_N) * V;
#pragma unroll
    for (int o = 0; o < O; ++o) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
#pragma unroll
            for (int d = Shape::LANES_N; d < 32; d <<= 1) sum[o][j] += __shfl_xor_sync(~0u, sum[o][j], d);
        }
    }
    if (warp_m > 0 && lane < Shape::LANES_N) {
#pragma unroll
        for (int o = 0; o < O; ++o) {
#pragma unroll
            for (int j = 0; j < V; ++j) scratch[((warp_m - 1) * O + o) * Shape::N + place + j] = sum[o][j];
        }
    }
    __syncthreads();
    if (warp_m > 0 || lane >= Shape::LANES_N) return;
#pragma unroll
    for (int o = 0; o < O; ++o) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
            float total = sum[o][j];
#pragma unroll
            for (int w = 0; w < Shape::WARPS_M - 1; ++w) total += scratch[(w * O + o) * Shape::N + place + j];
            if (col + j < cols) out[part * (O * cols) + o * cols + col + j] = total;
        }
    }
}

// The V FP8 bytes of one row (or, unaligned, those of them that lie inside). `edge`: columns that may be written.
template <int V, bool Aligned>
__device__ __forceinline__ void store_row(u8* p, const u32 (&words)[V / 4], i64 col, i64 edge) {
    if constexpr (Aligned) {
        if (col >= edge) return;
        if constexpr (V == 8) *reinterpret_cast<uint2*>(p) = make_uint2(words[0], words[1]);
        else *reinterpret_cast<u32*>(p) = words[0];
    } else {
#pragma unroll
        for (int j = 0; j < V; ++j) {
            if (col + j < edge) p[j] = u8(words[j / 4] >> (8 * (j % 4)));
        }
    }
}

// ---- the walk ----------------------------------------------------------------------------------------------

// Starts 16 bytes on their way to shared memory; `inside` false writes zeros instead.
__device__ __forceinline__ void copy_async(uint4* to, const void* from, bool inside) {
    const u32 address = u32(__cvta_generic_to_shared(to));
    const int bytes = inside ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes) : "memory");
}

// Four rows of all operands go through `queue`, a ring of DEPTH such groups in shared memory of which each thread
// uses only its own places: thread t's 16 bytes of (stage, row, operand) lie at [stage][row][operand][t]. So the
// loads of later groups, and of the next tile, are under way while a group is computed, without registers or barriers.
//
// Producer:  static constexpr int OUTPUTS, OPERANDS, DEPTH, FLAT_ROWS (rows of a thread in a flat tile);
//            const T* operand(int k) const, i64 pitch(int k) const  (the k-th operand of column 0, its row length);
//            void values(const Pack (&operands)[OPERANDS], Pack (&out)[OUTPUTS], i64 row, i64 col) const
//            (rounded to T; 0 beyond the edge, where the operands are zeros).
// A block takes `steps` tiles below one another, so the host can bound the number of partials.
constexpr int GROUP = 4;

// The producer of a cast alone: the values of a dense matrix as they are.
template <class T> struct Matrix {
    static constexpr int OUTPUTS = 1, OPERANDS = 1, DEPTH = 4, FLAT_ROWS = 8;
    static constexpr bool AS_IT_IS = true;
    const T* x;
    i64 cols;
    __device__ __forceinline__ const T* operand(int) const { return x; }
    __device__ __forceinline__ i64 pitch(int) const { return cols; }
    __device__ __forceinline__ void values(const Pack (&raw)[1], Pack (&out)[1], i64, i64) const { out[0] = raw[0]; }
};

template <class T, bool Aligned, class Producer>
__device__ __forceinline__ void fetch_group(const Producer& producer, uint4* stage, i64 row, i64 rows, i64 col,
                                            i64 cols) {
    constexpr int K = Producer::OPERANDS;
    const i64 left = col < cols ? rows - row : 0;
    const int inside = left < 0 ? 0 : (left < GROUP ? int(left) : GROUP);
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const i64 pitch = producer.pitch(k);
        const T* p = producer.operand(k) + row * pitch + col;
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
            uint4* to = stage + (i * K + k) * TILE_THREADS;
            if constexpr (Aligned) {
                copy_async(to, p, i < inside);
            } else {
                const Pack pack = fetch_pack<T, false>(p, 0, i < inside, 0, 0, cols - col);
                *to = make_uint4(pack.w[0], pack.w[1], pack.w[2], pack.w[3]);
            }
            p += pitch;
        }
    }
}

template <int K> __device__ __forceinline__ void take_group(const uint4* stage, Pack (&raw)[GROUP][K]) {
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
#pragma unroll
        for (int k = 0; k < K; ++k) {
            const uint4 v = stage[(i * K + k) * TILE_THREADS];
            raw[i][k] = Pack{{v.x, v.y, v.z, v.w}};
        }
    }
}

// How a group of rows among others lies in the copies of all of them. A matrix of its own is padded in both.
struct Rows {
    i64 stored;  // the last row of the rowwise copy that may be written, and one
    i64 height;  // likewise of a column of the transposed copy, which ends in zeros
    i64 pitch;   // from one column of the transposed copy to the next
    i64 pieces;  // from one row of the scales of the rowwise copy's pieces to the next
};
__device__ __forceinline__ Rows own_rows(i64 rows) {
    const i64 n = padded(rows);
    return {n, n, n, n};
}

// Where a thread's V columns begin, and the padded sizes.
struct Place {
    i64 col, cols, pitch;
    Rows rows;
    // How many columns of output o's storage may be written: the padding lies behind the last output.
    template <int O> __device__ __forceinline__ i64 edge(int o) const { return o == O - 1 ? pitch - o * cols : cols; }
};

// What a thread gathers over all its rows: the maximum, as Words<T>::raise keeps it, and the sums of its columns.
template <int O, int V> struct Gathered {
    u32 top = 0;
    float sum[O][V] = {};
};

// Row i of a group: its values (where `keep`) and its bytes (where `cast`) to memory; the bytes also to `square`.
template <int Format, int Mode, bool ColumnSum, bool Aligned, class T, int O, int V>
__device__ __forceinline__ void deliver_row(const Pack (&value)[O], int i, const Place& at, T* y, bool keep,
                                            u8* rowwise, bool cast, float scale, u32 (&square)[O][V / 4][4],
                                            Gathered<O, V>& got) {
#pragma unroll
    for (int o = 0; o < O; ++o) {
        raise<T>(got.top, value[o]);
        if (keep) store_pack<T, Aligned>(y + o * at.cols, value[o], at.col, at.cols);
        float f[V];
        unpack<T>(value[o], f);
        if constexpr (ColumnSum) {
#pragma unroll
            for (int j = 0; j < V; ++j) got.sum[o][j] += f[j];
        }
        if constexpr (Mode != NO_CAST) {
            u32 words[V / 4];
#pragma unroll
            for (int w = 0; w < V / 4; ++w) {
                const float* p = f + 4 * w;
                words[w] = to_fp8x4<Format>(p[0] * scale, p[1] * scale, p[2] * scale, p[3] * scale);
                square[o][w][i] = words[w];
            }
            if (cast) store_row<V, Aligned>(rowwise + o * at.cols, words, at.col, at.edge<O>(o));
        }
    }
}

// Sixteen rows of each column as one store into the transposed copy.
template <int O, int V>
__device__ __forceinline__ void store_columns(u8* columnwise, i64 row, const Place& at, const u32 (&column)[O][V][4]) {
#pragma unroll
    for (int o = 0; o < O; ++o) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
            const u32(&c)[4] = column[o][j];
            u8* to = columnwise + (o * at.cols + at.col + j) * at.rows.pitch + row;
            if (row < at.rows.height && at.col + j < at.edge<O>(o)) {
                *reinterpret_cast<uint4*>(to) = make_uint4(c[0], c[1], c[2], c[3]);
            }
        }
    }
}

template <class T, int Format, int Mode, bool Tall, bool Columnwise, bool ColumnSum, bool Keep, bool Aligned,
          class Producer>
__device__ __forceinline__ void walk_tiles(const Producer& producer, const TileSink<T>& sink, const TileScale& scaling,
                                           i64 rows, i64 cols, int steps,
                                           const BlockPlace& block = own_place(), const Rows* among = nullptr) {
    using Shape = TileShape<T, Tall, Producer::FLAT_ROWS>;
    static_assert(Tall || !Columnwise, "sixteen rows make a store into the transposed copy");
    constexpr int V = Shape::V, O = Producer::OUTPUTS, K = Producer::OPERANDS, DEPTH = Producer::DEPTH;
    constexpr int GROUPS = Shape::ROWS / GROUP, STAGE = GROUP * K * TILE_THREADS;
    constexpr int SUMS = (Shape::WARPS_M - 1) * O * Shape::N;
    __shared__ float scratch[ColumnSum && SUMS > 32 ? SUMS : 32];
    extern __shared__ uint4 queue[];

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i64 col = i64(block.x) * Shape::N + (warp % Shape::WARPS_N * Shape::LANES_N + lane % Shape::LANES_N) * V;
    const Place at = {col, cols, padded(O * cols), among ? *among : own_rows(rows)};
    // This thread's rows in the block's first tile. The blocks of a column take turns: all that run at once work on
    // neighbouring rows, and not on rows a power of two apart, which would crowd a few memory channels.
    const int place = (warp / Shape::WARPS_N * Shape::LANES_M + lane / Shape::LANES_N) * Shape::ROWS;
    const i64 first = i64(block.y) * Shape::M + place;
    const i64 stride = i64(block.down) * Shape::M;

    uint4* mine = queue + threadIdx.x;
#pragma unroll
    for (int s = 0; s < DEPTH; ++s) {
        const i64 row = first + s / GROUPS * stride + s % GROUPS * GROUP;
        fetch_group<T, Aligned>(producer, mine + s * STAGE, row, rows, col, cols);
        commit_copies();
    }
    // Here and not earlier, so that the first groups are on their way while the partials are reduced.
    float scale = 1.f;
    if constexpr (Mode != NO_CAST) scale = find_scale<Format, Mode>(scaling, sink.amax, scratch, block);

    Gathered<O, V> got;
    int turn = 0;
    for (int step = 0; step < steps; ++step) {
        const i64 row0 = first + step * stride;
        u32 column[O][V][4] = {};  // the last sixteen bytes of each column
#pragma unroll 1
        for (int g = 0; g < GROUPS; ++g) {
            const i64 row = row0 + g * GROUP;
            const int stage = GROUPS % DEPTH == 0 ? g % DEPTH : turn;
            turn = turn == DEPTH - 1 ? 0 : turn + 1;
            wait_copies<DEPTH - 1>();
            Pack raw[GROUP][K];
            take_group(mine + stage * STAGE, raw);
            const i64 ahead = row0 + (g + DEPTH) / GROUPS * stride + (g + DEPTH) % GROUPS * GROUP;
            if (step + (g + DEPTH) / GROUPS < steps) {
                fetch_group<T, Aligned>(producer, mine + stage * STAGE, ahead, rows, col, cols);
            }
            commit_copies();  // an empty one counts too

            u32 square[O][V / 4][4];
            T* y = sink.y + row * (O * cols) + col;
            u8* rowwise = sink.rowwise + row * at.pitch + col;
            const bool cast = sink.rowwise != nullptr && row < at.rows.stored;  // of padding as a whole
#pragma unroll
            for (int i = 0; i < GROUP; ++i, y += O * cols, rowwise += at.pitch) {
                Pack value[O];
                producer.values(raw[i], value, row + i, col);
                deliver_row<Format, Mode, ColumnSum, Aligned>(value, i, at, y, Keep && row + i < rows, rowwise,
                                                              cast && (!among || row + i < at.rows.stored), scale,
                                                              square, got);
            }
            if constexpr (Columnwise) {
#pragma unroll
                for (int o = 0; o < O; ++o) push_square<V>(square[o], column[o]);
            }
        }
        if constexpr (Columnwise) store_columns(sink.columnwise, row0, at, column);
    }
    if (Mode != OWN_SCALE && sink.amax != nullptr) {
        const float amax = block_max<TILE_THREADS>(highest<T>(got.top), scratch);
        if (threadIdx.x == 0) {
            if (Mode == GIVEN_SCALE) atomic_raise(sink.amax, amax);
            else sink.amax[block.y * block.across + block.x] = amax;
        }
    }
    if constexpr (ColumnSum) write_column_sums<Shape>(got.sum, sink.column_sum, col, cols, scratch, block.y);
}
