// A launch whose last block goes on with what all blocks have written.
#pragma once
#include "common/numeric.cuh"

// Whether all other blocks have come here: what they wrote before can then be read by __ldcg. All threads of a block
// come. `arrived` is 0 before the launch and after it.
__device__ __forceinline__ bool last_block(int* arrived) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        const int blocks = gridDim.x * gridDim.y;
        last = atomicAdd(arrived, 1) == blocks - 1;
        if (last) *arrived = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}
