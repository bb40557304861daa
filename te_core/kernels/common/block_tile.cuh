// From a producer of values to FP8 with a scale for each 1x128 piece or 128x128 tile: in one or both orientations, with
// column sums. A cast alone, activations, their backward and norms are producers (common/fp8_tile.cuh says what one has).
//
// q = sat_cast(float32(value) * scale)   rowwise    [padded(rows), padded(OUTPUTS * cols)], pieces along its rows
//                                        columnwise its transpose, pieces along its rows too, which are columns
// padded() rounds up to 16; the tail is written as zeros, its scales as those of zeros. Scales are stored inverse:
// pieces [blocks along the copy's rows, rows of the copy]; Tiled [row blocks, blocks up to a multiple of 4].
// Output i of OUTPUTS lies i * cols columns to the right; of two, each begins with a piece: cols is a multiple of 128.
//
// A block of threads takes one 128x128 tile of every output. A thread owns V = 16 / sizeof(T) neighbouring columns of
// sixteen rows, as in common/fp8_tile.cuh, whose stores it shares. The values wait in shared memory, each thread's part
// in places of its own, between the maxima and the cast. There the last OUTPUTS operands come by asynchronous copies that
// hold no registers, so that six blocks (of float or of two outputs three) keep a multiprocessor's share of the memory
// busy; values take the places of what they are made of. The operands before come through registers, four rows at a
// time. Sixteen lanes side by side cover 128 columns of 16-bit elements: four rows' maxima take five exchanges. Two lanes
// below one another turn 32 rows, a whole sector of the transposed copy.
#pragma once
#include "common/fp8_tile.cuh"

template <class T> struct BlockShape {
    static constexpr int SIDE = 128, V = 16 / sizeof(T), ROWS = 16;
    static constexpr int LANES_N = 16, WARPS_N = SIDE / (LANES_N * V), WARPS_M = SIDE / (32 / LANES_N * ROWS);
    static constexpr int THREADS = 32 * WARPS_N * WARPS_M;
    static constexpr int RESIDENT = sizeof(T) == 4 ? 3 : 6;  // blocks of a multiprocessor, to be divided by OUTPUTS
};

// What is delivered, and whether rows of operands start on 16 bytes and hold whole packs.
template <int Format, bool IsTiled, bool Rowwise, bool Columnwise, bool ColumnSum, bool IsAligned> struct BlockCast {
    static constexpr int FORMAT_OF = Format;
    static constexpr bool TILES = IsTiled, ALONG_ROWS = Rowwise, ALONG_COLUMNS = Columnwise, SUMS = ColumnSum;
    static constexpr bool IN_PACKS = IsAligned;
};

struct BlockSink {
    u8* rowwise;
    float* row_scale;
    u8* columnwise;
    float *column_scale, *column_sum;  // column_sum: the sums of each tile's rows, [tiles below one another, columns]
};

// The largest finite value of the input type: the scale of a block so small that the quotient overflows.
__device__ __forceinline__ float largest(float) { return __uint_as_float(0x7f7fffffu); }
__device__ __forceinline__ float largest(bf16) { return __uint_as_float(0x7f7f0000u); }
__device__ __forceinline__ float largest(fp16) { return 65504.f; }

template <class T, int Format> struct BlockRule {
    float epsilon;
    int power_of_two;
    __device__ __forceinline__ float operator()(float amax) const {
        return scale_from_amax(amax, Format == E4M3 ? 448.f : 57344.f, epsilon, power_of_two != 0, largest(T()));
    }
};

// What the warps tell one another. `row` and `column` hold maxima, then (in the first of each) the scales.
template <class Shape, bool Sums> struct BlockExchange {
    float row[Shape::WARPS_N][Shape::SIDE];
    float column[Shape::WARPS_M][Shape::SIDE];
    float sum[Sums ? Shape::WARPS_M : 1][Shape::SIDE];
};

// Where a thread's part of a tile lies: in the tile, and in the matrix.
template <class Shape> struct BlockSpot {
    int lane, warp_n, warp_m, left, top;
    i64 row, col;
    __device__ __forceinline__ BlockSpot(i64 tile_m, i64 tile_n) {
        const int warp = threadIdx.x >> 5;
        lane = threadIdx.x & 31, warp_n = warp % Shape::WARPS_N, warp_m = warp / Shape::WARPS_N;
        left = (warp_n * Shape::LANES_N + lane % Shape::LANES_N) * Shape::V;
        top = (warp_m * (32 / Shape::LANES_N) + lane / Shape::LANES_N) * Shape::ROWS;
        row = tile_m * Shape::SIDE + top, col = tile_n * Shape::SIDE + left;
    }
};

