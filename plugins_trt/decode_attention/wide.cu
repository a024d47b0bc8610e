// A part of the context for 128 rows of one sequence a CTA; see attend.cuh.
#include "decode_attention/attend.cuh"

constexpr int kThreads = 128;
constexpr int kRows = 128;

template <int kDim>
constexpr int kWideBytes = (kRows + 2 * 2 * kPage) * kDim * 2;

struct WideTile {
    int start;      // row of the sequence's first new token
    int first_row;  // of the tile, within the sequence
    int active;     // parts in use
    int slots;      // tokens with the step's
    int end;        // page behind the last of this part
};

// Grid: (wide_parts, tiles, kv_heads). Row r of a sequence is head r % group of its new token r / group.
template <typename T, int kDim>
__device__ __forceinline__ void wide(const Batch& batch, const Arena& arena, const Attend& args) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ u64 masks[kRows];
    __shared__ WideTile tile;  // what the loop and the end need; no register can be spared for it
    constexpr int kSteps = kDim / 16;
    constexpr int kTiles = kDim / 8;
    constexpr int kPieces = kDim / 8;
    constexpr u32 kPageBytes = kPage * kDim * 2;
    int lane = threadIdx.x & 31;
    int warp = threadIdx.x >> 5;
    int g = lane >> 2, t = lane & 3;
    int matrix = lane >> 3, line = lane & 7;
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
    if (sequence < 0) {
        wait_for_dependencies();
        launch_dependents();
        return;
    }
    int length = batch.lengths[sequence];
    int slots = length + tokens;
    int active = wide_active(args, slots);
    if (part >= active) {
        wait_for_dependencies();
        launch_dependents();
        return;
    }

    if (threadIdx.x == 0) tile = {start, first_row, active, slots, (int)((i64)ceil_div(slots, kPage) * (part + 1) / active)};

    // Row r of the tile sees keys before the step and the new tokens of its mask; a row that is not dense sees
    // nothing and is not written.
    bool any = false;
    {
        int token = (first_row + (int)threadIdx.x) / group;
        u64 mask = 0;
        if (token < tokens && is_dense(args, batch.positions[start + token])) {
            mask = batch.tree_masks != nullptr ? batch.tree_masks[start + token] : ~0ull >> (63 - token);
        }
        masks[threadIdx.x] = mask;
        any = mask != 0;
    }
    any = __syncthreads_or(any);
    wait_for_dependencies();
    launch_dependents();
    if (!any) return;

    u32 q_shared = shared_address(shared);
    u32 stages = q_shared + kRows * kDim * 2;
    const i32* table = batch.table(sequence);
    int pages = ceil_div(slots, kPage);
    int page = (int)((i64)pages * part / active);
    for (int i = threadIdx.x; i < kRows * kPieces; i += kThreads) {
        int row = i / kPieces, piece = i % kPieces;
        int token = (first_row + row) / group;
        const u16* from =
            args.q + ((i64)(start + token) * args.heads + kv_head * group + (first_row + row) % group) * kDim + piece * 8;
        copy_async(q_shared + swizzled<kDim>(row, piece), token < tokens ? from : args.q, token < tokens);
    }
    auto load = [&](const Pool& pool, int page, u32 to) {
        constexpr int kStep = kThreads / kPieces;  // rows that the CTA copies at a time, a multiple of 8
        const u16* from = pool.row<kDim>(table[page], blockIdx.z, 0) + threadIdx.x * 8;
        int rows = tile.slots - page * kPage - (int)threadIdx.x / kPieces;
        to += swizzled<kDim>(threadIdx.x / kPieces, threadIdx.x % kPieces);
#pragma unroll
        for (int i = 0; i < kPage / kStep; ++i)
            copy_async(to + i * kStep * kDim * 2, from + i * kStep * kDim, i * kStep < rows);
    };
    load(arena.keys, page, stages);
    copy_commit();
    load(arena.values, page, stages + kPageBytes);
    copy_commit();

    // This warp's 32 rows: two tiles of 16. Rows behind the last token's are left alone.
    int end = tile.end;
    bool works = first_row + warp * 32 < tokens * group;
    u32 q_line = q_shared + swizzled<kDim>(warp * 32 + (matrix & 1) * 8 + line, matrix >> 1);
    u32 key_line = stages + swizzled<kDim>((matrix >> 1) * 8 + line, matrix & 1);
    u32 value_line = stages + kPageBytes + swizzled<kDim>((matrix & 1) * 8 + line, matrix >> 1);
    float acc[2][kTiles][4] = {};
    float maximum[2][2] = {{-kInfinity, -kInfinity}, {-kInfinity, -kInfinity}};
    float sum[2][2] = {};
    u32 stage = 0;
    for (; page < end; ++page, stage ^= 2 * kPageBytes) {
        u32 next = stages + (stage ^ (2 * kPageBytes));
        copy_wait<1>();  // the keys are here, the values may be under way
        __syncthreads();
        if (page + 1 < end) load(arena.keys, page + 1, next);
        copy_commit();
        u32 p[2][2][8];  // the weights, packed: tile, half, keys 8n + 2t and + 1
        if (works) {
            float s[2][8][4];
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int n = 0; n < 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) s[m][n][i] = 0.0f;
#pragma unroll
            for (int k = 0; k < kSteps; ++k) {
                u32 a[2][4];
#pragma unroll
                for (int m = 0; m < 2; ++m)
                    load_matrices(a[m], (q_line ^ (u32)(k << 5)) + m * 16 * kDim * 2);
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    u32 b[4];
                    load_matrices(b, ((key_line + stage) ^ (u32)(k << 5)) + n * 16 * kDim * 2);
#pragma unroll
                    for (int m = 0; m < 2; ++m) {
                        T::mma(s[m][2 * n], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
                        T::mma(s[m][2 * n + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
                    }
                }
            }
            if ((page + 1) * kPage > length) {  // new tokens: each row sees those of its mask
#pragma unroll
                for (int m = 0; m < 2; ++m)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        // Bit c: the key in slot c of this page is seen.
                        u64 seen = masks[warp * 32 + m * 16 + half * 8 + g];
                        int before = length - page * kPage;  // slots of this page from before the step
                        seen = before > 0 ? (seen << before) | ((1ull << before) - 1) : -before < 64 ? seen >> -before : 0;
                        seen >>= 2 * t;
#pragma unroll
                        for (int n = 0; n < 8; ++n)
#pragma unroll
                            for (int i = 0; i < 2; ++i)
                                if (((seen >> (8 * n + i)) & 1) == 0) s[m][n][2 * half + i] = -kInfinity;
                    }
            }
            // The weights are relative to a maximum that may lag behind by a factor of 2^kLag, which fp32 sums and
            // 16-bit weights bear easily: after the first pages nothing needs to be scaled any more.
            float most[2][2];
            bool outgrown = false;
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float largest = s[m][0][2 * half];
#pragma unroll
                    for (int n = 0; n < 8; ++n)
                        largest = fmaxf(largest, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
                    largest = fmaxf(largest, __shfl_xor_sync(kFull, largest, 1));
                    largest = fmaxf(largest, __shfl_xor_sync(kFull, largest, 2));
                    most[m][half] = largest * args.scale;
                    outgrown |= most[m][half] > maximum[m][half] + kLag;
                }
            if (__any_sync(kFull, outgrown)) {
#pragma unroll
                for (int m = 0; m < 2; ++m)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float larger = fmaxf(most[m][half], maximum[m][half]);
                        float factor = larger == -kInfinity ? 1.0f : exp2_fast(maximum[m][half] - larger);
                        maximum[m][half] = larger;
                        sum[m][half] *= factor;
#pragma unroll
                        for (int n = 0; n < kTiles; ++n) {
                            acc[m][n][2 * half] *= factor;
                            acc[m][n][2 * half + 1] *= factor;
                        }
                    }
            }
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float shift = maximum[m][half] == -kInfinity ? 0.0f : maximum[m][half];
                    float weights = 0.0f;
#pragma unroll
                    for (int n = 0; n < 8; ++n) {
                        float even = exp2_fast(fmaf(s[m][n][2 * half], args.scale, -shift));
                        float odd = exp2_fast(fmaf(s[m][n][2 * half + 1], args.scale, -shift));
                        weights += even + odd;
                        p[m][half][n] = T::pack(even, odd);
                    }
                    sum[m][half] += weights;
                }
        }
        copy_wait<1>();  // the values are here
        __syncthreads();
        if (page + 1 < end) load(arena.values, page + 1, next + kPageBytes);
        copy_commit();
        if (works) {
#pragma unroll
            for (int k = 0; k < kPage / 16; ++k) {
#pragma unroll
                for (int n = 0; n < kTiles / 2; ++n) {
                    u32 b[4];
                    load_matrices_transposed(b, ((value_line + stage) ^ (u32)(n << 5)) + k * 16 * kDim * 2);
#pragma unroll
                    for (int m = 0; m < 2; ++m) {
                        u32 a0 = p[m][0][2 * k], a1 = p[m][1][2 * k], a2 = p[m][0][2 * k + 1], a3 = p[m][1][2 * k + 1];
                        T::mma(acc[m][2 * n], a0, a1, a2, a3, b[0], b[1]);
                        T::mma(acc[m][2 * n + 1], a0, a1, a2, a3, b[2], b[3]);
                    }
                }
            }
        }
    }
    copy_wait<0>();
    if (!works) return;
    start = tile.start, first_row = tile.first_row, active = tile.active;
    group = args.heads / args.kv_heads;
    lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float weight = sum[m][half];
            weight += __shfl_xor_sync(kFull, weight, 1);
            weight += __shfl_xor_sync(kFull, weight, 2);
            int row = warp * 32 + m * 16 + half * 8 + g;
            if (masks[row] == 0) continue;
            int token = start + (first_row + row) / group;
            int head = (first_row + row) % group;
            if (active == 1) {
                u16* out = args.out + ((i64)token * args.heads + kv_head * group + head) * kDim;
                float inverse = 1.0f / weight;
#pragma unroll
                for (int n = 0; n < kTiles; ++n)
                    *reinterpret_cast<u32*>(out + 8 * n + 2 * t) =
                        T::pack(acc[m][n][2 * half] * inverse, acc[m][n][2 * half + 1] * inverse);
            } else {
                i64 place = (((i64)token * args.kv_heads + kv_head) * args.parts + part) * kHeads + head;
#pragma unroll
                for (int n = 0; n < kTiles; ++n)
                    *reinterpret_cast<float2*>(args.partial + place * kDim + 8 * n + 2 * t) =
                        float2{acc[m][n][2 * half], acc[m][n][2 * half + 1]};
                if (t == 0) args.statistics[place] = float2{maximum[m][half], weight};
            }
        }
}

#define WIDE(type, suffix, dim)                                                           \
    extern "C" __global__ void __launch_bounds__(kThreads, 2)                             \
        wide_##suffix##_d##dim(const Batch batch, const Arena arena, const Attend args) { \
        wide<type, dim>(batch, arena, args);                                              \
    }

WIDE(F16, f16, 64)
WIDE(F16, f16, 128)
WIDE(BF16, bf16, 64)
WIDE(BF16, bf16, 128)
