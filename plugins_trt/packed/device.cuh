// What products with packed weights ask of the device beside common.cuh; apart from the arithmetic, so that the latter can
// be compiled for a CPU.
#pragma once
#include "common.cuh"

// As `load_matrices`, but that other loads may be moved past it, though not past a wait or a barrier.
__device__ __forceinline__ void load_pieces(u32 (&r)[4], u32 shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared));
}

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
