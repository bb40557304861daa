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
