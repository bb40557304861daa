// Philox4x32-10, the counter-based generator: four random words from a 128-bit counter and a 64-bit key, with no
// state, so that a mask drawn in forward is drawn again in backward. Salmon et al., "Parallel random numbers: as easy
// as 1, 2, 3" (2011). te_core.ops.elementwise says how counter and key are made; the CPU backend does the same.
#pragma once
#include "common/numeric.cuh"

struct Philox {
    u32 key0, key1;       // the seed
    u32 offset0, offset1;  // the second half of the counter: the offset, its high word XORed with the site

    // rng = (seed, offset); null where nothing is drawn.
    __device__ __forceinline__ Philox(const i64* rng, int site) {
        if (rng == nullptr) {
            key0 = key1 = offset0 = offset1 = 0;
            return;
        }
        const u64 seed = u64(rng[0]), offset = u64(rng[1]);
        key0 = u32(seed), key1 = u32(seed >> 32);
        offset0 = u32(offset), offset1 = u32(offset >> 32) ^ u32(site);
    }

    // The words of elements 4 * group .. 4 * group + 3.
    __device__ __forceinline__ void draw(u64 group, u32 (&word)[4]) const {
        u32 c0 = u32(group), c1 = u32(group >> 32), c2 = offset0, c3 = offset1, k0 = key0, k1 = key1;
#pragma unroll
        for (int round = 0; round < 10; ++round) {
            const u64 p0 = u64(0xD2511F53u) * c0, p1 = u64(0xCD9E8D57u) * c2;
            c0 = u32(p1 >> 32) ^ c1 ^ k0, c1 = u32(p1);
            c2 = u32(p0 >> 32) ^ c3 ^ k1, c3 = u32(p0);
            k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
        }
        word[0] = c0, word[1] = c1, word[2] = c2, word[3] = c3;
    }
};
