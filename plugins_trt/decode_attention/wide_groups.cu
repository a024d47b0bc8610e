// A part of the context for 64 rows of one sequence a CTA, as in wide.cu, by the warpgroup instructions.
// For compute capability 9.0 alone.
//
// Two warpgroups with the same rows take the pages of a part in turn, and their sums meet in shared memory at the end. While
// the weights of a page are computed, the products of the queries with the keys of the next one run.
// Of the pages of sparse queries, which share the first and the last ones, those between are a gap that is not counted.
#include "decode_attention/attend.cuh"
#include "decode_attention/warpgroups.cuh"

constexpr int kGroups = 2;  // warpgroups of a CTA
constexpr int kThreads = 128 * kGroups;
constexpr int kRows = 64;
constexpr int kStages = 2;  // pages that a warpgroup has in shared memory

// What the rows of a tile are.
struct Rows {
    u64 masks[kRows];   // new tokens that a row sees; 0: it has nothing to do here
    i32 heads[kRows];   // row of the queries and of the output
    i32 places[kRows];  // row of `partial` and of `statistics`
};

// The pages of a part that a warpgroup takes, every other one, and the copies of them: copies n are of the keys of its n-th
// page and of the values of the one before.
template <int kDim>
struct Pages {
    static constexpr int kPieces = kDim / 8, kStep = 128 / kPieces;  // rows that are copied at a time, a multiple of 8
    static constexpr u32 kBytes = kPage * kDim * 2, kStageBytes = 2 * kBytes;

    int first, end;
    int slots;      // tokens in all pages; what lies behind them arrives as zeros
    int init, gap;  // pages before the gap, and in it
    int kv_head;
    u32 stages;
    const i32* table;
    int asked;                   // copies
    int at, next_at, before_at;  // where in the arena the pages of the next copies lie

    __device__ __forceinline__ int page(int n) const { return first + n * kGroups; }
    __device__ __forceinline__ u32 keys(int n) const { return stages + n % kStages * kStageBytes; }
    __device__ __forceinline__ u32 values(int n) const { return keys(n) + kBytes; }
    __device__ __forceinline__ int look_up(int n) const {
        return page(n) < end ? table[page(n) < init ? page(n) : page(n) + gap] : 0;
    }
    __device__ __forceinline__ void begin() { asked = before_at = 0, at = look_up(0), next_at = look_up(1); }
    __device__ __forceinline__ void copy(const Pool& pool, int n, int where, u32 to) const {
        if (page(n) >= end) return;
        int row = threadIdx.x % 128 / kPieces, piece = threadIdx.x % kPieces;
        const u16* from = pool.row<kDim>(where, kv_head, row) + piece * 8;
        int rows = slots - page(n) * kPage - row;
        to += column_piece(row, piece);
#pragma unroll
        for (int i = 0; i < kPage / kStep; ++i) copy_async(to + i * kStep * 128, from + i * kStep * kDim, i * kStep < rows);
    }
    __device__ __forceinline__ void ask(const Arena& arena) {
        copy(arena.keys, asked, at, keys(asked));
        if (asked > 0) copy(arena.values, asked - 1, before_at, values(asked - 1));
        copy_commit();
        ++asked;
        before_at = at, at = next_at, next_at = look_up(asked + 1);
    }
    // The copies that find room at once, of pages that end before slot `limit`.
    __device__ __forceinline__ void ask_first(const Arena& arena, int limit) {
#pragma unroll 1
        while (asked < kStages && (page(asked) + 1) * kPage <= limit) ask(arena);
    }
};

