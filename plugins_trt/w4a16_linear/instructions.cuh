// Instructions of their own for the 4-bit products; apart from the arithmetic, so that the latter can be compiled for a CPU.
#pragma once
#include "common.cuh"

// (word & mask) | bits, in one instruction: left to itself, the compiler makes two of it where both are constants.
__device__ __forceinline__ u32 masked_or(u32 word, u32 mask, u32 bits) {
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "r"(mask), "r"(bits));
    return result;
}

__device__ __forceinline__ float bits_as_float(u32 bits) { return __uint_as_float(bits); }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define WARPGROUPS 1
#endif

#if __CUDA_ARCH__ >= 900
#define CLUSTERS 1
// All threads of a cluster come here; what they wrote to shared memory before is seen by all of them afterwards.
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// A float of another thread block's shared memory, at an address of this one's.
__device__ __forceinline__ float load_of_cluster(u32 shared, int rank) {
    u32 remote;
    float value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(remote) : "memory");
    return value;
}
#endif