// A thread's places in shared memory: one for each of its sixteen rows of each output.
template <class Shape> struct HeldRows {
    uint4* mine;
    __device__ __forceinline__ uint4* at(int output, int i) const {
        return mine + (output * Shape::ROWS + i) * Shape::THREADS;
    }
    __device__ __forceinline__ Pack get(int output, int i) const {
        const uint4 v = *at(output, i);
        return Pack{{v.x, v.y, v.z, v.w}};
    }
    __device__ __forceinline__ void put(int output, int i, const Pack& pack) const {
        *at(output, i) = make_uint4(pack.w[0], pack.w[1], pack.w[2], pack.w[3]);
    }
};

// The last operands begin on their way to their places, four rows a commit.
template <class T, bool Aligned, class Producer, class Shape>
__device__ __forceinline__ void fetch_held(const Producer& producer, const HeldRows<Shape>& held, i64 row, i64 rows,
                                           i64 col, i64 cols) {
    constexpr int O = Producer::OUTPUTS, STREAMED = Producer::OPERANDS - O;
    const i64 left = col < cols ? rows - row : 0;
    const int inside = left < 0 ? 0 : (left < Shape::ROWS ? int(left) : Shape::ROWS);
#pragma unroll
    for (int i = 0; i < Shape::ROWS; ++i) {
#pragma unroll
        for (int o = 0; o < O; ++o) {
            const i64 pitch = producer.pitch(STREAMED + o);
            const T* p = producer.operand(STREAMED + o) + (row + i) * pitch + col;
            if constexpr (Aligned) copy_async(held.at(o, i), p, i < inside);
            else held.put(o, i, fetch_pack<T, false>(p, 0, i < inside, 0, 0, cols - col));
        }
        if (i % GROUP == GROUP - 1) commit_copies();
    }
}

// Of 2 D maxima lanes D apart keep those of their own half each and give the others away.
template <int D> __device__ __forceinline__ void halve(float (&v)[GROUP], int lane) {
    const bool upper = (lane & D) != 0;
#pragma unroll
    for (int i = 0; i < D; ++i) {
        const float keep = upper ? v[i + D] : v[i], give = upper ? v[i] : v[i + D];
        v[i] = fmaxf(keep, __shfl_xor_sync(~0u, give, D));
    }
}

// Each of sixteen lanes brings a maximum for each of four rows and leaves with that of row number lane % 4.
__device__ __forceinline__ float own_maximum(float (&v)[GROUP], int lane) {
    halve<2>(v, lane);
    halve<1>(v, lane);
    v[0] = fmaxf(v[0], __shfl_xor_sync(~0u, v[0], 4));
    return fmaxf(v[0], __shfl_xor_sync(~0u, v[0], 8));
}

// Makes the values, in their places, and gathers the maxima of this warp's rows and columns (in a tile: of the warp, over
// both) and its column sums.
template <class T, class Cast, class Producer, class Shape>
__device__ __forceinline__ void gather(const Producer& producer, const HeldRows<Shape>& held,
                                       BlockExchange<Shape, Cast::SUMS> (&shared)[Producer::OUTPUTS],
                                       const BlockSpot<Shape>& spot, i64 rows, i64 cols) {
    constexpr int O = Producer::OUTPUTS, K = Producer::OPERANDS, STREAMED = K - O, V = Shape::V;
    constexpr int GROUPS = Shape::ROWS / GROUP, UNROLL = Producer::AS_IT_IS ? GROUPS : 1;
    Pack column[O] = {};
    float sum[O][V] = {};
#pragma unroll(UNROLL)
    for (int g = 0; g < Shape::ROWS; g += GROUP) {
        Pack raw[GROUP][K];
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
#pragma unroll
            for (int k = 0; k < STREAMED; ++k) {
                raw[i][k] = fetch_pack<T, Cast::IN_PACKS>(producer.operand(k), spot.row + g + i, rows, producer.pitch(k),
                                                          spot.col, cols);
            }
        }
        wait_copies<GROUPS - 1>();
        commit_copies();  // an empty one counts too
        float tops[O][GROUP];
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
            Pack value[O];
#pragma unroll
            for (int o = 0; o < O; ++o) raw[i][STREAMED + o] = held.get(o, g + i);
            producer.values(raw[i], value, spot.row + g + i, spot.col);
#pragma unroll
            for (int o = 0; o < O; ++o) {
                if constexpr (!Producer::AS_IT_IS) held.put(o, g + i, value[o]);
                if constexpr (Cast::ALONG_ROWS && !Cast::TILES) {
                    u32 top = 0;
                    raise<T>(top, value[o]);
                    tops[o][i] = highest<T>(top);
                }
                if constexpr (Cast::ALONG_COLUMNS || Cast::TILES) {
#pragma unroll
                    for (int w = 0; w < 4; ++w) column[o].w[w] = Words<T>::raise(column[o].w[w], value[o].w[w]);
                }
                if constexpr (Cast::SUMS) {
                    float f[V];
                    unpack<T>(value[o], f);
#pragma unroll
                    for (int j = 0; j < V; ++j) sum[o][j] += f[j];
                }
            }
        }
        if constexpr (Cast::ALONG_ROWS && !Cast::TILES) {
#pragma unroll
            for (int o = 0; o < O; ++o) {
                const float amax = own_maximum(tops[o], spot.lane);
                const int number = spot.lane % Shape::LANES_N;
                if (number < GROUP) shared[o].row[spot.warp_n][spot.top + g + number] = amax;
            }
        }
    }