__device__ __forceinline__ void sync_group(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

// The sums of the two warpgroups: each gets half of the columns of both, which the other one hands over as its threads hold
// them, and writes them. What is handed over takes the place of pages that have been read.
template <typename T, int kDim>
__device__ __forceinline__ void write_sums(
    const Attend& args, const Rows& rows, bool is_alone, unsigned char* own_pages, const unsigned char* other_pages,
    const float (&acc)[kDim / 64][8][4], const float (&maximum)[2], const float (&sum)[2]) {
    constexpr int kHalf = kDim / 16;  // tiles of 8 columns
    __shared__ float2 statistics[kGroups][kRows];
    int lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4, group = threadIdx.x / 128;
    int g = lane >> 2, t = lane & 3;
    int row = warp * 16 + g, thread = threadIdx.x % 128;
    float weight[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        weight[half] = sum[half] + __shfl_xor_sync(kFull, sum[half], 1);
        weight[half] += __shfl_xor_sync(kFull, weight[half], 2);
        if (t == 0) statistics[group][row + 8 * half] = float2{maximum[half], weight[half]};
    }
    sync_group(group);  // its pages are not read any more
    float own[kHalf][4];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
        const float (&low)[4] = acc[i / 8][i % 8];
        const float (&high)[4] = acc[(i + kHalf) / 8][(i + kHalf) % 8];
        float4 given;
        float* gives = &given.x;
#pragma unroll
        for (int j = 0; j < 4; ++j) own[i][j] = group == 0 ? low[j] : high[j], gives[j] = group == 0 ? high[j] : low[j];
        reinterpret_cast<float4*>(own_pages)[i * 128 + thread] = given;
    }
    __syncthreads();
    float mine[2], theirs[2];  // what the sums are scaled with
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float2 other = statistics[1 - group][row + 8 * half];
        float most = fmaxf(maximum[half], other.x);
        float shift = most == -kInfinity ? 0.0f : most;
        mine[half] = exp2_fast(maximum[half] - shift);
        theirs[half] = exp2_fast(other.x - shift);
        weight[half] = weight[half] * mine[half] + other.y * theirs[half];
        if (is_alone) {
            float inverse = 1.0f / weight[half];
            mine[half] *= inverse, theirs[half] *= inverse;
        } else if (group == 0 && t == 0 && rows.masks[row + 8 * half] != 0) {
            args.statistics[rows.places[row + 8 * half]] = float2{most, weight[half]};
        }
    }
    // A warp brings its rows in order, so that what it writes at a time are whole lines.
    constexpr int kStride = kDim / 2 + 8, kPieces = kDim / 8;  // of four elements
    float* lines = reinterpret_cast<float*>(own_pages + kHalf * 128 * 16) + warp * (16 * kStride);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
        float4 x = reinterpret_cast<const float4*>(other_pages)[i * 128 + thread];
        float* line = lines + g * kStride + 8 * i + 2 * t;
        *reinterpret_cast<float2*>(line) =
            float2{own[i][0] * mine[0] + x.x * theirs[0], own[i][1] * mine[0] + x.y * theirs[0]};
        *reinterpret_cast<float2*>(line + 8 * kStride) =
            float2{own[i][2] * mine[1] + x.z * theirs[1], own[i][3] * mine[1] + x.w * theirs[1]};
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16 * kPieces / 32; ++i) {
        int line = (i * 32 + lane) / kPieces, column = (i * 32 + lane) % kPieces * 4;
        if (rows.masks[warp * 16 + line] == 0) continue;
        float4 x = *reinterpret_cast<const float4*>(lines + line * kStride + column);
        column += group * (kDim / 2);
        if (is_alone) {
            uint2 packed = {T::pack(x.x, x.y), T::pack(x.z, x.w)};
            *reinterpret_cast<uint2*>(args.out + (i64)rows.heads[warp * 16 + line] * kDim + column) = packed;
        } else {
            *reinterpret_cast<float4*>(args.partial + (i64)rows.places[warp * 16 + line] * kDim + column) = x;
        }
    }
}

