// Products of FP8 whose sums over 128 of K are added in float32: 64 rows of a, which come through registers, by NI
// columns of b. Tensor cores fill one of two sets of registers while the other is added to the sums.
//
// A_TYPE and B_TYPE are the instruction's names of the types.
#pragma once
#include "common/hopper.cuh"

constexpr int NI = 64, HELD = NI / 2;  // columns of one instruction; its registers in a thread

#define PART_STEP(a, b, adds)  \
    "wgmma.mma_async.sync.aligned.m64n64k32.f32." TEXT(A_TYPE) "." TEXT(B_TYPE)  \
    " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
    "%30,%31}, {" a "}, " b ", " adds ", 1, 1;\n"

// Rows of 128 bytes, eight of them swizzled together, as the copy engine leaves them.
__device__ __forceinline__ u64 descriptor(const u8* at) {
    return u64(1) << 62 | u64(1024 >> 4) << 32 | u64(1) << 16 | (address(at) & 0x3ffff) >> 4;
}

// t = 64 rows of a (each thread's own part) times NI rows of b over 128 of K: begins.
__device__ __forceinline__ void multiply(float (&t)[HELD], const u32 (&a)[16], u64 b) {
    asm volatile("{\n.reg .pred no, yes;\n.reg .b64 b1, b2, b3;\nsetp.ne.b32 no, 0, 0;\nsetp.eq.b32 yes, 0, 0;\n"
                 "add.s64 b1, %48, 2;\nadd.s64 b2, %48, 4;\nadd.s64 b3, %48, 6;\nwgmma.fence.sync.aligned;\n"
                 PART_STEP("%32,%33,%34,%35", "%48", "no") PART_STEP("%36,%37,%38,%39", "b1", "yes")
                 PART_STEP("%40,%41,%42,%43", "b2", "yes") PART_STEP("%44,%45,%46,%47", "b3", "yes")
                 "wgmma.commit_group.sync.aligned;\n}"
                 : KEEP16(t, 0), KEEP16(t, 16)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "r"(a[8]),
                   "r"(a[9]), "r"(a[10]), "r"(a[11]), "r"(a[12]), "r"(a[13]), "r"(a[14]), "r"(a[15]), "l"(b)
                 : "memory");
}

// Until all but the last PENDING of those are done, of which t is one.
template <int PENDING> __device__ __forceinline__ void finish(float (&t)[HELD]) {
    asm volatile("wgmma.wait_group.sync.aligned %32;" : KEEP16(t, 0), KEEP16(t, 16) : "n"(PENDING) : "memory");
}

// A warp's 16 rows of a, 128 of K.
__device__ __forceinline__ void fetch_rows(u32 (&a)[16], const u8* rows, int lane) {
    const int row = lane & 15, right = lane >> 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(a[4 * j]), "=r"(a[4 * j + 1]), "=r"(a[4 * j + 2]), "=r"(a[4 * j + 3])
                     : "r"(address(rows) + row * 128 + ((2 * j + right ^ row & 7) << 4)) : "memory");
    }
}
