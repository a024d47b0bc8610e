// A part of the context for 64 rows of one sequence a CTA, as in wide.cu, by the warpgroup instructions.
// For compute capability 9.0 alone.
//
// A warpgroup has 64 rows, whose queries stay in registers. Two of them with the same rows take the pages of a part in turn,
// and their sums meet in shared memory at the end.
// Of the pages of sparse queries, which share the first and the last ones, those between are a gap that is not counted.
#include "decode_attention/attend.cuh"
#include "decode_attention/warpgroups.cuh"

constexpr int kGroups = 2;  // warpgroups of a CTA
constexpr int kThreads = 128 * kGroups;

// What the end needs, and what no register can be spared for.
struct GroupTile {
    int start;      // row of the sequence's first new token
    int first_row;  // of the tile, within the sequence
    int active;     // parts in use
    int length;     // tokens from before the step
    int slots;      // with the step's
    int end;        // page behind the last of this part
    int init;       // the first pages, before the gap
    int gap;        // pages between those and the others
};

template <int kRowGroups>
__device__ __forceinline__ void sync_sharers(int key_group) {
    if constexpr (kRowGroups == kGroups) __syncthreads();
    else asm volatile("bar.sync %0, 128;" ::"r"(key_group + 1) : "memory");
}

// The sums of a tile's groups, each as the threads hold them, meet in shared memory and are written.
template <typename T, int kDim, int kRowGroups>
__device__ __forceinline__ void write_sums(
    const Attend& args, const GroupTile& tile, const u64* masks, unsigned char* shared, const float (&acc)[kDim / 64][8][4],
    const float (&maximum)[2], const float (&sum)[2], int kv_head, int part) {
    constexpr int kKeyGroups = kGroups / kRowGroups, kRows = 64 * kRowGroups;
    constexpr int kStride = kDim + 8;
    __shared__ float2 statistics[kKeyGroups][kRows];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int g = lane >> 2, t = lane & 3;
    int key_group = warp / (4 * kRowGroups), first = warp % (4 * kRowGroups) * 16;
    __syncthreads();  // no copy is under way and no page is read any more
    float* sums = reinterpret_cast<float*>(shared) + key_group * (kRows * kStride);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float weight = sum[half];
        weight += __shfl_xor_sync(kFull, weight, 1);
        weight += __shfl_xor_sync(kFull, weight, 2);
        int row = first + half * 8 + g;
        if (t == 0) statistics[key_group][row] = float2{maximum[half], weight};
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n)
            *reinterpret_cast<float2*>(sums + row * kStride + 8 * n + 2 * t) =
                float2{acc[n / 8][n % 8][2 * half], acc[n / 8][n % 8][2 * half + 1]};
    }
    __syncthreads();
    int group = args.heads / args.kv_heads;
    constexpr int kColumns = kDim / 4;
    for (int i = threadIdx.x; i < kRows * kColumns; i += kThreads) {
        int row = i / kColumns, column = i % kColumns * 4;
        if (masks[row] == 0) continue;
        float most = -kInfinity, weight = 0.0f;
#pragma unroll
        for (int k = 0; k < kKeyGroups; ++k) most = fmaxf(most, statistics[k][row].x);
        float shift = most == -kInfinity ? 0.0f : most;
        float4 merged = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int k = 0; k < kKeyGroups; ++k) {
            float2 of = statistics[k][row];
            float factor = exp2_fast(of.x - shift);
            weight += of.y * factor;
            float4 x = *reinterpret_cast<const float4*>(
                reinterpret_cast<const float*>(shared) + (k * kRows + row) * kStride + column);
            merged.x += x.x * factor, merged.y += x.y * factor, merged.z += x.z * factor, merged.w += x.w * factor;
        }
        int token = tile.start + (tile.first_row + row) / group, head = (tile.first_row + row) % group;
        if (tile.active == 1) {
            float inverse = 1.0f / weight;
            u16* out = args.out + ((i64)token * args.heads + kv_head * group + head) * kDim;
            uint2 packed = {T::pack(merged.x * inverse, merged.y * inverse), T::pack(merged.z * inverse, merged.w * inverse)};
            *reinterpret_cast<uint2*>(out + column) = packed;
        } else {
            i64 place = (((i64)token * args.kv_heads + kv_head) * args.parts + part) * kHeads + head;
            *reinterpret_cast<float4*>(args.partial + place * kDim + column) = merged;
            if (column == 0) args.statistics[place] = float2{most, weight};
        }
    }
}

