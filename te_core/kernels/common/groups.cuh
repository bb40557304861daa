// Several matrices in one launch, found by a table that is a kernel parameter: nothing is copied to the device
// before, and a captured graph holds its own.
//
// Table:  group[CAPACITY] whose `first` is the number of a group's first block, in ascending order, and `count`.
// A group without blocks has the same `first` as the next one.
#pragma once
#include "common/numeric.cuh"

// The last group whose first block is not after this one.
template <class Table> __device__ __forceinline__ int group_of(const Table& table, u32 block) {
    int low = 0, high = table.count - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (table.group[middle].first <= block) low = middle;
        else high = middle - 1;
    }
    return low;
}

// Groups of rows whose sizes are on the device, each cut into tiles of 128 rows: the group that a tile is in.
struct GroupTile {
    int e, start, rows;  // the group (-1: there is no such tile), its first row and how many it has
    int first;           // tiles of the groups before
};

// By every warp for itself. Offsets may have any values: they are cut to ascending ones within `total`.
__device__ __forceinline__ GroupTile group_tile(const int* offsets, int groups, int total, int number) {
    const int lane = threadIdx.x & 31;
    int reached = min(max(offsets[0], 0), total), before = 0;
    for (int e0 = 0; e0 < groups; e0 += 32) {
        const int e = e0 + lane;
        int end = max(e < groups ? min(offsets[e + 1], total) : 0, reached);
#pragma unroll
        for (int o = 1; o < 32; o <<= 1) {
            const int x = __shfl_up_sync(~0u, end, o);
            if (lane >= o) end = max(end, x);
        }
        const int left = __shfl_up_sync(~0u, end, 1), start = lane ? left : reached;
        const int tiles = (end - start + 127) / 128;
        int sum = tiles;
#pragma unroll
        for (int o = 1; o < 32; o <<= 1) {
            const int x = __shfl_up_sync(~0u, sum, o);
            if (lane >= o) sum += x;
        }
        const u32 behind = __ballot_sync(~0u, before + sum > number);
        if (behind) {
            const int at = __ffs(int(behind)) - 1;
            return {e0 + at, __shfl_sync(~0u, start, at), __shfl_sync(~0u, end - start, at),
                    __shfl_sync(~0u, before + sum - tiles, at)};
        }
        before += __shfl_sync(~0u, sum, 31);
        reached = __shfl_sync(~0u, end, 31);
    }
    return {-1, 0, 0, 0};
}
