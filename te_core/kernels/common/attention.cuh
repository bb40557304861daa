// Which keys a query sees (te_core/attention.py states it), for the small kernels around cuDNN's attention.
#pragma once
#include "common/numeric.cuh"

// Where sequences begin and end. Without running sums all of them have the longest lengths.
struct Sequences {
    const int *cu_q, *cu_kv;              // [batch + 1], or null
    const int *cu_q_padded, *cu_kv_padded;  // where they begin in packed memory, if not at cu_q, cu_kv
    int batch, longest_q, longest_kv;
};

struct Lengths {
    int q, kv;
};

// An empty side empties the other: cuDNN before 9.25 computes NaN of queries without keys.
__device__ __forceinline__ Lengths lengths_of(const Sequences& s, int b) {
    if (b >= s.batch) return {0, 0};
    const int q = s.cu_q ? min(s.cu_q[b + 1] - s.cu_q[b], s.longest_q) : s.longest_q;
    const int kv = s.cu_kv ? min(s.cu_kv[b + 1] - s.cu_kv[b], s.longest_kv) : s.longest_kv;
    return q > 0 && kv > 0 ? Lengths{q, kv} : Lengths{0, 0};
}

// left, right: -1 is no bound.
struct Band {
    int left, right, bottom_right;
};
__device__ __forceinline__ int shift_of(const Band& band, const Lengths& n) {
    return band.bottom_right ? n.kv - n.q : 0;
}
__device__ __forceinline__ bool sees(const Band& band, int shift, int i, int j) {
    return (band.left < 0 || j >= i + shift - band.left) && (band.right < 0 || j <= i + shift + band.right);
}
// Whether query i sees any key, and whether any query sees key j.
__device__ __forceinline__ bool sees_any(const Band& band, const Lengths& n, int i) {
    const int shift = shift_of(band, n);
    const int first = band.left < 0 ? 0 : max(0, i + shift - band.left);
    const int last = band.right < 0 ? n.kv - 1 : min(n.kv - 1, i + shift + band.right);
    return i < n.q && first <= last;
}
__device__ __forceinline__ bool seen_by_any(const Band& band, const Lengths& n, int j) {
    const int shift = shift_of(band, n);
    const int first = band.right < 0 ? 0 : max(0, j - shift - band.right);
    const int last = band.left < 0 ? n.q - 1 : min(n.q - 1, j - shift + band.left);
    return j < n.kv && first <= last;
}

// The sequence of a row, and its place there. Packed rows between sequences come out behind one's end.
struct Place {
    int b, i;
};
__device__ __forceinline__ Place place_of(i64 row, bool packed, const int* starts, int batch, int longest) {
    if (!packed) return {int(row / longest), int(row % longest)};
    int low = 0, high = batch;  // the last sequence that begins at or before the row
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (starts[middle] <= row) low = middle; else high = middle;
    }
    return row < starts[low] ? Place{batch, 0} : Place{low, int(row - starts[low])};
}
