// Products of a warpgroup with a page of keys or values, of compute capability 9.0: of 64 rows, queries in shared memory or
// weights in registers.
#pragma once
#include "packed/warpgroup.cuh"

// Byte offset of 16-byte piece `piece` of row `row` in a page of 64 rows: columns of 64 elements, in the 128-byte swizzle.
__device__ __forceinline__ u32 column_piece(int row, int piece) {
    return (u32)(piece / 8 * (kPage * 128) + row * 128 + ((piece ^ row) & 7) * 16);
}

// What was copied to shared memory is seen by the tensor cores, of this thread's copies.
__device__ __forceinline__ void show_to_warpgroups() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void store_shared(u32 shared, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// d[64 x 64] = a[64 x 16] b[64 x 16]^T (+ d) of rows in shared memory, and d += a[64 x 16] b[16 x 64], whose a lies in registers
// and whose b's rows are 16 keys of a column: each warp has 16 rows of a and d.
#define FOUR(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define SUMS FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7)
#define WARPGROUP_SCORES(function, type, name, adds)                                                                       \
    __device__ __forceinline__ void function(type, float (&d)[8][4], u64 a, u64 b) {                                       \
        asm volatile(                                                                                                      \
            "wgmma.mma_async.sync.aligned.m64n64k16.f32." name "." name " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13," \
            "%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, " adds ", 1, 1, 0, 0;"    \
            : SUMS                                                                                                         \
            : "l"(a), "l"(b));                                                                                             \
    }
#define WARPGROUP_VALUES(type, name)                                                                                       \
    __device__ __forceinline__ void warpgroup_add_values(type, float (&d)[8][4], const u32 (&a)[4], u64 b) {               \
        asm volatile(                                                                                                      \
            "wgmma.mma_async.sync.aligned.m64n64k16.f32." name "." name " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13," \
            "%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, 1, 1, 1, "  \
            "1;"                                                                                                           \
            : SUMS                                                                                                         \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                         \
    }
WARPGROUP_SCORES(warpgroup_scores_first, F16, "f16", "0")
WARPGROUP_SCORES(warpgroup_scores_first, BF16, "bf16", "0")
WARPGROUP_SCORES(warpgroup_scores, F16, "f16", "1")
WARPGROUP_SCORES(warpgroup_scores, BF16, "bf16", "1")
WARPGROUP_VALUES(F16, "f16")
WARPGROUP_VALUES(BF16, "bf16")
#undef WARPGROUP_SCORES
#undef WARPGROUP_VALUES
#undef SUMS
#undef FOUR