// Grid: (wide_parts, tiles, kv_heads). Row r of a sequence is head r % group of its new token r / group.
template <typename T, int kDim>
__device__ __forceinline__ void wide_groups(const Batch& batch, const Arena& arena, const Attend& args) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ Rows rows;
    constexpr int kPieces = kDim / 8, kColumns = kDim / 64;
    // (Read from one lane, so that the compiler sees that a warp has one number.)
    int lane = threadIdx.x & 31, warp = __shfl_sync(kFull, (int)threadIdx.x >> 5, 0);
    int t = lane & 3;
    int key_group = warp / 4, row = warp % 4 * 16 + (lane >> 2);  // and the one 8 behind it
    int group = args.heads / args.kv_heads;
    int kv_head = blockIdx.z, part = blockIdx.x;

    // The tile's sequence and the first of its rows.
    int sequence = -1, first_row = 0, tokens = 0, start = 0, length = 0;
    for (int s = 0, before = 0; s < batch.sequences; ++s) {
        int from = batch.sequence_starts[s];
        int count = batch.sequence_starts[s + 1] - from;
        int stored = batch.lengths[s];
        int tiles = is_wide(args, count) ? ceil_div(count * group, kRows) : 0;
        if ((int)blockIdx.y < before + tiles) {
            sequence = s, first_row = ((int)blockIdx.y - before) * kRows, tokens = count, start = from, length = stored;
            break;
        }
        before += tiles;
    }
    int slots = length + tokens, active = 0, gap = 0;
    bool shares = sequence >= 0 && shares_blocks(args, length, tokens);
    if (sequence >= 0) active = shares ? shared_active(args) : wide_active(args, slots);
    // What the step brings lies behind the gap, where there is one: from here on slots are counted without it.
    if (shares) gap = first_shared(args, length, tokens) - args.init_blocks;
    bool has_work = part < active && (shares || is_dense(args, length));  // (no token is before slot `length`)
    length -= gap * kPage, slots -= gap * kPage;

    // Row r of the tile sees keys before the step and the new tokens of its mask (which lie in its own block and the one
    // before, where blocks are shared). What is read for that arrives before the pages, which are asked for next.
    int token = 0, head = 0, position = 0;
    u64 mask = 0;
    if (has_work && (int)threadIdx.x < kRows) {
        token = (first_row + (int)threadIdx.x) / group, head = first_row + (int)threadIdx.x - token * group;
        if (token < tokens) {
            position = batch.positions[start + token];
            mask = batch.tree_masks != nullptr ? batch.tree_masks[start + token] : ~0ull >> (63 - token);
        }
    }
    Pages<kDim> pages = {};
    pages.stages = shared_address(shared) + key_group * (kStages * Pages<kDim>::kStageBytes);
    if (has_work) {
        u32 all = (u32)ceil_div(slots, kPage);
        pages.first = (int)(all * (u32)part / (u32)active) + key_group;
        pages.end = (int)(all * (u32)(part + 1) / (u32)active);
        pages.slots = slots, pages.init = args.init_blocks, pages.gap = gap, pages.kv_head = kv_head;
        pages.table = batch.table(sequence);
        pages.begin();
        pages.ask_first(arena, length);  // what was full before the step: while the launch before may still run
    }
    if ((int)threadIdx.x < kRows) {
        if (!shares && !is_dense(args, position)) mask = 0;
        rows.masks[threadIdx.x] = mask;
        rows.heads[threadIdx.x] = (start + token) * args.heads + kv_head * group + head;
        rows.places[threadIdx.x] = (((start + token) * args.kv_heads + kv_head) * args.parts + part) * kHeads + head;
    }
    if (!__syncthreads_or(mask != 0)) {
        copy_wait<0>();
        wait_for_dependencies();
        launch_dependents();
        return;
    }
    // Behind block selection all that is read here was complete when this launch began: it waits at its end.
    bool is_late = args.blocks != nullptr;
    if (!is_late) {
        wait_for_dependencies();
        launch_dependents();
    }
    // The queries, in the layout of a page.
    u32 queries = shared_address(shared) + kGroups * kStages * Pages<kDim>::kStageBytes;
    uint4 x[kRows * kPieces / kThreads];
#pragma unroll
    for (int i = 0; i < kRows * kPieces / kThreads; ++i) {
        int line = (i * kThreads + (int)threadIdx.x) / kPieces;
        x[i] = uint4{0, 0, 0, 0};
        if (rows.masks[line] != 0)
            x[i] = *(reinterpret_cast<const uint4*>(args.q + (i64)rows.heads[line] * kDim) + threadIdx.x % kPieces);
    }
