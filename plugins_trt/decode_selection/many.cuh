// What the launches of a step of many tokens share: their heads and keys in shared memory.
//
// The heads of a tile of tokens (`scores`) or the keys of a part (`lse`) lie in shared memory once for all warps of a CTA;
// the other side of the product is in a warp's registers. Rows in shared memory are read as fragments are filled from
// memory: 16-byte piece 4k + t for two steps of 16 elements. Pieces of odd rows are exchanged in fours, so that the eight
// lanes that are served at once find two rows in different banks.
#pragma once
#include "decode_selection/nodes.cuh"

constexpr int kManyWarps = 8;
constexpr int kManyThreads = kManyWarps * 32;
constexpr int kKeysOfCta = kPagesOfCta * kFineSlots;

// ---------------------------------------------------------------- rows in shared memory

template <int kDim>
__device__ __forceinline__ u32 place_of(int row, int piece) {
    return (u32)(row * (kDim * 2) + ((piece ^ ((row & 1) << 2)) << 4));
}

__device__ __forceinline__ uint4 shared_piece(u32 address) {
    uint4 piece;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(piece.x), "=r"(piece.y), "=r"(piece.z), "=r"(piece.w)
                 : "r"(address)
                 : "memory");
    return piece;
}