// Grid: (wide_parts, tiles, kv_heads). Row r of a sequence is head r % group of its new token r / group.
template <typename T, int kDim, int kRowGroups, int kStages>
__device__ __forceinline__ void wide_groups(const Batch& batch, const Arena& arena, const Attend& args) {
    extern __shared__ __align__(1024) unsigned char shared[];
    constexpr int kKeyGroups = kGroups / kRowGroups, kRows = 64 * kRowGroups, kSharers = 128 * kRowGroups;
    __shared__ u64 masks[kRows];
    __shared__ GroupTile tile;
    constexpr int kPieces = kDim / 8, kColumns = kDim / 64;
    constexpr u32 kPageBytes = kPage * kDim * 2, kStageBytes = 2 * kPageBytes;
    // (Read from one lane, so that the compiler sees that a warp has one number.)
    int lane = threadIdx.x & 31, warp = __shfl_sync(kFull, (int)threadIdx.x >> 5, 0);
    int g = lane >> 2, t = lane & 3;
    int key_group = warp / (4 * kRowGroups);
    int row = warp % (4 * kRowGroups) * 16 + g;  // and the one 8 behind it
    int group = args.heads / args.kv_heads;
    int kv_head = blockIdx.z;
    int part = blockIdx.x;

    // The tile's sequence and the first of its rows.
    int sequence = -1, first_row = 0, tokens = 0, start = 0;
    for (int s = 0, before = 0; s < batch.sequences; ++s) {
        int from = batch.sequence_starts[s];
        int count = batch.sequence_starts[s + 1] - from;
        int tiles = is_wide(args, count) ? ceil_div(count * group, kRows) : 0;
        if ((int)blockIdx.y < before + tiles) {
            sequence = s, first_row = ((int)blockIdx.y - before) * kRows, tokens = count, start = from;
            break;
        }
        before += tiles;
    }
    int length = sequence < 0 ? 0 : batch.lengths[sequence];
    int slots = length + tokens, active = 0, gap = 0;
    bool shares = sequence >= 0 && shares_blocks(args, length, tokens);
    if (sequence >= 0) active = shares ? shared_active(args) : wide_active(args, slots);
    // What the step brings lies behind the gap, where there is one: from here on slots are counted without it.
    if (shares) gap = first_shared(args, length, tokens) - args.init_blocks;
    length -= gap * kPage, slots -= gap * kPage;
    int pages = ceil_div(slots, kPage);
    // Row r of the tile sees keys before the step and the new tokens of its mask (which lie in its own block and the one
    // before, where blocks are shared); a row that has nothing to do here sees nothing and is not written.
    bool any = false;
    if (part < active && (int)threadIdx.x < kRows) {
        int token = (first_row + (int)threadIdx.x) / group;
        u64 mask = 0;
        if (token < tokens && (shares || is_dense(args, batch.positions[start + token])))
            mask = batch.tree_masks != nullptr ? batch.tree_masks[start + token] : ~0ull >> (63 - token);
        masks[threadIdx.x] = mask;
        any = mask != 0;
    }
    if (threadIdx.x == 0) {
        int end = (int)((i64)pages * (part + 1) / max_int(1, active));
        tile = {start, first_row, active, length, slots, end, args.init_blocks, gap};
    }
    any = __syncthreads_or(any);
    if (!any) {
        wait_for_dependencies();
        launch_dependents();
        return;
    }

    const i32* table = batch.table(sequence);
    int page = (int)((i64)pages * part / active) + key_group, end = tile.end;
    u32 stages = shared_address(shared) + key_group * kStages * kStageBytes;
    int thread = (int)threadIdx.x % kSharers;  // of those that copy a page together
    auto load = [&](const Pool& pool, int page, u32 to) {
        constexpr int kStep = kSharers / kPieces;  // rows that the sharers copy at a time, a multiple of 8
        const u16* from = pool.row<kDim>(table[page < tile.init ? page : page + tile.gap], kv_head, 0) + thread * 8;
        int rows = slots - page * kPage - thread / kPieces;
        to += column_piece(thread / kPieces, thread % kPieces);
#pragma unroll
        for (int i = 0; i < kPage / kStep; ++i)
            copy_async(to + i * kStep * 128, from + i * kStep * kDim, i * kStep < rows);
    };
    // A page that was full before the step is under way before the launch before has ended.
    auto load_first = [&](bool holds_new) {
        if (page >= end || holds_new != ((page + 1) * kPage > length)) return;
        load(arena.keys, page, stages);
        copy_commit();
        load(arena.values, page, stages + kPageBytes);
        copy_commit();
    };
    // Behind block selection all that is read here was complete when this launch began: it waits at its end.
    bool is_late = args.blocks != nullptr;
    load_first(false);
    if (!is_late) {
        wait_for_dependencies();
        launch_dependents();
    }
    load_first(true);
    u32 q[kDim / 16][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int token = (first_row + row + 8 * half) / group, head = (first_row + row + 8 * half) % group;
        const u16* from = args.q + ((i64)(start + token) * args.heads + kv_head * group + head) * kDim + 2 * t;
#pragma unroll
        for (int k = 0; k < kDim / 16; ++k) {
            q[k][half] = token < tokens ? *reinterpret_cast<const u32*>(from + 16 * k) : 0;
            q[k][half + 2] = token < tokens ? *reinterpret_cast<const u32*>(from + 16 * k + 8) : 0;
        }
    }

    float acc[kColumns][8][4];
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[c][n][i] = 0.0f;
    float maximum[2] = {-kInfinity, -kInfinity}, sum[2] = {0.0f, 0.0f};
    u32 stage = 0;
#pragma unroll 1
    for (; page < end; page += kKeyGroups, stage ^= kStages == 1 ? 0 : kStageBytes) {
        int next = page + kKeyGroups;
        u32 here = stages + stage, other = stages + (kStages == 1 ? 0 : stage ^ kStageBytes);
        copy_wait<1>();  // the keys are here, the values may be under way
        show_to_warpgroups();
        sync_sharers<kRowGroups>(key_group);
        if constexpr (kStages > 1) {
            if (next < end) load(arena.keys, next, other);
            copy_commit();
        }
        float s[8][4];
        warpgroup_fence();
#pragma unroll
        for (int k = 0; k < kDim / 16; ++k) {
            u64 keys = rows_described(here + k / 4 * (kPage * 128)) + k % 4 * 2;
            if (k == 0) warpgroup_scores_first(T(), s, q[k], keys);
            else warpgroup_mma(T(), s, q[k], keys);
        }
        warpgroup_commit();
        warpgroup_wait<0>();
        if ((page + 1) * kPage > length) {  // new tokens: each row sees those of its mask
            int before = length - page * kPage;  // slots of this page from before the step
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // Bit c: the key in slot c of this page is seen.
                u64 seen = masks[row + 8 * half];
                seen = before > 0 ? (seen << before) | ((1ull << before) - 1) : -before < 64 ? seen >> -before : 0;
                seen >>= 2 * t;
#pragma unroll
                for (int n = 0; n < 8; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        if (((seen >> (8 * n + i)) & 1) == 0) s[n][2 * half + i] = -kInfinity;
            }
        }
        // The weights are relative to a maximum that may lag behind, as in wide.cu.
        float most[2];
        bool outgrown = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float largest = s[0][2 * half];
#pragma unroll
            for (int n = 0; n < 8; ++n) largest = fmaxf(largest, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
            largest = fmaxf(largest, __shfl_xor_sync(kFull, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(kFull, largest, 2));
            most[half] = largest * args.scale;
            outgrown |= most[half] > maximum[half] + kLag;
        }
        if (__any_sync(kFull, outgrown)) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float larger = fmaxf(most[half], maximum[half]);
                float factor = larger == -kInfinity ? 1.0f : exp2_fast(maximum[half] - larger);
                maximum[half] = larger;
                sum[half] *= factor;
#pragma unroll
                for (int c = 0; c < kColumns; ++c)
#pragma unroll
                    for (int n = 0; n < 8; ++n) acc[c][n][2 * half] *= factor, acc[c][n][2 * half + 1] *= factor;
            }
        }
        u32 p[kPage / 16][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float shift = maximum[half] == -kInfinity ? 0.0f : maximum[half];
            float weights = 0.0f;
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                float even = exp2_fast(fmaf(s[n][2 * half], args.scale, -shift));
                float odd = exp2_fast(fmaf(s[n][2 * half + 1], args.scale, -shift));
                weights += even + odd;
                p[n / 2][n % 2 * 2 + half] = T::pack(even, odd);
            }
            sum[half] += weights;
        }
        copy_wait<(kStages > 1)>();  // the values are here
        show_to_warpgroups();
        sync_sharers<kRowGroups>(key_group);
        if (next < end) {  // and the keys of the one stage have been read
            if constexpr (kStages > 1) load(arena.values, next, other + kPageBytes);
            else load(arena.keys, next, here);
        }
        copy_commit();
        warpgroup_fence();
#pragma unroll
        for (int k = 0; k < kPage / 16; ++k)
#pragma unroll
            for (int c = 0; c < kColumns; ++c)
                warpgroup_add_values(
                    T(), acc[c], p[k], rows_described(here + kPageBytes + c * (kPage * 128) + k * 16 * 128));
        warpgroup_commit();
        warpgroup_wait<0>();
        if constexpr (kStages == 1) {  // the values have been read
            sync_sharers<kRowGroups>(key_group);
            if (next < end) load(arena.values, next, here + kPageBytes);
            copy_commit();
        }
    }
    copy_wait<0>();
    if (is_late) {
        wait_for_dependencies();
        launch_dependents();
    }
    write_sums<T, kDim, kRowGroups>(args, tile, masks, shared, acc, maximum, sum, kv_head, part);
}

#define WIDE(type, suffix, dim)                                                               \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                 \
        wide_low_##suffix##_d##dim(const Batch batch, const Arena arena, const Attend args) { \
        wide_groups<type, dim, 1, 2>(batch, arena, args);                                     \
    }

WIDE(F16, f16, 64)
WIDE(F16, f16, 128)
WIDE(BF16, bf16, 64)
WIDE(BF16, bf16, 128)
