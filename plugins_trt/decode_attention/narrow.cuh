// A part of the context of one token and KV head a CTA; see attend.cuh.
#pragma once
#include "decode_attention/units.cuh"

// `kStages`: units that a warp has in shared memory, each keys and values.
// `kMixed`: a warp takes not one unit of a sparse query after the other, but every so many of them, and of three pages one of
// the last third. So the tokens of a step come to a page that several have selected at about the same time, and the last
// pages, which all have and which are in L2, are read beside others that are not.
// Grid: (narrow_parts, kv_heads, tokens).
template <typename Unit, int kWarps, int kStages, bool kMixed = false>
__device__ __forceinline__ void narrow(const Batch& batch, const typename Unit::Pages& arena, const Attend& args) {
    extern __shared__ __align__(1024) unsigned char shared[];
    using T = typename Unit::Output;
    constexpr int kDim = Unit::kDim;
    constexpr int kThreads = kWarps * 32;
    constexpr int kTiles = kDim / 8;          // 8-column tiles of an output row
    constexpr int kPieces = kDim / 8;         // 16-byte pieces of a row of the output
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
    // Behind `wide` everything that is read was complete when this launch began: it waits for `wide` halfway, so that its
    // own end is that of both. Else a dense query finds its pages before it waits, a sparse one (but in a tree) everything
    // but its blocks.
    bool is_late = args.wide_parts > 0;
    bool is_ready = is_late || sequence < 0 || (!dense && batch.tree_masks != nullptr);
    auto release = [&] {
        wait_for_dependencies();
        launch_dependents();
    };
    if (is_ready && !is_late) release();
    u16* out = args.out + ((i64)token * args.heads + kv_head * group) * kDim;
    if (sequence < 0) {
        if (is_late) release();
        if (part == 0) {
            for (int i = threadIdx.x; i < group * kPieces; i += kThreads)
                reinterpret_cast<uint4*>(out)[i] = uint4{0, 0, 0, 0};
        }
        return;
    }
    if (dense && is_wide(args, tokens)) {  // (which there is only where `wide` was launched)
        release();
        return;
    }
    Context context = context_of(batch, args, length, tokens, token, position, kv_head, dense);
    int active = narrow_active(args, context.entries());
    if (part >= active) {
        if (is_late || !is_ready) release();
        return;
    }
    const i32* blocks = dense ? nullptr : args.blocks + row * args.total + context.first;

    // This warp's units: turns from the first to the end, which are the units where those are not mixed.
    constexpr int kKeys = Unit::kKeys, kPerPage = kPage / kKeys;
    bool mixed = kMixed && !dense;
    int units = context.entries() * kPerPage;
    int workers = active * kWarps;
    int worker = part * kWarps + warp;
    int first = mixed ? 0 : (int)((u32)units * (u32)worker / (u32)workers);
    int end = mixed ? ceil_div(units - worker, workers) : (int)((u32)units * (u32)(worker + 1) / (u32)workers);
    auto unit_of = [&](int turn) { return mixed ? worker + turn * workers : turn; };

    // Lane l knows the page and the first slot of entry `window + l`, or where units are mixed of turn `window + l`.
    const i32* table = batch.table(sequence);
    auto slot_of = [&](int entry) {  // the first of the entry's page
        if (entry >= context.pages) return (length / kPage + entry - context.pages) * kPage;
        if (mixed) {
            int third = context.pages / 3, turn = entry / 3;
            if (turn >= third) entry -= third;
            else entry = entry % 3 == 2 ? context.pages - third + turn : entry - turn;
        }
        int block = dense ? entry : blocks[entry];
        return block < 0 ? kNothing : block * kPage;
    };
    int window = 0, entry_page = 0, entry_slot = 0;
    auto look_up = [&](int from) {
        window = from;
        int entry = mixed ? unit_of(from + lane) / kPerPage : from + lane;
        entry_slot = entry < context.entries() ? slot_of(entry) : kNothing;
        entry_page = entry_slot < kNothing ? table[entry_slot / kPage] : 0;
    };
    // Rows g and g + 8 are heads of the group. Of a sparse query they were written before the launch before this one.
    typename Unit::Queries q;
    auto load_heads = [&] {
        Unit::load_heads(q, args.q + ((i64)token * args.heads + kv_head * group) * kDim, group, lane);
    };
    auto wait = [&] {
        release();
        is_ready = true;
    };
    if (dense) {
        look_up(mixed ? 0 : first / kPerPage);
        if (is_ready) load_heads();
    } else {
        load_heads();
        if (!is_ready) wait();
        look_up(mixed ? 0 : first / kPerPage);
    }

    u32 base = shared_address(shared) + warp * (kStages * Unit::kBytes);
    auto load = [&](int turn) {
        int unit = unit_of(turn), entry = unit / kPerPage, known = mixed ? turn : entry;
        if (known >= window + 32) look_up(known);
        int page = __shfl_sync(kFull, entry_page, known - window);
        int slot = __shfl_sync(kFull, entry_slot, known - window) + unit % kPerPage * kKeys;
        int limit = entry < context.pages ? context.limit : context.nodes_end;
        u32 stage = base + (u32)((turn - first) % kStages) * Unit::kBytes;
        Unit::load(arena, page, kv_head, slot, limit, stage, lane);
    };
    float acc[kTiles][4] = {};
    float maximum[2] = {-kInfinity, -kInfinity};
    float sum[2] = {0.0f, 0.0f};
    // Loads run kStages - 1 units ahead; the first rounds only load.
#pragma unroll 1
    for (int turn = first - (kStages - 1); turn < end; ++turn) {
        // The stage that is filled now was read in the last round, by this warp alone.
        int ahead = turn + kStages - 1;
        // Of a dense query, what was stored before this step is under way before the launch before has ended.
        if (!is_ready && (turn >= first || (ahead < end && (ahead + 1) * kKeys > length))) {
            wait();
            load_heads();
        }
        if (ahead < end) load(ahead);
        copy_commit();
        if (is_late && 2 * turn >= first + end) release(), is_late = false;
        if (turn < first) continue;
        copy_wait<kStages - 1>();
        __syncwarp();
        Unit here(base + (u32)((turn - first) % kStages) * Unit::kBytes, lane);
        float s[kKeys / 8][4] = {};
        here.scores(s, q, lane);

        // (Loads ahead may have moved the window past this unit.)
        int unit = unit_of(turn), entry = unit / kPerPage, known = mixed ? turn : entry;
        int slot = __shfl_sync(kFull, entry_slot, (known - window) & 31);
        if (known < window) slot = slot_of(entry);
        slot += unit % kPerPage * kKeys;
        if (entry < context.pages) {
            if (slot + kKeys > context.limit) {
#pragma unroll
                for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (slot + 8 * n + 2 * t + (i & 1) >= context.limit) s[n][i] = -kInfinity;
            }
        } else {
#pragma unroll
            for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    int node = slot + 8 * n + 2 * t + (i & 1) - length;
                    if (node < 0 || node >= 64 || ((context.path >> node) & 1) == 0) s[n][i] = -kInfinity;
                }
        }

        u32 p[kKeys / 16][4];
        float factors[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // rows g and g + 8
            float most = fmaxf(s[0][2 * half], s[0][2 * half + 1]);
#pragma unroll
            for (int n = 1; n < kKeys / 8; ++n) most = fmaxf(most, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
            most = fmaxf(most, __shfl_xor_sync(kFull, most, 1));
            most = fmaxf(most, __shfl_xor_sync(kFull, most, 2));
            most = fmaxf(most * args.scale, maximum[half]);
            float shift = most == -kInfinity ? 0.0f : most;
            float factor = exp2_fast(maximum[half] - shift);
            maximum[half] = most;
            sum[half] *= factor;
#pragma unroll
            for (int n = 0; n < kKeys / 8; ++n) {
                float even = exp2_fast(fmaf(s[n][2 * half], args.scale, -shift));
                float odd = exp2_fast(fmaf(s[n][2 * half + 1], args.scale, -shift));
                sum[half] += even + odd;
                p[n / 2][n % 2 * 2 + half] = here.pack(even, odd, n);
            }
            factors[half] = factor;
            if constexpr (Unit::kAlwaysScales) {
#pragma unroll
                for (int n = 0; n < kTiles; ++n) {
                    acc[n][2 * half] *= factor;
                    acc[n][2 * half + 1] *= factor;
                }
            }
        }
        if constexpr (!Unit::kAlwaysScales) {  // once the maxima have settled, nothing needs it
            if (__any_sync(kFull, factors[0] != 1.0f || factors[1] != 1.0f)) {
#pragma unroll
                for (int n = 0; n < kTiles; ++n) {
                    acc[n][0] *= factors[0], acc[n][1] *= factors[0];
                    acc[n][2] *= factors[1], acc[n][3] *= factors[1];
                }
            }
        }
        here.add_values(acc, p, lane);
        __syncwarp();
    }
    if (is_late || !is_ready) release();
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
    Unit::store(warp_acc, kStride, acc, lane);
    if (t == 0) {
        warp_statistics[warp][g] = float2{maximum[0], sum[0]};
        warp_statistics[warp][g + 8] = float2{maximum[1], sum[1]};
    }
    __syncthreads();
    i64 place = (row * args.parts + context.before + part) * kHeads;
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
        if (active + context.before == 1) {
            float inverse = 1.0f / weight;
            uint2 packed = {T::pack(merged.x * inverse, merged.y * inverse), T::pack(merged.z * inverse, merged.w * inverse)};
            *reinterpret_cast<uint2*>(out + head * kDim + column) = packed;
        } else {
            *reinterpret_cast<float4*>(args.partial + (place + head) * kDim + column) = merged;
            if (column == 0) args.statistics[place + head] = float2{most, weight};
        }
    }
}
