// The choice of the best blocks of one token and KV head, by all threads of a CTA.
#pragma once
#include "decode_selection/select.cuh"

constexpr int kBins = 512;
constexpr int kFewKeys = 64;           // keys that are compared pair by pair
constexpr int kAllEqual = 0x7fffffff;  // every key that equals the last winner wins too

// The need-th largest of the keys in [low, high], which are at least `need`: narrows the range to one bin of a
// histogram at a time, until few keys are left in it, which are then compared with each other. Returns the key, and
// in `need` how many of those equal to it win, or kAllEqual. Thread t of kBins holds `keys`; kNone is no key.
// The best of the scores mostly lie within a factor of 2^16 of the best one: that range is looked through first, in
// fine bins, whatever the worst one is.
constexpr u32 kNone = 0xffffffffu;

template <int kKeys>
__device__ __forceinline__ u32 find_last_winner(const u32 (&keys)[kKeys], u32 low, u32 high, int& need) {
    constexpr int kWarps = kBins / 32;
    __shared__ u32 bins[kBins];
    __shared__ u32 few[kFewKeys];
    __shared__ u32 sums[kWarps];
    __shared__ int found[3];  // bin, keys above it, keys in it
    __shared__ int listed;    // keys in `few`
    __shared__ int all;       // keys in the range
    __shared__ u32 last[2];   // the key and how many equal to it win
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    constexpr u32 kUsualRange = 16u << 23;  // 16 exponents
    u32 least = low;
    if (high - low > kUsualRange) low = high - kUsualRange;
    while (true) {
        int shift = 32 - __clz((int)(high - low));  // bits of the range
        shift = shift > 9 ? shift - 9 : 0;
        bins[threadIdx.x] = 0;
        if (threadIdx.x == 0) listed = 0;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kKeys; ++i)
            if (keys[i] != kNone && keys[i] >= low && keys[i] <= high) atomicAdd(&bins[(keys[i] - low) >> shift], 1u);
        __syncthreads();
        // Thread t takes bin t from the top: those behind it hold larger keys.
        u32 mine = bins[kBins - 1 - threadIdx.x], up_to = mine;
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
            u32 other = __shfl_up_sync(kFull, up_to, step);
            if (lane >= step) up_to += other;
        }
        if (lane == 31) sums[warp] = up_to;
        __syncthreads();
        u32 before = lane < warp ? sums[lane & (kWarps - 1)] : 0;
        up_to += __reduce_add_sync(kFull, before);
        if ((int)(up_to - mine) < need && (int)up_to >= need)
            found[0] = kBins - 1 - (int)threadIdx.x, found[1] = (int)(up_to - mine), found[2] = (int)mine;
        if (threadIdx.x == kBins - 1) all = (int)up_to;
        __syncthreads();
        if (all < need) {  // it lies below the range
            need -= all;
            high = low - 1, low = least;
            continue;
        }
        int in_bin = found[2];
        need -= found[1];
        low += (u32)found[0] << shift;
        high = low + ((1u << shift) - 1);
        if (in_bin == need) {  // all of the bin win
            need = kAllEqual;
            return low;
        }
        if (shift == 0) return low;
        if (in_bin <= kFewKeys) {
#pragma unroll
            for (int i = 0; i < kKeys; ++i)
                if (keys[i] != kNone && keys[i] >= low && keys[i] <= high) few[atomicAdd(&listed, 1)] = keys[i];
            __syncthreads();
            if ((int)threadIdx.x < in_bin) {
                u32 key = few[threadIdx.x];
                int larger = 0, equal = 0, earlier = 0;
#pragma unroll 2
                for (int i = 0; i < in_bin; ++i) {
                    larger += few[i] > key;
                    equal += few[i] == key;
                    earlier += few[i] == key && i < (int)threadIdx.x;
                }
                if (earlier == 0 && larger < need && larger + equal >= need)
                    last[0] = key, last[1] = (u32)(larger + equal == need ? kAllEqual : need - larger);
            }
            __syncthreads();
            need = (int)last[1];
            return last[0];
        }
        __syncthreads();
    }
}

// Of four keys a thread: the key and `need`. No longer inline, so that its instructions are there once.
__device__ __noinline__ uint2 find_last_winner_of_few(uint4 four, u32 low, u32 high, int need) {
    u32 keys[4] = {four.x, four.y, four.z, four.w};
    u32 key = find_last_winner(keys, low, high, need);
    return uint2{key, (u32)need};
}

constexpr int kChooseThreads = kBins;
constexpr int kFewVectors = 1;   // 16-byte vectors of ranks a thread holds: up to 2048 blocks
constexpr int kManyVectors = 4;  // up to 8192

