// The product of compressed keys and the queries of a chunk, for both passes of block selection.
//
// A block of eight warps takes 16 neighbouring tokens and one KV head; a warp holds the queries of two of them in
// registers and walks the compressed keys, 64 at a time, which the block shares. The rows of an MMA tile are keys and
// its columns heads, so that the sum over heads is a sum over a quad of threads.
#pragma once

#include "chunk_attention/tile.cuh"

constexpr int kTokens = 16;     // of a tile
constexpr int kThreads = 256;   // eight warps of two tokens
constexpr int kStageKeys = 64;  // compressed keys of a stage
constexpr int kStages = 4;
// Thread blocks of a multiprocessor. Where it has 100 KiB of shared memory, only one fits.
#if __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
constexpr int kBlocks = 1;
#else
constexpr int kBlocks = 2;
#endif
// MMA tiles of a stage that are interleaved: as many as the registers of two blocks hold.
#if __CUDA_ARCH__ >= 900
constexpr int kUnroll = 4;
#else
constexpr int kUnroll = 1;
#endif

// Queries of a warp: fragments B of its two tokens, kTiles (1 for up to 8 heads, else 2) eight heads each.
template <int kDim, int kTiles>
struct Queries {
    u32 b[kDim / 16][2 * kTiles][2];

    // Through shared memory (the stages, before they hold keys). Heads past the group and tokens past the tile
    // are zeros.
    __device__ __forceinline__ void load(unsigned char* memory, const u16* q, i64 token_stride, const Tile& tile,
                                         int head, int group) {
        constexpr int kPieces = kDim / 8, kHeads = 8 * kTiles, kRows = kTokens * kHeads;
        static_assert(kRows * kDim <= kStages * kStageKeys * kDim, "the queries fit the stages");
        const u32 shared = shared_address(memory);
        const int thread = (int)threadIdx.x, piece = thread % kPieces;
#pragma unroll
        for (int i = 0; i < kRows * kPieces / kThreads; ++i) {
            int row = thread / kPieces + i * (kThreads / kPieces);
            int token = row / kHeads, h = row % kHeads;
            bool inside = token < tile.count && h < group;
            const u16* source = q + (i64)(tile.first + (inside ? token : 0)) * token_stride +
                                (head * group + (inside ? h : 0)) * kDim + piece * 8;
            copy_async(shared + swizzled<kDim>(row, piece), source, inside);
        }
        copy_commit();
        copy_wait<0>();
        __syncthreads();
#pragma unroll
        for (int step = 0; step < kDim / 16; ++step)
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                u32 pair[4];
                load_columns<kDim>(pair, shared, (thread >> 5) * 2 * kHeads + n * 16, step);
                b[step][n * 2][0] = pair[0];
                b[step][n * 2][1] = pair[1];
                b[step][n * 2 + 1][0] = pair[2];
                b[step][n * 2 + 1][1] = pair[3];
            }
        __syncthreads();
    }
};

// Stages of compressed keys: kSlots keys of each of 64 / kSlots pages. Row r of a stage is slot r % kSlots of its
// page r / kSlots; MMA tile t takes, for four slots, slot t of 16 pages, else 16 pages' only slot.
template <int kDim, int kSlots>
struct Stage {
    static constexpr int kPages = kStageKeys / kSlots;
    static constexpr u32 kBytes = kStageKeys * kDim * 2;

    static __device__ __forceinline__ u32 offset(int row, int piece) {
        return (u32)(row * (kDim * 2) + ((piece ^ ((row / kSlots) & 7)) << 4));
    }

    // `pages`: where the keys of the stage's pages begin, in shared memory; the first `count` exist.
    static __device__ __forceinline__ void copy(u32 stage, const u64* pages, int count) {
        constexpr int kPieces = kDim / 8, kStep = kThreads / kPieces;
        const int piece = (int)threadIdx.x % kPieces, first = (int)threadIdx.x / kPieces;
        const int inside = (first % kSlots * kDim + piece * 8) * 2;
#pragma unroll
        for (int i = 0; i < kStageKeys / kStep; ++i) {
            const int page = (first + i * kStep) / kSlots;
            const bool exists = page < count;
            copy_async(stage + offset(first + i * kStep, piece),
                       reinterpret_cast<const unsigned char*>(pages[exists ? page : 0]) + inside, exists);
        }
    }

    // Fills `pages` with the `count` pages that follow one another in `table`.
    static __device__ __forceinline__ void find(u64* pages, const Pool& pool, int head, const int* table, int count) {
        for (int i = (int)threadIdx.x; i < count; i += kThreads)
            pages[i] = reinterpret_cast<u64>(pool.row<kDim>(table[i], head, 0));
    }

