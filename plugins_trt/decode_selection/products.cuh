// The products of a warpgroup that block selection takes, of compute capability 9.0: both sides from shared memory.
#pragma once
#include "decode_attention/warpgroups.cuh"

// d[64 x 128] or d[64 x 64] = a[64 x 16] times as many rows of 16, both described, and d += ...: each warp has 16 rows of d.
#define FOUR(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define GROUP_MMA(function, type, name, adds)                                                                              \
    __device__ __forceinline__ void function(type, float (&d)[16][4], u64 a, u64 b) {                                      \
        asm volatile(                                                                                                      \
            "wgmma.mma_async.sync.aligned.m64n128k16.f32." name "." name " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,"    \
            "%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39," \
            "%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, %64, %65, " \
            adds ", 1, 1, 0, 0;"                                                                                           \
            : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7), FOUR(8), FOUR(9), FOUR(10),          \
              FOUR(11), FOUR(12), FOUR(13), FOUR(14), FOUR(15)                                                             \
            : "l"(a), "l"(b));                                                                                             \
    }
GROUP_MMA(group_mma_first, F16, "f16", "0")
GROUP_MMA(group_mma_first, BF16, "bf16", "0")
GROUP_MMA(group_mma, F16, "f16", "1")
GROUP_MMA(group_mma, BF16, "bf16", "1")
#undef GROUP_MMA
#define FOUR_TOKENS_MMA(function, type, name, adds)                                                                        \
    __device__ __forceinline__ void function(type, float (&d)[8][4], u64 a, u64 b) {                                       \
        asm volatile(                                                                                                      \
            "wgmma.mma_async.sync.aligned.m64n64k16.f32." name "." name " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13," \
            "%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, " adds ", 1, 1, 0, 0;"    \
            : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7)                                       \
            : "l"(a), "l"(b));                                                                                             \
    }
FOUR_TOKENS_MMA(group_mma_first, F16, "f16", "0")
FOUR_TOKENS_MMA(group_mma_first, BF16, "bf16", "0")
FOUR_TOKENS_MMA(group_mma, F16, "f16", "1")
FOUR_TOKENS_MMA(group_mma, BF16, "bf16", "1")
#undef FOUR_TOKENS_MMA
#undef FOUR

// Waits for all products, of which `d` is the last. (It is named so that the compiler reads it behind this.)
template <int kTiles>
__device__ __forceinline__ void wait_for_product(float (&d)[kTiles][4]) {
    warpgroup_wait<0>();
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(d[n][i])::"memory");
}
