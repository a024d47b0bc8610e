// Products of a warpgroup's four warps, of compute capability 9.0: 64 outputs from registers, x from shared memory.
#pragma once
#include "common.cuh"

__device__ __forceinline__ void warpgroup_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void warpgroup_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// 64 inputs of eight rows and more, K-major, in the 128-byte swizzle, whose eight rows take 1024 bytes. The next 16 inputs
// are at the description + 2.
__device__ __forceinline__ u64 rows_described(u32 shared) {
    return (u64)(shared >> 4 & 0x3fff) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}

// d[64 x 8 kColumns] += a[64 x 16] b[16 x 8 kColumns]: each warp has 16 rows of a and d, b is described. `_first`: d is not
// added to.
#define FOUR(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define WARPGROUP_MMA(type, name)                                                                                          \
    __device__ __forceinline__ void warpgroup_mma(type, float (&d)[8][4], const u32 (&a)[4], u64 b) {                      \
        asm volatile(                                                                                                      \
            "wgmma.mma_async.sync.aligned.m64n64k16.f32." name "." name " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13," \
            "%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, 1, 1, 1, 0;" \
            : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7)                                       \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                         \
    }                                                                                                                      \
    __device__ __forceinline__ void warpgroup_mma(type, float (&d)[4][4], const u32 (&a)[4], u64 b) {                      \
        asm volatile(                                                                                                      \
            "wgmma.mma_async.sync.aligned.m64n32k16.f32." name "." name " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13," \
            "%14,%15}, {%16,%17,%18,%19}, %20, 1, 1, 1, 0;"                                                                \
            : FOUR(0), FOUR(1), FOUR(2), FOUR(3)                                                                           \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                         \
    }                                                                                                                      \
    __device__ __forceinline__ void warpgroup_mma(type, float (&d)[2][4], const u32 (&a)[4], u64 b) {                      \
        asm volatile(                                                                                                      \
            "wgmma.mma_async.sync.aligned.m64n16k16.f32." name "." name " {%0,%1,%2,%3,%4,%5,%6,%7}, "                     \
            "{%8,%9,%10,%11}, %12, 1, 1, 1, 0;"                                                                            \
            : FOUR(0), FOUR(1)                                                                                             \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                         \
    }                                                                                                                      \
    __device__ __forceinline__ void warpgroup_mma_first(type, float (&d)[2][4], const u32 (&a)[4], u64 b) {                \
        asm volatile(                                                                                                      \
            "wgmma.mma_async.sync.aligned.m64n16k16.f32." name "." name " {%0,%1,%2,%3,%4,%5,%6,%7}, "                     \
            "{%8,%9,%10,%11}, %12, 0, 1, 1, 0;"                                                                            \
            : FOUR(0), FOUR(1)                                                                                             \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                         \
    }
WARPGROUP_MMA(F16, "f16")
WARPGROUP_MMA(BF16, "bf16")
#undef WARPGROUP_MMA
#undef FOUR
