// The choice of the best blocks of one token and KV head, by all threads of a CTA.
#pragma once
#include "decode_selection/select.cuh"

constexpr int kChooseThreads = 512;
constexpr int kChooseWarps = kChooseThreads / 32;
constexpr int kBinsOfThread = 4;
constexpr int kBins = kBinsOfThread * kChooseThreads;
constexpr int kFewKeys = 64;  // keys that are compared pair by pair
constexpr u32 kNone = 0xffffffffu;  // no rank
constexpr int kFewVectors = 1;   // 16-byte vectors of ranks a thread holds: up to 2048 blocks
constexpr int kManyVectors = 4;  // up to 8192

// What a block must reach to be among the best: `rank` and, among equals, an index of at most `block`.
struct Last {
    u32 rank;
    int block;
};

__device__ __forceinline__ int block_of(int i) {
    return (i / 4 * kChooseThreads + (int)threadIdx.x) * 4 + i % 4;
}

// The need-th best of the blocks whose ranks are not kNone, which are at least `need`: narrows the range of ranks to one
// bin of a histogram at a time, until few are left in it, which are then compared with each other. All threads of the CTA
// must call it. The ranks of the best mostly lie within a factor of 2^16 of the best one: that range is looked through
// first, in fine bins, whatever the worst one is.
template <int kRanks>
__device__ __forceinline__ Last find_last_winner(const u32 (&ranks)[kRanks], int need, int own) {
    __shared__ __align__(16) u32 bins[kBins];
    __shared__ u32 smallest[kChooseWarps], largest[kChooseWarps], sums[kChooseWarps];
    __shared__ u64 few[kFewKeys];  // keys, and blocks that are the larger the smaller their index
    __shared__ int found[3];       // bin, keys above it, keys in it; or bin -1 and all keys in the range
    __shared__ int listed;         // keys in `few`
    constexpr u32 kUsualRange = (16u << 23) - 1;  // 16 exponents
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    auto clear = [&] {
        reinterpret_cast<uint4*>(bins)[threadIdx.x] = uint4{0, 0, 0, 0};
        if (threadIdx.x == 0) listed = 0;
    };
    u32 low = kNone, high = 0;
#pragma unroll
    for (int i = 0; i < kRanks; ++i) {
        if (ranks[i] == kNone) continue;
        low = ranks[i] < low ? ranks[i] : low;
        high = ranks[i] > high ? ranks[i] : high;
    }
    low = __reduce_min_sync(kFull, low);
    high = __reduce_max_sync(kFull, high);
    if (lane == 0) smallest[warp] = low, largest[warp] = high;
    clear();
    __syncthreads();
    low = __reduce_min_sync(kFull, smallest[lane & (kChooseWarps - 1)]);
    high = __reduce_max_sync(kFull, largest[lane & (kChooseWarps - 1)]);
    u32 least = low;
    if (high - low > kUsualRange) low = high - kUsualRange;
    Last last = {kNone, own};
    bool by_block = false;  // of several that share the last rank, the smaller indices win
    int behind = own - block_of(0);  // blocks behind this thread's first one
    auto blocks_behind = [&](int i) { return (u32)(behind - (block_of(i) - block_of(0))); };
    auto key_of = [&](int i) {
        return !by_block ? ranks[i] : ranks[i] == last.rank ? blocks_behind(i) : kNone;
    };
#pragma unroll 1
    while (true) {
        asm volatile("" : "+r"(behind));  // or what is known of each block takes a register all the time
        int shift = 32 - __clz((int)(high - low));  // bits of the range
        shift = shift > 11 ? shift - 11 : 0;
        static_assert(kBins == 1 << 11, "as many bits as a bin's number has");
#pragma unroll
        for (int i = 0; i < kRanks; ++i) {
            u32 key = key_of(i);
            if (key != kNone && key >= low && key <= high) atomicAdd(&bins[(key - low) >> shift], 1u);
        }
        __syncthreads();
        // Thread t takes the t-th four bins from the top: those behind it hold larger keys.
        int first_bin = kBinsOfThread * (kChooseThreads - 1 - (int)threadIdx.x);
        uint4 four = *reinterpret_cast<const uint4*>(bins + first_bin);
        u32 mine = four.x + four.y + four.z + four.w, up_to = mine;
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
            u32 other = __shfl_up_sync(kFull, up_to, step);
            if (lane >= step) up_to += other;
        }
        if (lane == 31) sums[warp] = up_to;
        __syncthreads();
        up_to += __reduce_add_sync(kFull, lane < warp ? sums[lane & (kChooseWarps - 1)] : 0);
        u32 above = up_to - mine;
        if ((int)above < need && (int)up_to >= need) {
            int bin = first_bin + 3;
            u32 in_bin = four.w;
            if ((int)(above + in_bin) < need) above += in_bin, in_bin = four.z, --bin;
            if ((int)(above + in_bin) < need) above += in_bin, in_bin = four.y, --bin;
            if ((int)(above + in_bin) < need) above += in_bin, in_bin = four.x, --bin;
            found[0] = bin, found[1] = (int)above, found[2] = (int)in_bin;
        } else if (threadIdx.x == kChooseThreads - 1 && (int)up_to < need) {
            found[0] = -1, found[1] = (int)up_to;
        }
        __syncthreads();
        int bin = found[0], in_bin = found[2];
        need -= found[1];
        if (bin < 0) {  // it lies below the range
            high = low - 1, low = least;
        } else {
            low += (u32)bin << shift;
            high = low + ((1u << shift) - 1);
            if (in_bin == need) return by_block ? Last{last.rank, own - (int)low} : Last{low, own};
            if (in_bin <= kFewKeys) {
#pragma unroll
                for (int i = 0; i < kRanks; ++i) {
                    u32 key = key_of(i);
                    if (key != kNone && key >= low && key <= high)
                        few[atomicAdd(&listed, 1)] = (u64)key << 32 | blocks_behind(i);
                }
                __syncthreads();
                // Every warp looks for the one that need - 1 are better than.
                u64 first = lane < in_bin ? few[lane] : 0, second = lane + 32 < in_bin ? few[lane + 32] : 0;
                int better = 0, better_than_second = 0;
#pragma unroll 2
                for (int i = 0; i < in_bin; ++i) {
                    u64 other = few[i];
                    better += other > first, better_than_second += other > second;
                }
                bool is_first = lane < in_bin && better == need - 1;
                bool is_second = lane + 32 < in_bin && better_than_second == need - 1;
                u64 winner = is_first ? first : second;
                int of_lane = __ffs((int)__ballot_sync(kFull, is_first || is_second)) - 1;
                u32 key = __shfl_sync(kFull, (u32)(winner >> 32), of_lane);
                int block = own - (int)__shfl_sync(kFull, (u32)winner, of_lane);
                return by_block ? Last{last.rank, block} : Last{key, block};
            }
            if (shift == 0) {
                last.rank = low, by_block = true;
                low = least = 0, high = (u32)own;
            }
        }
        __syncthreads();  // what was found has been read
        clear();
        __syncthreads();
    }
}

