// A step of Adam or AdamW on many tensors in one launch (te_core.ops.optimizer states the rule). The table is a kernel
// parameter: nothing is copied to the device before, and a captured graph holds its own.
//
//   adam          a block takes 16384 elements of one tensor (common/tensors.cuh)
//   adam_maxima   the pass before it where something is stored divided by a scale: the maxima of what adam will store,
//                 eight floats a tensor at table.maxima (zeroed before): of m, v, master, -, and their scales of before
//
// grad of GRAD, param of PARAM (WRITES_PARAM), m of MEAN, v of SQUARE, master: NO_MASTER, FLOAT, HALF, or REMAINDER, the low half
// of a float whose high half the parameter is. u8 is E4M3. Both it and fp16 states are stored divided by *scales.
//
// -D CAPACITY=… (72 bytes each: 52 fit the 4 KB of every device, 448 the 32,764 bytes of CUDA 12.1 and later)
// options: -default-device
// compile-check: GRAD=bf16 PARAM=bf16 WRITES_PARAM=1 MEAN=bf16 SQUARE=bf16 MASTER=NO_MASTER DECOUPLED=1 AMAX=0 CAPACITY=448
// compile-check: GRAD=bf16 PARAM=bf16 WRITES_PARAM=1 MEAN=float SQUARE=float MASTER=FLOAT DECOUPLED=1 AMAX=0 CAPACITY=52
// compile-check: GRAD=float PARAM=bf16 WRITES_PARAM=1 MEAN=u8 SQUARE=fp16 MASTER=REMAINDER DECOUPLED=0 AMAX=0 CAPACITY=52
// compile-check: GRAD=fp16 PARAM=fp16 WRITES_PARAM=1 MEAN=fp16 SQUARE=u8 MASTER=HALF DECOUPLED=1 AMAX=0 CAPACITY=52
// compile-check: GRAD=bf16 PARAM=bf16 WRITES_PARAM=0 MEAN=float SQUARE=float MASTER=FLOAT DECOUPLED=1 AMAX=1 CAPACITY=52
#include "common/adam.cuh"
#include "common/tensors.cuh"

enum Masters { NO_MASTER, FLOAT, HALF, REMAINDER };
template <int> struct MasterOf { typedef float type; };
template <> struct MasterOf<HALF> { typedef fp16 type; };
template <> struct MasterOf<REMAINDER> { typedef short type; };
typedef MasterOf<MASTER>::type W;

struct Entry {
    const GRAD* grad;
    PARAM* param;
    MEAN* m;
    SQUARE* v;
    W* master;
    float* scales;  // of m, v, master
    float* amax;    // AMAX: raised to max |p|
    i64 count;
    u32 first;
    u32 vector;  // whether all of them begin on 16 bytes
};
struct Table {
    Entry group[CAPACITY];
    AdamRule rule;
    float* maxima;
    u32 count;
};

// The largest stored value of a state of this type; 0: it is stored as it is.
template <class T> struct Limit { static constexpr float value = 0.f; };
template <> struct Limit<fp16> { static constexpr float value = 65504.f / 2; };
template <> struct Limit<u8> { static constexpr float value = 448.f; };
constexpr bool SCALED_M = Limit<MEAN>::value > 0, SCALED_V = Limit<SQUARE>::value > 0, SCALED_W = Limit<W>::value > 0;

struct Scales {
    float read[3], write[3];
};

template <int N, class T> __device__ __forceinline__ void read_state(const T* p, float scale, float (&f)[N]) {
    read_piece<N>(p, f);
    if constexpr (Limit<T>::value > 0) {
#pragma unroll
        for (int j = 0; j < N; ++j) f[j] = __fmul_rn(f[j], scale);
    }
}
template <int N, class T> __device__ __forceinline__ void write_state(T* p, float scale, float (&f)[N]) {
    if constexpr (Limit<T>::value > 0) {
#pragma unroll
        for (int j = 0; j < N; ++j) f[j] = __fmul_rn(f[j], scale);
    }
    write_piece<N>(p, f);
}