    // scores of tile `tile`: 16 keys x (2 tokens x 8 kTiles heads)
    template <typename E, int kTiles>
    static __device__ __forceinline__ void multiply(float (&s)[2 * kTiles][4], u32 stage, int tile,
                                                    const Queries<kDim, kTiles>& q) {
        const int lane = (int)(threadIdx.x & 31), index = lane & 15;
        const int row = kSlots == 4 ? index * 4 + tile : tile * 16 + index;
        // Rows begin at multiples of their size: a step changes the address by an exclusive or, as the pieces are
        // permuted, and needs no register of its own.
        const u32 first = stage + offset(row, lane >> 4);
#pragma unroll
        for (int step = 0; step < kDim / 16; ++step) {
            u32 a[4];
            load_matrices(a, first ^ (u32)(step << 5));
#pragma unroll
            for (int n = 0; n < 2 * kTiles; ++n)
                if (step == 0)
                    E::mma_first(s[n], a[0], a[1], a[2], a[3], q.b[step][n][0], q.b[step][n][1]);
                else
                    E::mma(s[n], a[0], a[1], a[2], a[3], q.b[step][n][0], q.b[step][n][1]);
        }
    }

    // Whether the query at `position` (at least 31) sees the key of slot `slot` of page `page`: its last token is
    // not after it.
    static __device__ __forceinline__ bool sees(int position, int page, int slot) {
        if (kSlots == 1) return page * kPage + 63 <= position;  // of pages from 1 on
        return (u32)(page * kPage + slot * 16 - 16) <= (u32)(position - 31);  // not before key 0 either
    }
};

// The stages of a block's ring, in the order they are used. Every thread copies a part of each stage; a warp waits
// for a stage to be whole, not for the other warps: a stage is filled anew when all warps have left it, which two
// stages later they mostly have.
struct Ring {
    static constexpr int kAhead = 2;  // stages between the one in use and the one being filled
    u32 whole;                        // shared address of a barrier a stage: its parts have arrived
    u32 empty;                        // likewise: the warps have left it

    __device__ __forceinline__ void start(u64* barriers) {  // [2 kStages]
        whole = shared_address(barriers);
        empty = whole + kStages * 8;
        if (threadIdx.x == 0)
            for (int stage = 0; stage < kStages; ++stage) {
                barrier_start(whole + stage * 8, kThreads);
                barrier_start(empty + stage * 8, kThreads);
            }
        __syncthreads();
    }
    // Before the parts of stage number `index` are copied.
    __device__ __forceinline__ void wait_empty(int index) const {
        if (index >= kStages) barrier_wait(empty + index % kStages * 8, (index / kStages - 1) & 1);
    }
    // After this thread's part was asked for.
    __device__ __forceinline__ void fill(int index) const { barrier_arrive_copied(whole + index % kStages * 8); }
    __device__ __forceinline__ void wait_whole(int index) const {
        barrier_wait(whole + index % kStages * 8, index / kStages & 1);
    }
    // After the warp's last use of the stage.
    __device__ __forceinline__ void leave(int index) const {
        __syncwarp();
        barrier_arrive(empty + index % kStages * 8);
    }
};

struct SelectionArguments {
    Batch batch;
    Pool fine;
    Pool coarse;
    const u16* q;    // [T, H, kDim]
    float* sums;     // [splits, T, H, 2]: maximum and sum of the softmax over a share of the keys, base 2
    float* scores;   // [kv_heads, T, stride]: of blocks
    u32* chosen;     // [kv_heads, T, words]
    i64 q_stride;    // elements from a token to the next
    i32 heads;
    i32 kv_heads;
    i32 stride;
    i32 words;
    i32 splits;       // of the first pass
    i32 split_pages;  // of the second pass
    i32 init_blocks;
    i32 local;        // blocks that end with the own one and always win
    i32 total;        // blocks chosen in all
    i32 dense_below;
    float scale;      // of the scores, times log2 e
    i32 unused;

    // Whether a query at `position` must choose at all: it is sparse and sees more blocks than it may have.
    __device__ __forceinline__ bool chooses(int position) const {
        return position + 1 >= dense_below && position / kPage + 1 > total;
    }
    // The end of the blocks that are compared: the first local block.
    __device__ __forceinline__ int candidates_end(int position) const {
        return max_int(0, position / kPage + 1 - local);
    }
};