// Writes the best `total` of the blocks 0 .. own (which are more than `total`) of one token and KV head, ascending.
// All kChooseThreads threads of the CTA must call it. Thread t holds blocks 4t .. 4t + 3, and those 2048 further.
template <int kVectors>
__device__ __forceinline__ void choose(
    const Batch& batch, const Select& args, int stored, int token, int kv_head, int own) {
    constexpr int kRanks = 4 * kVectors;
    __shared__ int winners[kChooseWarps];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    i64 row = (i64)token * args.kv_heads + kv_head;

    // The bits of a score order as the score does, since it is not negative. A block that is certain to win, or is
    // none, has no rank. (`scores` wrote the blocks of pages with stored tokens.) All loads are under way together.
    u32 ranks[kRanks];
    float first_slot[kVectors];
    const float* scores = args.scores + row * args.score_stride;
    const float* first_slots = args.first_slots + row * (args.score_stride / kPage);
    int scored = ceil_div(stored, kPage);
    // The fine keys that the query's own path completes, mostly none.
    const float2* of_nodes = reinterpret_cast<const float2*>(args.node_scores) + row * kNodeKeys;
    float2 first_node = batch.tree_masks != nullptr ? __ldcg(of_nodes) : float2{__int_as_float(-1), 0.0f};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        int b = block_of(4 * v);
        float4 four = {0.0f, 0.0f, 0.0f, 0.0f};
        if (b < scored) four = __ldcg(reinterpret_cast<const float4*>(scores + b));
        first_slot[v] = b % kPage == kPage - 4 && b + 4 < scored ? __ldcg(first_slots + (b + 4) / kPage) : 0.0f;
        ranks[4 * v] = __float_as_uint(four.x), ranks[4 * v + 1] = __float_as_uint(four.y);
        ranks[4 * v + 2] = __float_as_uint(four.z), ranks[4 * v + 3] = __float_as_uint(four.w);
    }
