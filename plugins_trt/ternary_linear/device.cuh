// What the kernels ask of the device beside common.cuh; apart from the arithmetic, so that the latter can be compiled for
// a CPU.
#pragma once
#include "common.cuh"

// 16 bytes from global to shared memory, past L1, or nothing when `valid` is false; without a branch.
__device__ __forceinline__ void copy_where(bool valid, u32 shared, const void* global) {
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %2, 0; @p cp.async.cg.shared.global.L2::128B [%0], [%1], 16; }" ::"r"(shared),
        "l"(global), "r"((u32)valid)
        : "memory");
}

// The largest of a warp.
__device__ __forceinline__ u32 warp_largest(u32 value) { return __reduce_max_sync(kFull, value); }

// d[16x8] += a[16x32] b[32x8] of signed bytes
__device__ __forceinline__ void mma_bytes(i32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// d[16x8] += a[16x16] b[16x8] of signed bytes
__device__ __forceinline__ void mma_bytes(i32 (&d)[4], u32 a0, u32 a1, u32 b0) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(b0));
}

// Four of the eight bytes of a and b, by the four digits of `which`, the lowest first.
__device__ __forceinline__ u32 bytes_of(u32 a, u32 b, u32 which) { return __byte_perm(a, b, which); }

// Waits for all thread blocks of the cluster, and shows each what the others wrote before.
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// What lies at a place of the shared memory of a thread block of the cluster.
__device__ __forceinline__ float load_of_cluster(u32 shared, int rank) {
    float value = 0.0f;
#if __CUDA_ARCH__ >= 900
    u32 remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(remote) : "memory");
#endif
    return value;
}
