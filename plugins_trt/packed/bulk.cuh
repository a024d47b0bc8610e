// Bulk copies from global to shared memory and the barriers that they complete on, of compute capability 9.0.
#pragma once
#include "common.cuh"

// How an array lies, as the driver encodes it (overlap.py): copies of boxes of it need no addresses, and what lies outside
// of it arrives as zeros.
struct alignas(64) TensorMap {
    u64 words[16];
};

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// A barrier in shared memory opens when `count` arrivals and all bytes that it expects have come; waits name the parity
// of the opening that they wait for.
__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barriers_are_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Arrives, and has the barrier wait for so many bytes too.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Arrives when `valid`, without a branch: between warpgroup products one would make the compiler wait for each of them.
__device__ __forceinline__ void barrier_arrive_where(bool valid, u32 barrier) {
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %1, 0; @p mbarrier.arrive.shared::cta.b64 _, [%0]; }" ::"r"(barrier), "r"((u32)valid)
        : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra OPEN;\nbra AGAIN;\n"
        "OPEN:\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Copies the box of an array that begins at (x, y): the map has its size and how it is to lie.
__device__ __forceinline__ void copy_box(u32 shared, const TensorMap& map, int x, int y, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(shared),
        "l"(&map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void copy_box(u32 shared, const TensorMap& map, int x, int y, int z, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
            shared),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
        : "memory");
}
