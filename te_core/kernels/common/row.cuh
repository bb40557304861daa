// Rows shared by teams of threads: vector access of any width, sums over a team, and the moments of a row.
//
// A block holds TEAMS teams of SIZE threads; each team works on one row at a time. SIZE is a power of two up to 32
// (several teams in a warp) or a multiple of 32. Thread `rank` of a team owns the vectors rank, rank + SIZE, ...
// of VEC elements. All kernels that want the same bits from a row take the same SIZE and VEC: the order of the
// additions depends on nothing else.
#pragma once
#include "common/numeric.cuh"

// ---- access: N elements of any type, in pieces of at most 16 bytes --------------------------------------------

template <class T, int N> struct Pieces {
    static constexpr int BYTES = sizeof(T) * N, PIECE = BYTES < 16 ? BYTES : 16, COUNT = BYTES / PIECE;
};

// Data that is read once passes by L1, where gamma and beta shall stay.
__device__ __forceinline__ void read_once(uint4& v, const void* p) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
}
__device__ __forceinline__ void read_once(uint2& v, const void* p) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
}
__device__ __forceinline__ void read_once(u32& v, const void* p) {
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
}
__device__ __forceinline__ void read_once(unsigned short& v, const void* p) {
    v = __ldg(static_cast<const unsigned short*>(p));
}

template <int N, class T> __device__ __forceinline__ Vec<T, N> load_once(const T* p) {
    typedef Pieces<T, N> P;
    typedef typename Bits<P::PIECE>::type W;
    Vec<T, N> v;
#pragma unroll
    for (int i = 0; i < P::COUNT; ++i) read_once(reinterpret_cast<W*>(&v)[i], reinterpret_cast<const W*>(p) + i);
    return v;
}
template <int N, class T> __device__ __forceinline__ Vec<T, N> load_vec(const T* p) {
    typedef Pieces<T, N> P;
    typedef typename Bits<P::PIECE>::type W;
    Vec<T, N> v;
#pragma unroll
    for (int i = 0; i < P::COUNT; ++i) reinterpret_cast<W*>(&v)[i] = __ldg(reinterpret_cast<const W*>(p) + i);
    return v;
}
template <int N, class T> __device__ __forceinline__ void store_vec(T* p, const Vec<T, N>& v) {
    typedef Pieces<T, N> P;
    typedef typename Bits<P::PIECE>::type W;
#pragma unroll
    for (int i = 0; i < P::COUNT; ++i) reinterpret_cast<W*>(p)[i] = reinterpret_cast<const W*>(&v)[i];
}

// T to float. The two bf16 of a word are a shift and a mask; taken one by one they cost an instruction more.
template <int N> __device__ __forceinline__ void to_floats(const Vec<float, N>& v, float (&f)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) f[j] = v[j];
}
template <int N> __device__ __forceinline__ void to_floats(const Vec<fp16, N>& v, float (&f)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) f[j] = to_float(v[j]);
}
template <int N> __device__ __forceinline__ void to_floats(const Vec<bf16, N>& v, float (&f)[N]) {
#pragma unroll
    for (int j = 0; j + 1 < N; j += 2) {
        const u32 word = reinterpret_cast<const u32*>(&v)[j / 2];
        f[j] = __uint_as_float(word << 16);
        f[j + 1] = __uint_as_float(word & 0xffff0000u);
    }
    if (N % 2) f[N - 1] = to_float(v[N - 1]);
}

// float to T, two elements an instruction where T has 16 bits.
template <int N> __device__ __forceinline__ Vec<float, N> round_to(const float (&f)[N], float) {
    Vec<float, N> v;
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = f[j];
    return v;
}
template <int N> __device__ __forceinline__ Vec<bf16, N> round_to(const float (&f)[N], bf16) {
    Vec<bf16, N> v;
#pragma unroll
    for (int j = 0; j + 1 < N; j += 2) {
        const __nv_bfloat162 two = __floats2bfloat162_rn(f[j], f[j + 1]);
        v[j] = two.x;
        v[j + 1] = two.y;
    }
    if (N % 2) v[N - 1] = __float2bfloat16_rn(f[N - 1]);
    return v;
}
template <int N> __device__ __forceinline__ Vec<fp16, N> round_to(const float (&f)[N], fp16) {
    Vec<fp16, N> v;
#pragma unroll
    for (int j = 0; j + 1 < N; j += 2) {
        const __half2 two = __floats2half2_rn(f[j], f[j + 1]);
        v[j] = two.x;
        v[j + 1] = two.y;
    }
    if (N % 2) v[N - 1] = __float2half_rn(f[N - 1]);
    return v;
}

