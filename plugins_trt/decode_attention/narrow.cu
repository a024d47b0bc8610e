// A part of the context of one token and KV head a CTA; see attend.cuh.
#include "decode_attention/attend.cuh"

// `kStages`: units that a warp has in shared memory, each keys and values.
// Grid: (narrow_parts, kv_heads, tokens).
template <typename T, int kDim, int kWarps, int kStages>
__device__ __forceinline__ void narrow(const Batch& batch, const Arena& arena, const Attend& args) {
    extern __shared__ __align__(1024) unsigned char shared[];
    constexpr int kThreads = kWarps * 32;
    constexpr int kSteps = kDim / 16;         // steps of 16 elements in a dot product
    constexpr int kTiles = kDim / 8;          // 8-column tiles of an output row
    constexpr int kPieces = kDim / 8;         // 16-byte pieces of a row
    constexpr u32 kTileBytes = kUnit * kDim * 2;
    constexpr int kNothing = 1 << 30;  // a slot behind every limit
    int token = blockIdx.z;
    int kv_head = blockIdx.y;
    int part = blockIdx.x;
    int lane = threadIdx.x & 31;
    int warp = threadIdx.x >> 5;
    int g = lane >> 2, t = lane & 3;
    int group = args.heads / args.kv_heads;
    i64 row = (i64)token * args.kv_heads + kv_head;
    int position = batch.positions[token];
    int start, tokens, length;
    int sequence = batch.sequence_of(token, start, tokens, length);
    bool dense = is_dense(args, position);
    // A dense query finds its pages before it waits, a sparse one (but in a tree) everything but its blocks.
    bool is_ready = sequence < 0 || (dense && is_wide(args, tokens)) || (!dense && batch.tree_masks != nullptr);
    if (is_ready) {
        wait_for_dependencies();
        launch_dependents();
    }
    u16* out = args.out + ((i64)token * args.heads + kv_head * group) * kDim;
    if (sequence < 0) {
        if (part == 0) {
            for (int i = threadIdx.x; i < group * kPieces; i += kThreads)
                reinterpret_cast<uint4*>(out)[i] = uint4{0, 0, 0, 0};
        }
        return;
    }
    if (dense && is_wide(args, tokens)) return;
    Context context = context_of(batch, args, length, token, position, kv_head, dense);
    int active = narrow_active(args, context.entries());
    if (part >= active) {
        if (!is_ready) {
            wait_for_dependencies();
            launch_dependents();
        }
        return;
    }
    const i32* blocks = dense ? nullptr : args.blocks + row * args.total;

    // This warp's units, the first of them and the end.
    int units = context.entries() * kUnitsPerPage;
    int workers = active * kWarps;
    int worker = part * kWarps + warp;
    int first = (int)((u32)units * (u32)worker / (u32)workers);
    int end = (int)((u32)units * (u32)(worker + 1) / (u32)workers);

    // Lane l knows the page and the first slot of entry `window + l`.
    const i32* table = batch.table(sequence);
    auto slot_of = [&](int entry) {  // the first of the entry's page
        if (entry >= context.pages) return (length / kPage + entry - context.pages) * kPage;
        int block = dense ? entry : blocks[entry];
        return block < 0 ? kNothing : block * kPage;
    };
    int window = 0, entry_page = 0, entry_slot = 0;
    auto look_up = [&](int from) {
        window = from;
        entry_slot = from + lane < context.entries() ? slot_of(from + lane) : kNothing;
        entry_page = entry_slot < kNothing ? table[entry_slot / kPage] : 0;
    };
    // Rows g and g + 8 are heads of the group. Of a sparse query they were written before the launch before this one.
    u32 q[kSteps][4];
    auto load_heads = [&] {
        const u16* rows = args.q + ((i64)token * args.heads + kv_head * group) * kDim;
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            const u16* low = rows + g * kDim + 16 * k + 2 * t;
            const u16* high = low + 8 * kDim;
            q[k][0] = g < group ? *reinterpret_cast<const u32*>(low) : 0;
            q[k][1] = g + 8 < group ? *reinterpret_cast<const u32*>(high) : 0;
            q[k][2] = g < group ? *reinterpret_cast<const u32*>(low + 8) : 0;
            q[k][3] = g + 8 < group ? *reinterpret_cast<const u32*>(high + 8) : 0;
        }
    };
    if (dense) look_up(first / kUnitsPerPage);
    else load_heads();
    if (!is_ready) {
        wait_for_dependencies();
        launch_dependents();
    }
    if (dense) load_heads();
    else look_up(first / kUnitsPerPage);

    u32 base = shared_address(shared) + warp * (kStages * 2 * kTileBytes);
    auto load = [&](int unit) {
        int entry = unit / kUnitsPerPage;
        if (entry >= window + 32) look_up(entry);
        int page = __shfl_sync(kFull, entry_page, entry - window);
        int slot = __shfl_sync(kFull, entry_slot, entry - window) + unit % kUnitsPerPage * kUnit;
        int limit = entry < context.pages ? context.limit : context.nodes_end;
        const u16* keys = arena.keys.row<kDim>(page, kv_head, slot % kPage);
        const u16* values = arena.values.row<kDim>(page, kv_head, slot % kPage);
        u32 stage = base + (u32)((unit - first) % kStages) * (2 * kTileBytes);
#pragma unroll
        for (int i = 0; i < kUnit * kPieces / 32; ++i) {
            int row = (i * 32 + lane) / kPieces;
            int piece = (i * 32 + lane) % kPieces;
            bool valid = slot + row < limit;
            copy_async(stage + swizzled<kDim>(row, piece), keys + row * kDim + piece * 8, valid);
            copy_async(stage + kTileBytes + swizzled<kDim>(row, piece), values + row * kDim + piece * 8, valid);
        }
    };
    float acc[kTiles][4] = {};
    float maximum[2] = {-kInfinity, -kInfinity};
    float sum[2] = {0.0f, 0.0f};
    // Loads run kStages - 1 units ahead; the first rounds only load.
