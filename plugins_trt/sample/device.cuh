// What the kernel asks of the device beside common.cuh; apart from the rest, so that the latter can be compiled for a CPU.
#pragma once
#include "common.cuh"

constexpr int kThreads = 256;
#if __CUDA_ARCH__ == 900
constexpr int kResident = 3;  // thread blocks of a multiprocessor, which launch.py counts with
#else
constexpr int kResident = 2;
#endif

// Loads and stores that thread blocks exchange numbers by, past the caches of their multiprocessors.

__device__ __forceinline__ u32 fresh(const u32* pointer) {
    u32 value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
    return value;
}
__device__ __forceinline__ u64 fresh(const u64* pointer) {
    u64 value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(pointer) : "memory");
    return value;
}
__device__ __forceinline__ float fresh(const float* pointer) {
    return __uint_as_float(fresh(reinterpret_cast<const u32*>(pointer)));
}

// What was written before `store_in_order` of a value is seen after `load_in_order` has seen the value.
__device__ __forceinline__ u32 load_in_order(const u32* pointer) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
    return value;
}
__device__ __forceinline__ void store_in_order(u32* pointer, u32 value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}
