// Many flat tensors in one launch, found by a table (groups.cuh). A block takes ELEMENTS elements of one tensor, its
// threads eight neighbouring ones at a time by 16-byte accesses; one by one where a tensor begins off that grid, and at
// its end.
#pragma once
#include "common/groups.cuh"

constexpr int TENSOR_THREADS = 256, PIECE = 8, ELEMENTS = TENSOR_THREADS * PIECE * 8;  // backends/cuda/tensors.py

// N neighbouring elements as floats, and back: in one access of up to 16 bytes, or in two.
template <int N, class T> __device__ __forceinline__ void read_piece(const T* p, float (&f)[N]) {
    constexpr int WIDE = N * sizeof(T) <= 16 ? N : int(16 / sizeof(T));
#pragma unroll
    for (int i = 0; i < N; i += WIDE) {
        const Vec<T, WIDE> v = load<WIDE>(p + i);
#pragma unroll
        for (int j = 0; j < WIDE; ++j) {
            if constexpr (sizeof(T) == 1) f[i + j] = from_fp8<E4M3>(v[j]);
            else f[i + j] = to_float(v[j]);
        }
    }
}
template <int N, class T> __device__ __forceinline__ void write_piece(T* p, const float (&f)[N]) {
    constexpr int WIDE = N * sizeof(T) <= 16 ? N : int(16 / sizeof(T));
#pragma unroll
    for (int i = 0; i < N; i += WIDE) {
        Vec<T, WIDE> v;
        if constexpr (sizeof(T) == 2 && WIDE % 2 == 0) {  // as one access: the compiler may store halves or words apart
            u32 words[WIDE / 2];
#pragma unroll
            for (int j = 0; j < WIDE; j += 2) {
                const Vec<T, 2> pair = {from_float<T>(f[i + j]), from_float<T>(f[i + j + 1])};
                memcpy(&words[j / 2], &pair, 4);
            }
            typename Bits<WIDE * 2>::type whole;
            memcpy(&whole, words, sizeof whole);
            __stwb(reinterpret_cast<typename Bits<WIDE * 2>::type*>(p + i), whole);
            continue;
        } else if constexpr (sizeof(T) > 1) {
#pragma unroll
            for (int j = 0; j < WIDE; ++j) v[j] = from_float<T>(f[i + j]);
        } else if constexpr (N % 4 == 0) {
#pragma unroll
            for (int j = 0; j < N; j += 4) {
                const u32 word = to_fp8x4<E4M3>(f[j], f[j + 1], f[j + 2], f[j + 3]);
                memcpy(&v[j], &word, 4);
            }
        } else {
            v[0] = to_fp8<E4M3>(f[0]);
        }
        store(p + i, v);
    }
}

// piece(number of elements as a constant, where they begin) for all elements of this block of a tensor.
template <int N> struct Number {
    static constexpr int value = N;
};
template <class Piece> __device__ __forceinline__ void each_piece(u32 block, i64 count, bool vector, Piece piece) {
    const i64 begin = i64(block) * ELEMENTS, end = begin + ELEMENTS < count ? begin + ELEMENTS : count;
    for (i64 i = begin + i64(threadIdx.x) * PIECE; i < end; i += TENSOR_THREADS * PIECE) {
        if (vector && i + PIECE <= end) {
            piece(Number<PIECE>(), i);
        } else {
            for (i64 j = i; j < end && j < i + PIECE; ++j) piece(Number<1>(), j);
        }
    }
}