#pragma unroll
    for (int i = 0; i < kRows * kPieces / kThreads; ++i)
        store_shared(queries + column_piece((i * kThreads + (int)threadIdx.x) / kPieces, threadIdx.x % kPieces), x[i]);
    pages.ask_first(arena, 1 << 30);

    float acc[kColumns][8][4];
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[c][n][i] = 0.0f;
    float maximum[2] = {-kInfinity, -kInfinity}, sum[2] = {0.0f, 0.0f};
    float s[8][4], upcoming[8][4];
    auto multiply_keys = [&](float (&into)[8][4], u32 keys) {
        warpgroup_fence();
#pragma unroll
        for (int k = 0; k < kDim / 16; ++k) {
            u32 column = k / 4 * (kPage * 128);
            u64 a = rows_described(queries + column) + k % 4 * 2, b = rows_described(keys + column) + k % 4 * 2;
            if (k == 0) warpgroup_scores_first(T(), into, a, b);
            else warpgroup_scores(T(), into, a, b);
        }
        warpgroup_commit();
    };
    copy_wait<kStages - 1>();
    show_to_warpgroups();
    __syncthreads();
    if (pages.page(0) < pages.end) {
        multiply_keys(s, pages.keys(0));
        warpgroup_wait<0>();
    }
#pragma unroll 1
    for (int n = 0; pages.page(n) < pages.end; ++n) {
        int first = pages.page(n) * kPage;  // slot of the page's first key
        copy_wait<kStages - 2>();
        show_to_warpgroups();
        sync_group(key_group);
        bool more = pages.page(n + 1) < pages.end;
        if (more) multiply_keys(upcoming, pages.keys(n + 1));
        pages.ask(arena);  // where the values before these and the keys of these were
        if (first + kPage > length) {  // new tokens: each row sees those of its mask
            int before = length - first;  // slots of this page from before the step
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // Bit c: the key in slot c of this page is seen.
                u64 seen = rows.masks[row + 8 * half];
                seen = before > 0 ? (seen << before) | ((1ull << before) - 1) : -before < 64 ? seen >> -before : 0;
                seen >>= 2 * t;
#pragma unroll
                for (int c = 0; c < 8; ++c)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        if (((seen >> (8 * c + i)) & 1) == 0) s[c][2 * half + i] = -kInfinity;
            }
        }
        // The weights are relative to a maximum that may lag behind, as in wide.cu.
        float most[2];
        bool outgrown = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float largest = s[0][2 * half];
#pragma unroll
            for (int c = 0; c < 8; ++c) largest = fmaxf(largest, fmaxf(s[c][2 * half], s[c][2 * half + 1]));
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
                    for (int i = 0; i < 8; ++i) acc[c][i][2 * half] *= factor, acc[c][i][2 * half + 1] *= factor;
            }
        }
        u32 p[kPage / 16][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float shift = maximum[half] == -kInfinity ? 0.0f : maximum[half];
            float weights = 0.0f;
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                float even = exp2_fast(fmaf(s[c][2 * half], args.scale, -shift));
                float odd = exp2_fast(fmaf(s[c][2 * half + 1], args.scale, -shift));
                weights += even + odd;
                p[c / 2][c % 2 * 2 + half] = T::pack(even, odd);
            }
            sum[half] += weights;
        }
        warpgroup_fence();
#pragma unroll
        for (int k = 0; k < kPage / 16; ++k)
#pragma unroll
            for (int c = 0; c < kColumns; ++c)
                warpgroup_add_values(
                    T(), acc[c], p[k], rows_described(pages.values(n) + c * (kPage * 128) + k * 16 * 128));
        warpgroup_commit();
        warpgroup_wait<0>();
        if (more) {
#pragma unroll
            for (int c = 0; c < 8; ++c)
#pragma unroll
                for (int i = 0; i < 4; ++i) s[c][i] = upcoming[c][i];
        }
    }
    copy_wait<0>();
    if (is_late) {
        wait_for_dependencies();
        launch_dependents();
    }
    unsigned char* own = shared + key_group * (kStages * Pages<kDim>::kStageBytes);
    const unsigned char* other = shared + (1 - key_group) * (kStages * Pages<kDim>::kStageBytes);
    write_sums<T, kDim>(args, rows, active == 1, own, other, acc, maximum, sum);
}

// (So few registers that thread blocks of `combine` find room beside these, and begin when these end.)
#define WIDE(type, suffix, dim)                                                               \
    extern "C" __global__ void __maxnreg__(184)                                               \
        wide_low_##suffix##_d##dim(const Batch batch, const Arena arena, const Attend args) { \
        wide_groups<type, dim>(batch, arena, args);                                           \
    }

WIDE(F16, f16, 64)
WIDE(F16, f16, 128)
WIDE(BF16, bf16, 64)
WIDE(BF16, bf16, 128)