// Writes the best `total` of the blocks 0 .. own (which are more than `total`) of one token and KV head, ascending.
// All kChooseThreads threads of the CTA must call it. Thread t holds blocks 4t .. 4t + 3, and those 2048 further.
template <int kVectors>
__device__ __forceinline__ void choose(
    const Batch& batch, const Select& args, int stored, int token, int kv_head, int own) {
    constexpr int kWarps = kChooseThreads / 32;
    constexpr int kRanks = 4 * kVectors;
    __shared__ u32 smallest[kWarps], largest[kWarps];
    __shared__ int winners[kWarps];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    i64 row = (i64)token * args.kv_heads + kv_head;
    auto block_of = [&](int i) { return (i / 4 * kChooseThreads + (int)threadIdx.x) * 4 + i % 4; };

    // The bits of a score order as the score does, since it is not negative. A block that is certain to win, or is
    // none, has no rank. (`scores` wrote the blocks of pages with stored tokens.)
    u32 ranks[kRanks];
    float first_slot[kVectors];
    const float* scores = args.scores + row * args.score_stride;
    const float* first_slots = args.first_slots + row * (args.score_stride / kPage);
    int scored = ceil_div(stored, kPage);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        int b = block_of(4 * v);
        float4 four = {0.0f, 0.0f, 0.0f, 0.0f};
        if (b < scored) four = __ldcg(reinterpret_cast<const float4*>(scores + b));
        first_slot[v] = b % kPage == kPage - 4 && b + 4 < scored ? __ldcg(first_slots + (b + 4) / kPage) : 0.0f;
        ranks[4 * v] = __float_as_uint(four.x), ranks[4 * v + 1] = __float_as_uint(four.y);
        ranks[4 * v + 2] = __float_as_uint(four.z), ranks[4 * v + 3] = __float_as_uint(four.w);
    }
    u32 low = kNone, high = 0;
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
    if (batch.tree_masks != nullptr) {  // the fine keys that the query's own path completes
        const float* nodes = args.node_scores + row * kNodeKeys * 2;
        for (int n = 0; n < kNodeKeys; ++n) {
            int slot = __float_as_int(nodes[2 * n]);
            if (slot < 0) break;
            u32 rank = __float_as_uint(nodes[2 * n + 1]);
#pragma unroll
            for (int i = 0; i < kRanks; ++i) {
                int b = block_of(i);
                bool holds = b == slot / kFineSlots || (slot % kFineSlots == 0 && b + 1 == slot / kFineSlots);
                if (holds && ranks[i] < rank) ranks[i] = rank;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kRanks; ++i) {
        if (ranks[i] == kNone) continue;
        low = ranks[i] < low ? ranks[i] : low;
        high = ranks[i] > high ? ranks[i] : high;
    }
    low = __reduce_min_sync(kFull, low);
    high = __reduce_max_sync(kFull, high);
    if (lane == 0) smallest[warp] = low, largest[warp] = high;
    __syncthreads();
    low = __reduce_min_sync(kFull, smallest[lane & (kWarps - 1)]);
    high = __reduce_max_sync(kFull, largest[lane & (kWarps - 1)]);

    // What a block that is not certain to win must reach: `last` by rank and, among equals, `last_block`.
    u32 last = kNone;
    int last_block = own;
    int need = args.total - args.init_blocks - args.local_blocks;
    if (need > 0) {
        u32 keys[kRanks];
#pragma unroll
        for (int i = 0; i < kRanks; ++i) keys[i] = ranks[i];
        // (A loop, so that its body is there once: instructions have to be fetched, too.)
#pragma unroll 1
        for (bool by_rank = true;; by_rank = false) {
            u32 found;
            if constexpr (kRanks == 4) {
                uint2 result = find_last_winner_of_few({keys[0], keys[1], keys[2], keys[3]}, low, high, need);
                found = result.x, need = (int)result.y;
            } else {
                found = find_last_winner(keys, low, high, need);
            }
            if (!by_rank) {
                last_block = own - (int)found;
                break;
            }
            last = found;
            if (need == kAllEqual) break;
            // Of several that share the last rank, the smaller indices win.
#pragma unroll
            for (int i = 0; i < kRanks; ++i) keys[i] = ranks[i] == last ? (u32)(own - block_of(i)) : kNone;
            low = 0, high = (u32)own;
            __syncthreads();
        }
    }

    i32* blocks = args.blocks + row * args.total;
    int place = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        u32 wins = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int b = block_of(4 * v + i);
            u32 rank = ranks[4 * v + i];
            bool certain = b <= own && (b < args.init_blocks || b > own - args.local_blocks);
            bool better = need > 0 && rank != kNone && (rank > last || (rank == last && b <= last_block));
            if (certain || better) wins |= 1u << i;
        }
        int count = __popc(wins), up_to = count;
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
            int other = __shfl_up_sync(kFull, up_to, step);
            if (lane >= step) up_to += other;
        }
        if (v > 0) __syncthreads();
        if (lane == 31) winners[warp] = up_to;
        __syncthreads();
        int of_warp = winners[lane & (kWarps - 1)];
        int before = __reduce_add_sync(kFull, lane < warp ? of_warp : 0);
        int all = __reduce_add_sync(kFull, lane < kWarps ? of_warp : 0);
        int at = place + before + up_to - count;
        for (u32 rest = wins; rest != 0; rest &= rest - 1) blocks[at++] = block_of(4 * v) + __ffs((int)rest) - 1;
        place += all;
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

// Blocks of one query, when all of them win too.
__device__ __forceinline__ void choose_any(
    const Batch& batch, const Select& args, int sequence, int token, int kv_head, int position) {
    int own = position / kPage;
    if (own < args.total) {
        i64 row = (i64)token * args.kv_heads + kv_head;
        for (int i = threadIdx.x; i < args.total; i += kChooseThreads)
            args.blocks[row * args.total + i] = i <= own ? i : -1;
        if (threadIdx.x == 0) args.counts[row] = own + 1;
        return;
    }
    int stored = stored_tokens(batch, sequence, position);
    if (own < 4 * kFewVectors * kChooseThreads) choose<kFewVectors>(batch, args, stored, token, kv_head, own);
    else choose_of_many(batch, args, stored, token, kv_head, own);
}
