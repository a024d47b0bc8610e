// Products of a warpgroup's four warps with a page of keys or values, of compute capability 9.0: 64 rows from registers.
#pragma once
#include "packed/warpgroup.cuh"

// Byte offset of 16-byte piece `piece` of row `row` in a page of 64 rows: columns of 64 elements, in the 128-byte swizzle.
__device__ __forceinline__ u32 column_piece(int row, int piece) {
    return (u32)(piece / 8 * (kPage * 128) + row * 128 + ((piece ^ row) & 7) * 16);
}

// What was copied to shared memory is seen by the tensor cores, of this thread's copies.
__device__ __forceinline__ void show_to_warpgroups() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// d[64 x 64] = a[64 x 16] b[64 x 16]^T, and d += a[64 x 16] b[16 x 64], whose rows are 16 keys of a column: each warp has 16
// rows of a and d.
#define FOUR(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define WARPGROUP_MMA(function, type, name, adds, transposes)                                                              \
    __device__ __forceinline__ void function(type, float (&d)[8][4], const u32 (&a)[4], u64 b) {                           \
        asm volatile(                                                                                                      \
            "wgmma.mma_async.sync.aligned.m64n64k16.f32." name "." name " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13," \
            "%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, " adds      \
            ", 1, 1, " transposes ";"                                                                                      \
            : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7)                                       \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                         \
    }
WARPGROUP_MMA(warpgroup_scores_first, F16, "f16", "0", "0")
WARPGROUP_MMA(warpgroup_scores_first, BF16, "bf16", "0", "0")
WARPGROUP_MMA(warpgroup_add_values, F16, "f16", "1", "1")
WARPGROUP_MMA(warpgroup_add_values, BF16, "bf16", "1", "1")
#undef WARPGROUP_MMA
#undef FOUR