#pragma unroll 1
    for (int unit = first - (kStages - 1); unit < end; ++unit) {
        // The stage that is filled now was read in the last round, by this warp alone.
        int ahead = unit + kStages - 1;
        if (ahead < end) load(ahead);
        copy_commit();
        if (unit < first) continue;
        copy_wait<kStages - 1>();
        __syncwarp();
        // A step of 16 elements is two pieces of a row, so its number enters the swizzled address as an XOR.
        u32 stage = base + (u32)((unit - first) % kStages) * (2 * kTileBytes);
        int matrix = lane >> 3, line = lane & 7;
        u32 key_line = stage + swizzled<kDim>((matrix >> 1) * 8 + line, matrix & 1);
        u32 value_line = stage + kTileBytes + swizzled<kDim>((matrix & 1) * 8 + line, matrix >> 1);

        float s[2][4] = {};
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            u32 keys[4];
            load_matrices(keys, key_line ^ (u32)(k << 5));
            T::mma(s[0], q[k][0], q[k][1], q[k][2], q[k][3], keys[0], keys[1]);
            T::mma(s[1], q[k][0], q[k][1], q[k][2], q[k][3], keys[2], keys[3]);
        }

        // (Loads ahead may have moved the window past this unit.)
        int entry = unit / kUnitsPerPage;
        int slot = __shfl_sync(kFull, entry_slot, (entry - window) & 31);
        if (entry < window) slot = slot_of(entry);
        slot += unit % kUnitsPerPage * kUnit;
        if (entry < context.pages) {
            if (slot + kUnit > context.limit) {
#pragma unroll
                for (int n = 0; n < 2; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (slot + 8 * n + 2 * t + (i & 1) >= context.limit) s[n][i] = -kInfinity;
            }
        } else {
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    int node = slot + 8 * n + 2 * t + (i & 1) - length;
                    if (node < 0 || node >= 64 || ((context.path >> node) & 1) == 0) s[n][i] = -kInfinity;
                }
        }

        u32 p[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // rows g and g + 8
            float most = fmaxf(fmaxf(s[0][2 * half], s[0][2 * half + 1]), fmaxf(s[1][2 * half], s[1][2 * half + 1]));
            most = fmaxf(most, __shfl_xor_sync(kFull, most, 1));
            most = fmaxf(most, __shfl_xor_sync(kFull, most, 2));
            most = fmaxf(most * args.scale, maximum[half]);
            float shift = most == -kInfinity ? 0.0f : most;
            float factor = exp2_fast(maximum[half] - shift);
            maximum[half] = most;
            float weights[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) weights[i] = exp2_fast(fmaf(s[i / 2][2 * half + i % 2], args.scale, -shift));
            sum[half] = sum[half] * factor + (weights[0] + weights[1]) + (weights[2] + weights[3]);
            p[half] = T::pack(weights[0], weights[1]);
            p[2 + half] = T::pack(weights[2], weights[3]);
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                acc[n][2 * half] *= factor;
                acc[n][2 * half + 1] *= factor;
            }
        }