#pragma unroll
    for (int i = 0; i < kRanks; ++i) {
        int b = block_of(i);
        if (b >= scored) ranks[i] = 0;
        if (i % 4 == 3) {
            u32 behind = __float_as_uint(first_slot[i / 4]);
            ranks[i] = behind > ranks[i] ? behind : ranks[i];
        }
        if (b > own || b < args.init_blocks || b > own - args.local_blocks) ranks[i] = kNone;
    }
#pragma unroll 1
    for (int n = 0; n < kNodeKeys; ++n) {
        float2 node = n == 0 ? first_node : __ldcg(of_nodes + n);
        int slot = __float_as_int(node.x);
        if (slot < 0) break;
        u32 rank = __float_as_uint(node.y);
#pragma unroll
        for (int i = 0; i < kRanks; ++i) {
            int b = block_of(i);
            bool holds = b == slot / kFineSlots || (slot % kFineSlots == 0 && b + 1 == slot / kFineSlots);
            if (holds && ranks[i] < rank) ranks[i] = rank;
        }
    }

    // Of blocks that are not certain to win.
    Last last = {kNone, own};
    int need = args.total - args.init_blocks - args.local_blocks;
    if (need > 0) last = find_last_winner(ranks, need, own);

    u32 wins = 0;
#pragma unroll
    for (int i = 0; i < kRanks; ++i) {
        int b = block_of(i);
        bool certain = b <= own && (b < args.init_blocks || b > own - args.local_blocks);
        bool better = ranks[i] != kNone && (ranks[i] > last.rank || (ranks[i] == last.rank && b <= last.block));
        if (certain || better) wins |= 1u << i;
    }
    i32* blocks = args.blocks + row * args.total;
#pragma unroll 1
    for (int v = 0, place = 0; v < kVectors; ++v, wins >>= 4) {
        int before = 0, of_warp = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 lanes = __ballot_sync(kFull, (wins >> i & 1) != 0);
            before += __popc(lanes & ((1u << lane) - 1)), of_warp += __popc(lanes);
        }
        if (v > 0) __syncthreads();
        if (lane == 0) winners[warp] = of_warp;
        __syncthreads();
        of_warp = winners[lane & (kChooseWarps - 1)];
        before += __reduce_add_sync(kFull, lane < warp ? of_warp : 0);
        int at = place + before;
        for (u32 rest = wins & 15; rest != 0; rest &= rest - 1) blocks[at++] = block_of(4 * v) + __ffs((int)rest) - 1;
        place += __reduce_add_sync(kFull, lane < kChooseWarps ? of_warp : 0);
    }
    if (threadIdx.x == 0) args.counts[row] = args.total;
}

__device__ __forceinline__ void write_nothing(const Select& args, int token, int kv_head) {
    i64 row = (i64)token * args.kv_heads + kv_head;
    for (int i = threadIdx.x; i < args.total; i += kChooseThreads) args.blocks[row * args.total + i] = -1;
    if (threadIdx.x == 0) args.counts[row] = 0;
}

// Of contexts longer than usual: apart, so that the others' instructions lie close together.
__device__ __noinline__ void choose_of_many(
    const Batch& batch, const Select& args, int stored, int token, int kv_head, int own) {
    choose<kManyVectors>(batch, args, stored, token, kv_head, own);
}

// Blocks of one query, when all of them win too. `stored`: as `stored_tokens` says.
__device__ __forceinline__ void choose_any(
    const Batch& batch, const Select& args, int stored, int token, int kv_head, int position) {
    int own = position / kPage;
    if (own < args.total) {
        i64 row = (i64)token * args.kv_heads + kv_head;
        for (int i = threadIdx.x; i < args.total; i += kChooseThreads)
            args.blocks[row * args.total + i] = i <= own ? i : -1;
        if (threadIdx.x == 0) args.counts[row] = own + 1;
        return;
    }
    if (own < 4 * kFewVectors * kChooseThreads) choose<kFewVectors>(batch, args, stored, token, kv_head, own);
    else choose_of_many(batch, args, stored, token, kv_head, own);
}