#pragma unroll
    for (int o = 0; o < O; ++o) {
        if constexpr (Cast::TILES) {
            u32 top = 0;
            raise<T>(top, column[o]);
            const float amax = warp_max(highest<T>(top));
            if (spot.lane == 0) shared[o].row[0][spot.warp_m * Shape::WARPS_N + spot.warp_n] = amax;
        } else if constexpr (Cast::ALONG_COLUMNS) {
            float f[V];
            unpack<T>(column[o], f);
#pragma unroll
            for (int j = 0; j < V; ++j) {
                f[j] = fmaxf(f[j], __shfl_xor_sync(~0u, f[j], Shape::LANES_N));
                if (spot.lane < Shape::LANES_N) shared[o].column[spot.warp_m][spot.left + j] = f[j];
            }
        }
        if constexpr (Cast::SUMS) {
#pragma unroll
            for (int j = 0; j < V; ++j) {
                sum[o][j] += __shfl_xor_sync(~0u, sum[o][j], Shape::LANES_N);
                if (spot.lane < Shape::LANES_N) shared[o].sum[spot.warp_m][spot.left + j] = sum[o][j];
            }
        }
    }
}

// The maximum of a row or column over the warps that share it; `shared` and not a register keeps its scale.
template <int N, int Side, class Rule>
__device__ __forceinline__ float to_scale(float (&part)[N][Side], int t, const Rule& rule) {
    float top = part[0][t];
#pragma unroll
    for (int n = 1; n < N; ++n) top = fmaxf(top, part[n][t]);
    return part[0][t] = rule(top);
}

// The scales of a copy's pieces in this tile: `at` is a thread's row of the copy, `block` the piece's number.
__device__ __forceinline__ void store_piece(float* out, float scale, i64 block, i64 at, i64 end, i64 pitch) {
    if (at < end) out[block * pitch + at] = __fdiv_rn(1.f, scale);
}

// The scale of a tile of a copy at (row, block) of `blocks`; the last in its row also fills up to a multiple of four.
template <class Rule>
__device__ __forceinline__ void store_tile(float* out, float scale, const Rule& rule, i64 row, i64 block, i64 blocks) {
    const i64 pitch = (blocks + 3) & ~i64(3), at = block + threadIdx.x;
    if (at < (block + 1 == blocks ? pitch : block + 1)) {
        out[row * pitch + at] = __fdiv_rn(1.f, threadIdx.x ? rule(0.f) : scale);
    }
}

// One output's tile, whose scales are in `shared` (or `tile_scale`), to both copies.
template <class T, class Cast, class Shape>
__device__ __forceinline__ void cast_tile(const HeldRows<Shape>& held, int output,
                                          const BlockExchange<Shape, Cast::SUMS>& shared, float tile_scale,
                                          const BlockSpot<Shape>& spot, const Place& at, u8* rowwise, i64 pitch,
                                          u8* columnwise, bool among) {
    constexpr int V = Shape::V, FORMAT_OF = Cast::FORMAT_OF;
#if __CUDA_ARCH__ >= 890
    constexpr int UNROLL = Shape::ROWS / GROUP;
#else
    constexpr int UNROLL = 1;  // each conversion to FP8 is a long piece of code there: unrolled, it compiles for 8 seconds
#endif
    float across_scale[V];
#pragma unroll
    for (int j = 0; j < V; ++j) across_scale[j] = Cast::TILES ? tile_scale : shared.column[0][spot.left + j];
    u32 column[1][V][4] = {};
    u8* to = rowwise + spot.row * pitch + spot.col;
    const bool inside = spot.row < at.rows.stored && spot.col < at.pitch;  // of a matrix of its own: as a whole
#pragma unroll(UNROLL)
    for (int g = 0; g < Shape::ROWS; g += GROUP) {
        u32 square[V / 4][GROUP];
#pragma unroll
        for (int i = 0; i < GROUP; ++i, to += pitch) {
            const float r = Cast::TILES ? tile_scale : shared.row[0][spot.top + g + i];
            float f[V];
            unpack<T>(held.get(output, g + i), f);
            u32 words[V / 4];
#pragma unroll
            for (int w = 0; w < V / 4; ++w) {
                const float *p = f + 4 * w, *s = across_scale + 4 * w;
                if constexpr (Cast::ALONG_ROWS || Cast::TILES) {
                    words[w] = to_fp8x4<FORMAT_OF>(p[0] * r, p[1] * r, p[2] * r, p[3] * r);
                }
                if constexpr (Cast::ALONG_COLUMNS) {
                    square[w][i] = Cast::TILES ? words[w]
                                               : to_fp8x4<FORMAT_OF>(p[0] * s[0], p[1] * s[1], p[2] * s[2], p[3] * s[3]);
                }
            }
            if constexpr (Cast::ALONG_ROWS) {
                if (inside && (!among || spot.row + g + i < at.rows.stored)) {
                    store_row<V, true>(to, words, spot.col, at.pitch);
                }
            }
        }
        if constexpr (Cast::ALONG_COLUMNS) push_square<V>(square, column[0]);
    }
    if constexpr (Cast::ALONG_COLUMNS) store_columns(columnwise, spot.row, at, column);
}