// The FP8 bytes of value * scale.
template <int F, class T, int N> __device__ __forceinline__ Vec<u8, N> quantized(const Vec<T, N>& v, float scale) {
    float f[N];
    to_floats(v, f);
    Vec<u8, N> q;
#pragma unroll
    for (int j = 0; j + 3 < N; j += 4) {
        const u32 word = to_fp8x4<F>(f[j] * scale, f[j + 1] * scale, f[j + 2] * scale, f[j + 3] * scale);
        reinterpret_cast<u32*>(&q)[j / 4] = word;
    }
    if (N == 2) reinterpret_cast<unsigned short*>(&q)[0] = to_fp8x2<F>(f[0] * scale, f[N - 1] * scale);
    if (N == 1) q[0] = to_fp8<F>(f[0] * scale);
    return q;
}

// ---- a team -----------------------------------------------------------------------------------------------------

__device__ constexpr int power_of_two_from(int n) { return n <= 1 ? 1 : 2 * power_of_two_from((n + 1) / 2); }

template <int Size, int Teams> struct Team {
    static constexpr int WARPS = Size < 32 ? 1 : Size / 32, LANES = Size < 32 ? Size : 32;
    static constexpr int FAN = power_of_two_from(WARPS);
    static constexpr int SCRATCH = Size > 32 ? Teams * 2 * WARPS : 1;  // float2s of shared memory a block needs
    static_assert(Size % 32 == 0 || (Size & (Size - 1)) == 0, "a power of two or whole warps");
    static_assert(Size <= 32 || Teams <= 15, "one named barrier for each team, beside barrier 0 of the whole block");

    int index, rank;
    float2* slots;  // this team's two sets of one slot a warp
    int turn;       // which set the next sum takes: a slow reader of the last one is not overtaken

    __device__ __forceinline__ Team(float2* scratch)
        : index(threadIdx.x / Size), rank(threadIdx.x % Size), slots(scratch + index * 2 * WARPS), turn(0) {}

    static __device__ __forceinline__ float lanes_sum(float v) { return fold<LANES>(v); }

    // The sum over the warps of what is the same in all lanes of each; the same bits in every thread. All threads of
    // the warps involved must come.
    __device__ __forceinline__ float total(float v) {
        if (Size <= 32) return v;
        float* slot = reinterpret_cast<float*>(next_slots());
        const int lane = threadIdx.x % 32, from = lane % FAN;
        if (lane == 0) slot[rank / 32] = v;
        barrier();
        return fold<FAN>(from < WARPS ? slot[from] : 0.f);
    }
    __device__ __forceinline__ float sum(float v) { return total(lanes_sum(v)); }

    // How many elements of a row fall to a warp of the team, at Width a vector.
    template <int Width> static __device__ __forceinline__ int share(int warp, int cols) {
        const int mine = cols % (Size * Width) - warp * 32 * Width;
        return cols / (Size * Width) * 32 * Width + min(max(mine, 0), 32 * Width);
    }

    // From each warp's sum and its squares about its own mean: the squares about the team's, which replaces `mean`.
    template <int Width>
    __device__ __forceinline__ float combine(float sum, float squares, float& mean, int cols, float inv_cols) {
        if (Size <= 32) return squares;
        float2* slot = next_slots();
        const int lane = threadIdx.x % 32, from = lane % FAN;
        if (lane == 0) slot[rank / 32] = make_float2(sum, squares);
        barrier();
        const float2 other = from < WARPS ? slot[from] : make_float2(0.f, 0.f);
        const float count = from < WARPS ? share<Width>(from, cols) : 0.f;
        mean = fold<FAN>(other.x) * inv_cols;
        const float away = count > 0.f ? __fdividef(other.x, count) - mean : 0.f;
        return fold<FAN>(fmaf(count * away, away, other.y));
    }

    // Two sums at once. After one exchange the lower half of a warp adds up x and the upper half y, which takes
    // little more than half the shuffles of adding both everywhere.
    __device__ __forceinline__ float2 sum(float2 v) {
        if (LANES < 32) return make_float2(fold<LANES>(v.x), fold<LANES>(v.y));
        float half = fold<16>(halves(v));
        if (Size == 32) return both(half);
        float* slot = reinterpret_cast<float*>(next_slots());
        const int lane = threadIdx.x % 32;
        if (lane % 16 == 0) slot[rank / 32 * 2 + lane / 16] = half;
        barrier();
        if (FAN > 16) {
            const float2 zero = make_float2(0.f, 0.f);
            half = fold<16>(halves(lane < WARPS ? reinterpret_cast<const float2*>(slot)[lane] : zero));
        } else {
            const int from = lane % FAN;
            half = fold<FAN>(from < WARPS ? slot[from * 2 + lane / 16] : 0.f);
        }
        return both(half);
    }

    __device__ __forceinline__ void barrier() const {
        asm volatile("bar.sync %0, %1;" ::"r"(index + 1), "n"(Size) : "memory");
    }

  private:
    template <int Lanes> static __device__ __forceinline__ float fold(float v) {
#pragma unroll
        for (int o = Lanes / 2; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
        return v;
    }
    static __device__ __forceinline__ float halves(float2 v) {
        const bool upper = threadIdx.x & 16;
        return (upper ? v.y : v.x) + __shfl_xor_sync(~0u, upper ? v.x : v.y, 16);
    }
    static __device__ __forceinline__ float2 both(float half) {
        const float other = __shfl_xor_sync(~0u, half, 16);
        return threadIdx.x & 16 ? make_float2(other, half) : make_float2(half, other);
    }
    __device__ __forceinline__ float2* next_slots() {
        float2* slot = slots + turn * WARPS;
        turn ^= 1;
        return slot;
    }
};

// ---- a thread's part of a row: held in registers, or read again at each use where it is too long ----------------

// Full: the row is exactly Size * Iters vectors, so nothing is asked about columns, and the compiler may overlap
// what it does for one vector with the next (with a branch around each, forward ran at half the speed).
template <class T, int Width, int Iters, int Size, bool Full> struct HeldRow {
    Vec<T, Width> v[Iters];
    static __device__ __forceinline__ int column(int i, int rank) { return (i * Size + rank) * Width; }
    static __device__ __forceinline__ bool owns(int col, int cols) { return Full || col < cols; }

    __device__ __forceinline__ void read(const T* p, int rank, int cols) {
#pragma unroll
        for (int i = 0; i < Iters; ++i) {
            const int col = column(i, rank);
            if (owns(col, cols)) v[i] = load_once<Width>(p + col);
        }
    }
    template <class S> __device__ __forceinline__ void take(const S& stage) {
#pragma unroll
        for (int i = 0; i < Iters; ++i) v[i] = stage.v[i][threadIdx.x];
    }
    template <class F> __device__ __forceinline__ void each(int rank, int cols, F f) const {
#pragma unroll
        for (int i = 0; i < Iters; ++i) {
            const int col = column(i, rank);
            if (owns(col, cols)) f(col, v[i]);
        }
    }
};

template <class T, int Width, int Size> struct StreamedRow {
    const T* p;
    __device__ __forceinline__ void read(const T* row, int, int) { p = row; }
    template <class S> __device__ __forceinline__ void take(const S&) {}
    template <class F> __device__ __forceinline__ void each(int rank, int cols, F f) const {
#pragma unroll 4
        for (int col = rank * Width; col < cols; col += Size * Width) f(col, load_vec<Width>(p + col));
    }
};

template <class T, int Width, int Iters, int Size, bool Full> struct RowOf {
    typedef HeldRow<T, Width, Iters, Size, Full> type;
};
template <class T, int Width, int Size, bool Full> struct RowOf<T, Width, 0, Size, Full> {
    typedef StreamedRow<T, Width, Size> type;
};

// ---- rows on their way: each thread fetches its own part into shared memory, so no barrier is needed ----------------

template <class T, int Width> __device__ __forceinline__ void copy_async(Vec<T, Width>* to, const T* from) {
    constexpr int BYTES = sizeof(T) * Width;
    static_assert(BYTES <= 16, "one copy is at most 16 bytes");
    const u32 address = u32(__cvta_generic_to_shared(to));
    if (BYTES == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
    if (BYTES == 8) asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(address), "l"(from) : "memory");
    if (BYTES == 4) asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(from) : "memory");
    if (BYTES < 4) *to = load_once<Width>(from);  // the hardware copies no less than 4 bytes
}

