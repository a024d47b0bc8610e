// Third pass of block selection: the best blocks of every (token, KV head), as a bitmap.
//
// The threshold is found by halving the range of the scores: they are not negative, so their bits order as they do.
// Nothing is sorted.
#include "chunk_selection/keys.cuh"

constexpr int kChooseThreads = 128;
constexpr int kAllTies = 0x7fffffff;

// Sum of `value` over the block. `scratch`: two rows of a word a warp, used in turn.
__device__ __forceinline__ int block_sum(int value, int* scratch, int& turn) {
    value = __reduce_add_sync(kFull, value);
    int* row = scratch + turn * (kChooseThreads / 32);
    turn ^= 1;
    if ((threadIdx.x & 31) == 0) row[threadIdx.x >> 5] = value;
    __syncthreads();
    int sum = 0;
#pragma unroll
    for (int i = 0; i < kChooseThreads / 32; ++i) sum += row[i];
    return sum;
}

// The smallest `value` of the block.
__device__ __forceinline__ u32 block_min(u32 value, int* scratch, int& turn) {
    value = __reduce_min_sync(kFull, value);
    int* row = scratch + turn * (kChooseThreads / 32);
    turn ^= 1;
    if ((threadIdx.x & 31) == 0) row[threadIdx.x >> 5] = (int)value;
    __syncthreads();
    u32 least = 0xffffffffu;
#pragma unroll
    for (int i = 0; i < kChooseThreads / 32; ++i) least = min(least, (u32)row[i]);
    return least;
}

// For tables of up to 128 kEach pages.
template <int kEach>
__device__ __forceinline__ void choose(const SelectionArguments& args) {
    __shared__ int scratch[2 * kChooseThreads / 32];
    __shared__ int ties[kEach * kChooseThreads / 32];
    const int thread = (int)threadIdx.x, warp = thread >> 5, lane = thread & 31;
    const int token = (int)blockIdx.x, head = (int)blockIdx.y;
    u32* words = args.chosen + ((i64)head * args.batch.tokens + token) * args.words;

    const bool padding = token >= args.batch.sequence_starts[args.batch.sequences];
    const int position = padding ? 0 : args.batch.positions[token];
    if (padding || !args.chooses(position)) {
        // Padding and dense tokens choose nothing, short contexts everything.
        const bool all = !padding && position + 1 >= args.dense_below;
        const int own = position / kPage;
        for (int w = thread; w < args.words; w += kChooseThreads) {
            u32 bits = w < own / 32 ? 0xffffffffu : w == own / 32 ? 0xffffffffu >> (31 - own % 32) : 0u;
            words[w] = all ? bits : 0u;
        }
        return;
    }

    const int own = position / kPage;
    const int begin = args.init_blocks, end = args.candidates_end(position);
    const int wanted = args.total - args.init_blocks - (own + 1 - max_int(end, begin));
    const float* row = args.scores + ((i64)head * args.batch.tokens + token) * args.stride;
    // One more than the score's bits, and 0 for what is not compared.
    u32 key[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        int block = i * kChooseThreads + thread;
        key[i] = block >= begin && block < end ? __float_as_uint(row[block]) + 1u : 0u;
    }

    int turn = 0;
    u32 least = 0xffffffffu;  // chosen: keys of at least this, but of those equal to it the first `tied` only
    int tied = kAllTies;
    if (wanted > 0) {
        u32 smallest = 0xffffffffu, largest = 0;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            smallest = min(smallest, key[i] - 1u);  // what is not compared wraps around
            largest = max(largest, key[i]);
        }
        smallest = block_min(smallest, scratch, turn);
        largest = ~block_min(~largest, scratch, turn);
        // At least `wanted` keys are not below `least`, fewer are not below `above`.
        least = smallest + 1u;
        u32 above = largest + 1u;
        bool exact = false;
#pragma unroll 1
        while (!exact && above - least > 1) {
            const u32 middle = least + (above - least) / 2;
            int count = 0;
#pragma unroll
            for (int i = 0; i < kEach; ++i) count += key[i] >= middle;
            count = block_sum(count, scratch, turn);
            if (count < wanted) {
                above = middle;
            } else {
                least = middle;
                exact = count == wanted;
            }
        }
        if (!exact) {
            int count = 0;
#pragma unroll
            for (int i = 0; i < kEach; ++i) count += key[i] > least;
            tied = wanted - block_sum(count, scratch, turn);
        }
    }
    if (tied != kAllTies) {  // ties go to the smaller index
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            u32 equal = __ballot_sync(kFull, key[i] == least);
            if (lane == 0) ties[i * (kChooseThreads / 32) + warp] = __popc(equal);
        }
        __syncthreads();
        if (thread == 0) {
            int before = 0;
            for (int i = 0; i < kEach * kChooseThreads / 32; ++i) {
                int count = ties[i];
                ties[i] = before;
                before += count;
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int block = i * kChooseThreads + thread, w = i * (kChooseThreads / 32) + warp;
        bool forced = block <= own && (block < begin || block >= end);
        u32 bits = __ballot_sync(kFull, forced || key[i] > least || (tied == kAllTies && key[i] == least));
        if (tied != kAllTies) {
            u32 equal = __ballot_sync(kFull, key[i] == least);
            int room = tied - ties[w];
            bool taken = (equal >> lane & 1u) && __popc(equal & ((1u << lane) - 1u)) < room;
            bits |= __ballot_sync(kFull, taken);
        }
        if (lane == 0 && w < args.words) words[w] = bits;
    }
}

#define CHOOSE(each)                                                                                   \
    extern "C" __global__ void __launch_bounds__(kChooseThreads)                                       \
        chunk_choose_##each(const __grid_constant__ SelectionArguments args) {                         \
        choose<each>(args);                                                                            \
    }

CHOOSE(4)
CHOOSE(16)
CHOOSE(32)
CHOOSE(64)