#pragma unroll
        for (int n = 0; n < kTiles / 2; ++n) {
            u32 values[4];
            load_matrices_transposed(values, value_line ^ (u32)(n << 5));
            T::mma(acc[2 * n], p[0], p[1], p[2], p[3], values[0], values[1]);
            T::mma(acc[2 * n + 1], p[0], p[1], p[2], p[3], values[2], values[3]);
        }
        __syncwarp();
    }
    copy_wait<0>();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        sum[half] += __shfl_xor_sync(kFull, sum[half], 1);
        sum[half] += __shfl_xor_sync(kFull, sum[half], 2);
    }

    // The warps' parts meet in shared memory, where no copy is under way any more.
    __shared__ float2 warp_statistics[kWarps][kHeads];
    __syncthreads();
    constexpr int kStride = kDim + 8;
    float* warp_acc = reinterpret_cast<float*>(shared) + warp * (kHeads * kStride);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        *reinterpret_cast<float2*>(warp_acc + g * kStride + 8 * n + 2 * t) = float2{acc[n][0], acc[n][1]};
        *reinterpret_cast<float2*>(warp_acc + (g + 8) * kStride + 8 * n + 2 * t) = float2{acc[n][2], acc[n][3]};
    }
    if (t == 0) {
        warp_statistics[warp][g] = float2{maximum[0], sum[0]};
        warp_statistics[warp][g + 8] = float2{maximum[1], sum[1]};
    }
    __syncthreads();
    i64 place = (row * args.parts + part) * kHeads;
#pragma unroll 2
    for (int i = threadIdx.x; i < group * (kDim / 4); i += kThreads) {
        int head = i / (kDim / 4), column = i % (kDim / 4) * 4;
        float most = -kInfinity, weight = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) most = fmaxf(most, warp_statistics[w][head].x);
        float shift = most == -kInfinity ? 0.0f : most;
        float4 merged = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            float factor = exp2_fast(warp_statistics[w][head].x - shift);
            weight += warp_statistics[w][head].y * factor;
            float4 x = *reinterpret_cast<const float4*>(
                reinterpret_cast<const float*>(shared) + (w * kHeads + head) * kStride + column);
            merged.x += x.x * factor, merged.y += x.y * factor, merged.z += x.z * factor, merged.w += x.w * factor;
        }
        if (active == 1) {
            float inverse = 1.0f / weight;
            uint2 packed = {T::pack(merged.x * inverse, merged.y * inverse), T::pack(merged.z * inverse, merged.w * inverse)};
            *reinterpret_cast<uint2*>(out + head * kDim + column) = packed;
        } else {
            *reinterpret_cast<float4*>(args.partial + (place + head) * kDim + column) = merged;
            if (column == 0) args.statistics[place + head] = float2{most, weight};
        }
    }
}

// `one`: for a token that selects, alone in its step, whose context is short: more warps, which each take less.
#define NARROW(type, suffix, dim, stages)                                                       \
    extern "C" __global__ void __launch_bounds__(128, 2)                                        \
        narrow_##suffix##_d##dim(const Batch batch, const Arena arena, const Attend args) {     \
        narrow<type, dim, 4, stages>(batch, arena, args);                                       \
    }                                                                                           \
    extern "C" __global__ void __launch_bounds__(256, 1)                                        \
        narrow_one_##suffix##_d##dim(const Batch batch, const Arena arena, const Attend args) { \
        narrow<type, dim, 8, 2>(batch, arena, args);                                            \
    }

NARROW(F16, f16, 64, 4)
NARROW(F16, f16, 128, 3)
NARROW(BF16, bf16, 64, 4)
NARROW(BF16, bf16, 128, 3)