template <class T, int Width, int Iters, int Size, bool Full, int Threads> struct Stage {
    typedef HeldRow<T, Width, Iters, Size, Full> Row;
    Vec<T, Width> v[Iters][Threads];
    __device__ __forceinline__ void fetch(const T* p, int rank, int cols) {
#pragma unroll
        for (int i = 0; i < Iters; ++i) {
            const int col = Row::column(i, rank);
            if (Row::owns(col, cols)) copy_async(&v[i][threadIdx.x], p + col);
        }
    }
};

// ---- the moments of a row ---------------------------------------------------------------------------------------

// (mean, rstd); mean is 0 unless Centered. Each warp takes the squares about its own mean, then the warps' sums are put
// together with the distance of their means: no cancellation, however far the row is from zero, and one barrier.
template <bool Centered, int Width, class Row, class TEAM>
__device__ __forceinline__ float2 moments(const Row& row, TEAM& team, int cols, float inv_cols, float eps) {
    float sum = 0.f, mean = 0.f, squares = 0.f;
    if (Centered) {
        row.each(team.rank, cols, [&](int, const auto& v) {
            float f[Width];
            to_floats(v, f);
#pragma unroll
            for (int j = 1; j < Width; ++j) f[0] += f[j];
            sum += f[0];
        });
        sum = TEAM::lanes_sum(sum);
        if (TEAM::WARPS == 1) mean = sum * inv_cols;
        else mean = __fdividef(sum, fmaxf(TEAM::template share<Width>(team.rank / 32, cols), 1.f));
    }
    row.each(team.rank, cols, [&](int, const auto& v) {
        float f[Width], part = 0.f;
        to_floats(v, f);
#pragma unroll
        for (int j = 0; j < Width; ++j) {
            const float d = Centered ? f[j] - mean : f[j];
            part = fmaf(d, d, part);
        }
        squares += part;
    });
    squares = TEAM::lanes_sum(squares);
    squares = Centered ? team.template combine<Width>(sum, squares, mean, cols, inv_cols) : team.total(squares);
    return make_float2(mean, __frsqrt_rn(fmaf(squares, inv_cols, eps)));
}

