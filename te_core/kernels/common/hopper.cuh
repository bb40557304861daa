// Hopper's copy engine and barriers, and what a product's kernel writes around the tensor cores' instructions.
//
// Places in shared memory are handed round between one thread that loads and the warps that multiply: `full` counts the
// bytes that arrive, `empty` the warps that have read, of both blocks of a cluster.
#pragma once
#include "common/numeric.cuh"

struct alignas(64) Map {  // CUtensorMap
    u8 bytes[128];
};

__device__ __forceinline__ u32 address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// ---- barriers and copies -----------------------------------------------------------------------------------

__device__ __forceinline__ void make_barrier(u64& barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(&barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void wait(u64& barrier, u32 parity) {
    u32 done;
    do {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done) : "r"(address(&barrier)), "r"(parity) : "memory");
    } while (!done);
}

// At the barrier in the same place of a block of the cluster.
__device__ __forceinline__ void arrive(u64& barrier, u32 rank) {
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(address(&barrier)), "r"(rank) : "memory");
}

__device__ __forceinline__ void expect(u64& barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 ::"r"(address(&barrier)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void load_tile(u8* to, const Map& map, int x, int y, u64& barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(address(to)), "l"(&map), "r"(x), "r"(y), "r"(address(&barrier)) : "memory");
}

__device__ __forceinline__ void load_for_both(u8* to, const Map& map, int x, int y, u64& barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(address(to)), "l"(&map), "r"(x), "r"(y), "r"(address(&barrier)), "h"((unsigned short)3)
                 : "memory");
}

__device__ __forceinline__ void load_floats(float* to, const float* from, u32 bytes, u64& barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(address(to)), "l"(from), "r"(bytes), "r"(address(&barrier)) : "memory");
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
#define KEEP4(t, i) "+f"(t[i]), "+f"(t[i + 1]), "+f"(t[i + 2]), "+f"(t[i + 3])
#define KEEP16(t, i) KEEP4(t, i), KEEP4(t, i + 4), KEEP4(t, i + 8), KEEP4(t, i + 12)

// Four lanes side by side exchange four words: lane i then has those of number i.
__device__ __forceinline__ void turn(u32 (&v)[4], int lane) {
    const bool odd = lane & 1, high = lane & 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 got = __shfl_xor_sync(~0u, high ? v[i] : v[i + 2], 2);
        (high ? v[i] : v[i + 2]) = got;
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 got = __shfl_xor_sync(~0u, odd ? v[i] : v[i + 1], 1);
        (odd ? v[i] : v[i + 1]) = got;
    }
}
