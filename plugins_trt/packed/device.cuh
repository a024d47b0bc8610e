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

// Bytes of shared memory, at an address that the compiler does not compute anew for each.
__device__ __forceinline__ uint4 load_sixteen(u32 shared) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(shared) : "memory");
    return v;
}
__device__ __forceinline__ uint2 load_eight(u32 shared) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(shared) : "memory");
    return v;
}
__device__ __forceinline__ u32 load_four(u32 shared) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(shared) : "memory");
    return v;
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
// Four floats of another thread block's shared memory, at an address of this one's.
__device__ __forceinline__ void load_of_cluster(float (&value)[4], u32 shared, int rank) {
    u32 remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(value[0]), "=f"(value[1]), "=f"(value[2]), "=f"(value[3])
                 : "r"(remote)
                 : "memory");
}
// Thread blocks of a cluster, which is along y.
__device__ __forceinline__ int cluster_size() {
    int size;
    asm("mov.u32 %0, %%cluster_nctaid.y;" : "=r"(size));
    return size;
}
#else
__device__ __forceinline__ int cluster_size() { return 1; }
#endif