template <int N> __device__ __forceinline__ void read_values(const Entry& e, i64 at, float scale, float (&p)[N]) {
    if constexpr (MASTER == NO_MASTER) {
        read_piece<N>(e.param + at, p);
    } else if constexpr (MASTER == REMAINDER) {
        const auto low = load<N>(e.master + at);
        const auto high = load<N>(reinterpret_cast<const unsigned short*>(e.param) + at);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            p[j] = __uint_as_float((u32(high[j]) - (low[j] < 0)) << 16 | (u32(low[j]) & 0xffffu));
        }
    } else {
        read_state<N>(e.master + at, scale, p);
    }
}
template <int N> __device__ __forceinline__ void write_values(const Entry& e, i64 at, float scale, float (&p)[N]) {
    if constexpr (MASTER == REMAINDER) {
        Vec<short, N> low;
        Vec<unsigned short, N> high;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const u32 bits = isnan(p[j]) ? 0x7fc00000u : __float_as_uint(p[j]);
            low[j] = short(bits & 0xffffu);
            high[j] = (unsigned short)((bits >> 16) + (low[j] < 0));
        }
        store(e.master + at, low);
        store(reinterpret_cast<unsigned short*>(e.param) + at, high);
    } else {
        if constexpr (WRITES_PARAM) write_piece<N>(e.param + at, p);
        if constexpr (MASTER != NO_MASTER) write_state<N>(e.master + at, scale, p);
    }
}

// A step of the elements of a piece: written, or only looked at (for the maxima).
template <bool WRITES, int N>
__device__ __forceinline__ void piece(const Entry& e, i64 at, const AdamRule& rule, const Scales& scales,
                                      float (&tops)[3]) {
    float g[N], p[N], m[N], v[N];
    read_piece<N>(e.grad + at, g);
    read_state<N>(e.m + at, scales.read[0], m);
    read_state<N>(e.v + at, scales.read[1], v);
    read_values<N>(e, at, scales.read[2], p);
#pragma unroll
    for (int j = 0; j < N; ++j) adam_step<DECOUPLED>(rule, g[j], p[j], m[j], v[j]);
    if constexpr (!WRITES || AMAX) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
            tops[0] = fmaxf(tops[0], fabsf(m[j]));
            tops[1] = fmaxf(tops[1], fabsf(v[j]));
            tops[2] = fmaxf(tops[2], fabsf(p[j]));
        }
    }
    if constexpr (WRITES) {
        write_state<N>(e.m + at, scales.write[0], m);
        write_state<N>(e.v + at, scales.write[1], v);
        write_values<N>(e, at, scales.write[2], p);
    }
}

extern "C" __global__ void __launch_bounds__(TENSOR_THREADS) adam_maxima(const __grid_constant__ Table table) {
    __shared__ float scratch[32];
    if (skips(table.rule)) return;
    const int number = group_of(table, blockIdx.x);
    const Entry& e = table.group[number];
    const AdamRule rule = with_numbers(table.rule);
    float* mine = table.maxima + 8 * number;
    Scales scales = {};
    float tops[3] = {};
#pragma unroll
    for (int k = 0; k < 3; ++k) scales.read[k] = e.scales[k];
    if (blockIdx.x == e.first && threadIdx.x < 3) mine[4 + threadIdx.x] = e.scales[threadIdx.x];
    each_piece(blockIdx.x - e.first, e.count, e.vector != 0, [&](auto n, i64 at) {
        piece<false, decltype(n)::value>(e, at, rule, scales, tops);
    });
#pragma unroll
    for (int k = 0; k < 3; ++k) {
        if (k == 0 ? !SCALED_M : k == 1 ? !SCALED_V : !SCALED_W) continue;
        const float top = block_max<TENSOR_THREADS>(tops[k], scratch);
        if (threadIdx.x == 0) atomic_raise(mine + k, top);
    }
}

extern "C" __global__ void __launch_bounds__(TENSOR_THREADS) adam(const __grid_constant__ Table table) {
    if (skips(table.rule)) return;
    const int number = group_of(table, blockIdx.x);
    const Entry& e = table.group[number];
    const AdamRule rule = with_numbers(table.rule);
    Scales scales = {};
    float tops[3] = {};
    if constexpr (SCALED_M || SCALED_V || SCALED_W) {
        constexpr float LIMITS[3] = {Limit<MEAN>::value, Limit<SQUARE>::value, Limit<W>::value};
        const float* mine = table.maxima + 8 * number;
#pragma unroll
        for (int k = 0; k < 3; ++k) {
            if (LIMITS[k] == 0.f) continue;
            scales.read[k] = mine[4 + k];
            scales.write[k] = scale_from_amax(mine[k], LIMITS[k], 0.f, false);
            // The blocks of a tensor read the scale of before from where adam_maxima left it.
            if (blockIdx.x == e.first && threadIdx.x == 0) e.scales[k] = __fdiv_rn(1.f, scales.write[k]);
        }
    }
    each_piece(blockIdx.x - e.first, e.count, e.vector != 0, [&](auto n, i64 at) {
        piece<true, decltype(n)::value>(e, at, rule, scales, tops);
    });
    if constexpr (AMAX) {
        __shared__ float scratch[32];
        const float top = block_max<TENSOR_THREADS>(tops[2], scratch);
        if (threadIdx.x == 0) atomic_raise(e.amax, top);
    }
}