// Tile number `block`, of `across` side by side, of every output.
template <class T, class Cast, class Producer>
__device__ __forceinline__ void quantize_tile(const Producer& producer, const BlockSink& sink, float epsilon,
                                              int power_of_two, i64 rows, i64 cols, u32 across, u32 block,
                                              const Rows* among = nullptr) {
    using Shape = BlockShape<T>;
    constexpr int O = Producer::OUTPUTS, SIDE = Shape::SIDE;
    __shared__ BlockExchange<Shape, Cast::SUMS> shared[O];
    extern __shared__ uint4 places[];
    const BlockRule<T, Cast::FORMAT_OF> rule = {epsilon, power_of_two};
    const int t = threadIdx.x % SIDE;
    const i64 tile_m = block / across, tile_n = block % across;
    const BlockSpot<Shape> spot(tile_m, tile_n);
    const Place at = {spot.col, cols, padded(cols), among ? *among : own_rows(rows)};
    const i64 pitch = O * at.pitch;  // of two outputs neither has a tail
    const HeldRows<Shape> held = {places + threadIdx.x};

    fetch_held<T, Cast::IN_PACKS>(producer, held, spot.row, rows, spot.col, cols);
    gather<T, Cast>(producer, held, shared, spot, rows, cols);
    __syncthreads();

    float tile_scale[O] = {};
#pragma unroll
    for (int o = 0; o < O; ++o) {
        const i64 number = o * across + tile_n;  // of the tile in its row
        if constexpr (Cast::TILES) {
            float amax = 0.f;
#pragma unroll
            for (int w = 0; w < Shape::WARPS_M * Shape::WARPS_N; ++w) amax = fmaxf(amax, shared[o].row[0][w]);
            tile_scale[o] = rule(amax);
            const i64 down = (rows + SIDE - 1) / SIDE;
            if constexpr (Cast::ALONG_ROWS) store_tile(sink.row_scale, tile_scale[o], rule, tile_m, number, O * across);
            if constexpr (Cast::ALONG_COLUMNS) store_tile(sink.column_scale, tile_scale[o], rule, number, tile_m, down);
        } else {  // of 128 threads each has a row and a column, of 256 a row or a column
            if (Cast::ALONG_ROWS && threadIdx.x < SIDE) {
                store_piece(sink.row_scale, to_scale(shared[o].row, t, rule), number, tile_m * SIDE + t, at.rows.stored,
                            at.rows.pieces);
            }
            if (Cast::ALONG_COLUMNS && threadIdx.x >= Shape::THREADS - SIDE) {
                store_piece(sink.column_scale, to_scale(shared[o].column, t, rule), tile_m, number * SIDE + t, pitch,
                            pitch);
            }
        }
        if (Cast::SUMS && threadIdx.x < SIDE && tile_n * SIDE + t < cols) {
            float total = shared[o].sum[0][t];
#pragma unroll
            for (int w = 1; w < Shape::WARPS_M; ++w) total += shared[o].sum[Cast::SUMS ? w : 0][t];
            sink.column_sum[tile_m * (O * cols) + o * cols + tile_n * SIDE + t] = total;
        }
    }
    if constexpr (!Cast::TILES) __syncthreads();

#pragma unroll
    for (int o = 0; o < O; ++o) {
        cast_tile<T, Cast>(held, o, shared[o], tile_scale[o], spot, at, sink.rowwise + o * cols, pitch,
                           sink.columnwise + o * cols * at.rows.pitch, among != nullptr);
    }
}