// y of one element, spelled out: every kernel shall round alike.
template <bool Centered> __device__ __forceinline__ float normalized(float x, float2 moment, float g, float b) {
    const float xhat = __fmul_rn(Centered ? __fsub_rn(x, moment.x) : x, moment.y);
    return Centered ? __fmaf_rn(xhat, g, b) : __fmul_rn(xhat, g);
}

// ---- the running maximum of |y|, two elements an instruction where T has 16 bits; a NaN loses -----------------------

template <class T> struct Top;
template <> struct Top<float> {
    float top = 0.f;
    template <int N> __device__ __forceinline__ void raise(const Vec<float, N>& v) {
#pragma unroll
        for (int j = 0; j < N; ++j) top = fmaxf(top, fabsf(v[j]));
    }
    __device__ __forceinline__ float get() const { return top; }
};
template <class T2> struct TopOfPairs {
    T2 top;
    template <class T, int N> __device__ __forceinline__ void raise(const Vec<T, N>& v) {
#pragma unroll
        for (int j = 0; j < N; j += 2) top = __hmax2(top, __habs2(T2(v[j], v[N > 1 ? j + 1 : j])));
    }
    __device__ __forceinline__ float get() const { return fmaxf(to_float(top.x), to_float(top.y)); }
};
template <> struct Top<bf16> : TopOfPairs<__nv_bfloat162> {
    __device__ __forceinline__ Top() { top = __float2bfloat162_rn(0.f); }
};
template <> struct Top<fp16> : TopOfPairs<__half2> {
    __device__ __forceinline__ Top() { top = __float2half2_rn(0.f); }
};
