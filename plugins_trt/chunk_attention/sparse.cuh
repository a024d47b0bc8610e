// Sparse attention of prefill chunks: each token attends to the pages that its own bitmap names.
//
// A block of eight warps takes eight neighbouring tokens (or fewer, with several warps a token when the bucket is
// small) and one KV head; the rows of a warp's MMA tile are the heads of one token. Neighbours agree on much: the
// first and the local blocks always, the others often. What at least three of the eight chose is read once for
// all of them, into tiles that the block shares; the rest each warp reads for itself, through a ring of its own
// that no other warp waits for. A warp carries one running softmax through both.
#pragma once
#include "chunk_attention/rows.cuh"

template <typename Pools>
struct SparseArguments {
    Batch batch;
    Pools pools;
    const u32* chosen;  // [kv_heads, T, words], bit b % 32 of word b / 32: block b
    const u16* q;       // [T, H, kDim]
    u16* out;           // [T, H, kDim]
    i64 q_stride;       // elements from a token to the next
    i64 out_stride;
    i32 heads;
    i32 kv_heads;
    i32 words;
    i32 dense_below;  // a token at position i takes part when i + 1 >= dense_below
    float scale;      // of the scores, times log2 e
    i32 unused;
};

// Walks the set bits of `mine[w] & ~without[w]`, from the lowest.
struct Blocks {
    const u32* mine;
    const u32* without;
    int words;
    int at;
    u32 word;

    __device__ __forceinline__ void start(const u32* mine_, const u32* without_, int words_) {
        mine = mine_;
        without = without_;
        words = words_;
        at = -1;
        word = 0;
    }
    __device__ __forceinline__ int next() {
        while (word == 0) {
            if (++at >= words) {
                at = words;
                return -1;
            }
            word = mine[at];
            if (without != nullptr) word &= ~without[at];
        }
        int block = at * 32 + __ffs((int)word) - 1;
        word &= word - 1;
        return block;
    }
    __device__ __forceinline__ int next_of(int stride) {
        int block = next();
        for (int i = 1; i < stride && block >= 0; ++i) next();
        return block;
    }
};

// Weights of kKeys keys, of which the first is token `first_key` and lies in row 0 of a swizzled tile: p, packed as
// the fragments A of p v. Keys after `position` weigh nothing. `scales` is where those of quantized rows lie.
template <typename Rows, int kKeys, int kDim = Rows::kDim>
__device__ __forceinline__ void weigh(u32 (&p)[kKeys / 8][2], float (&o)[kDim / 8][4], Softmax& softmax,
                                      const u32 (&q)[kDim / 16][4], u32 keys, u32 scales, int first_key, int position,
                                      float scale) {
    const int lane = (int)(threadIdx.x & 31);
    float s[kKeys / 8][4];
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] = 0.0f;
    Rows::template scores<kKeys>(s, q, keys, scales);
    if (first_key + kKeys - 1 > position) {
        const int key = first_key + (lane & 3) * 2;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (key + n * 8 + (i & 1) > position) s[n][i] = -kInfinity;
    }
    softmax.update(s, p, o, scale, typename Rows::template Packer<kKeys>(scales));
}

// kWarps warps, kSplit of them a token; a warp's ring holds kSlots tiles of kSlotKeys keys or values.
template <typename Rows, int kSplit, int kSlotKeys, int kSlots>
__device__ __forceinline__ void sparse_chunk(const SparseArguments<typename Rows::Pools>& args) {
    using E = typename Rows::E;
    constexpr int kDim = Rows::kDim;
    extern __shared__ __align__(256) unsigned char memory[];
    constexpr int kWarps = 8, kThreads = kWarps * 32, kTokens = kWarps / kSplit;
    constexpr u32 kSlotBytes = Rows::template kUnitBytes<kSlotKeys>;
    constexpr u32 kRingBytes = kSlots * kSlotBytes;
    constexpr u32 kTileBytes = Rows::kTileBytes;
    constexpr int kStages = (int)(kWarps * kRingBytes / Rows::kPageBytes);  // shared pages of keys and values
    static_assert(kSplit > 1 || kStages >= 2, "the shared pages need two stages");
    static_assert(kRingBytes >= 16 * kDim * 2, "a ring stages a token's output");
    __shared__ u64 barriers[kSplit == 1 ? 2 * kStages : 1];  // of the shared stages: whole, and left by the warps
    u32* own = reinterpret_cast<u32*>(memory + kWarps * kRingBytes);  // [kTokens, words]
    u32* together = own + kTokens * args.words;                       // [words]

    const int thread = (int)threadIdx.x, warp = thread >> 5, lane = thread & 31;
    const int head = (int)blockIdx.y, group = args.heads / args.kv_heads;
    const Tile tile = find_tile(args.batch, (int)blockIdx.x, kTokens);
    if (tile.count == 0) return;
    if (tile.sequence < 0) {
        zero_rows<kDim>(args.out, args.out_stride, tile.first, tile.count, head, group, thread, kThreads);
        return;
    }
    const int first_position = args.batch.positions[tile.first];
    const int last_position = first_position + tile.count - 1;
    if (last_position + 1 < args.dense_below) return;

    const int slot_token = warp / kSplit;
    const int position = first_position + slot_token;
    const bool active = slot_token < tile.count && position + 1 >= args.dense_below;
    const int words = last_position / kPage / 32 + 1;

    // Bitmaps of the tile's tokens; blocks after a token's own are dropped whatever the bitmap says.
    for (int i = thread; i < kTokens * words; i += kThreads) {
        int token = i / words, word = i % words;
        u32 bits = 0;
        int last = (first_position + token) / kPage;
        if (token < tile.count && first_position + token + 1 >= args.dense_below && word <= last / 32) {
            bits = args.chosen[((i64)head * args.batch.tokens + tile.first + token) * args.words + word];
            if (word == last / 32) bits &= 0xffffffffu >> (31 - last % 32);
        }
        own[token * words + word] = bits;
    }
    __syncthreads();
    if (kSplit == 1) {
        if (thread < kStages) {
            barrier_start(shared_address(barriers + thread), kThreads);
            barrier_start(shared_address(barriers + kStages + thread), kThreads);
        }
        for (int word = thread; word < words; word += kThreads) {
            u32 ones = 0, twos = 0, fours = 0;  // votes of each block, a bit-sliced count that stays at 4 and above
#pragma unroll
            for (int token = 0; token < kTokens; ++token) {
                u32 bits = own[token * words + word];
                u32 carry = ones & bits;
                ones ^= bits;
                u32 carry2 = twos & carry;
                twos ^= carry;
                fours |= carry2;
            }
            together[word] = fours | (twos & ones);  // at least 3
        }
        __syncthreads();
    }

    u32 q[kDim / 16][4];
    {
        const u16* rows = args.q + (i64)(tile.first + (active ? slot_token : 0)) * args.q_stride + head * group * kDim;
        Rows::load_heads(q, rows, active ? group : 0, lane);
    }
    float o[kDim / 8][4];
    Softmax softmax;
    softmax.clear();
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[n][i] = 0.0f;

    const int* table = args.batch.table(tile.sequence);
    const typename Rows::Source source = Rows::source(args.pools, head);
    const u32 rings = shared_address(memory);

    // Blocks that at least three of the tile's tokens chose. No warp waits for another: a stage is filled anew when all
    // warps have left it, and they may be some stages apart.
    if constexpr (kSplit == 1) {
        constexpr int kAhead = kStages > 2 ? kStages - 2 : 1;
        const u32 whole = shared_address(barriers), empty = whole + kStages * 8;
        Blocks ahead, now;
        ahead.start(together, nullptr, words);
        now.start(together, nullptr, words);
        int block = ahead.next();
        int page = block >= 0 ? table[block] : 0;
        auto load_next = [&](int index) {
            if (block < 0) return;
            const u32 stage = (u32)(index % kStages);
            if (index >= kStages) barrier_wait(empty + stage * 8, (index / kStages - 1) & 1);
            const int valid = tile.stored - block * kPage;
            Rows::template copy_page<kThreads>(rings + stage * Rows::kPageBytes, args.pools, source, page, valid, thread);
            barrier_arrive_copied(whole + stage * 8);
            block = ahead.next();
            page = block >= 0 ? table[block] : 0;
        };
#pragma unroll 1
        for (int index = 0; index < kAhead; ++index) load_next(index);
        int index = 0;
#pragma unroll 1
        for (int current = now.next(); current >= 0; current = now.next(), ++index) {
            load_next(index + kAhead);
            const u32 stage = (u32)(index % kStages);
            if (own[slot_token * words + (current >> 5)] >> (current & 31) & 1u) {
                const u32 keys = rings + stage * Rows::kPageBytes;
                barrier_wait(whole + stage * 8, index / kStages & 1);
                u32 p[8][2];
                weigh<Rows, kPage>(p, o, softmax, q, keys, keys + 2 * kTileBytes, current * kPage, position, args.scale);
                Rows::template weighted<kPage>(o, p, keys + kTileBytes);
            }
            __syncwarp();
            barrier_arrive(empty + stage * 8);
        }
        __syncthreads();
    }

    // Blocks of this warp's token alone: units of kSlotKeys keys, then their values, through the warp's ring.
    {
        const u32 ring = rings + (u32)warp * kRingBytes;
        const u32* mine = own + slot_token * words;
        const u32* without = kSplit == 1 ? together : nullptr;
        Blocks ahead, now;
        ahead.start(mine, without, words);
        now.start(mine, without, words);
        for (int i = 0; i < warp % kSplit; ++i) {
            ahead.next();
            now.next();
        }
        int block = ahead.next_of(kSplit);
        int page = block >= 0 ? table[block] : 0;
        int next_block = ahead.next_of(kSplit);
        int next_page = next_block >= 0 ? table[next_block] : 0;
        int unit = 0;  // of the block: keys 0, values 0, keys 1, ...
        int free_slot = 0;
        auto load_next = [&]() {
            if (block >= 0) {
                const int row = (unit >> 1) * kSlotKeys;
                const bool is_values = unit & 1;
                Rows::template copy_unit<kSlotKeys>(ring + (u32)free_slot * kSlotBytes, args.pools, source, is_values,
                                                    page, row, tile.stored - block * kPage - row, lane);
                if (++unit == 2 * kPage / kSlotKeys) {
                    unit = 0;
                    block = next_block;
                    page = next_page;
                    next_block = ahead.next_of(kSplit);
                    next_page = next_block >= 0 ? table[next_block] : 0;
                }
            }
            copy_commit();
            free_slot = free_slot + 1 == kSlots ? 0 : free_slot + 1;
        };
#pragma unroll 1
        for (int i = 0; i < kSlots - 1; ++i) load_next();
        int slot = 0;
#pragma unroll 1
        for (int current = now.next_of(kSplit); current >= 0; current = now.next_of(kSplit)) {
#pragma unroll 1
            for (int part = 0; part < kPage / kSlotKeys; ++part) {
                u32 p[kSlotKeys / 8][2];
                __syncwarp();
                load_next();
                copy_wait<kSlots - 1>();
                __syncwarp();
                const u32 keys = ring + (u32)slot * kSlotBytes;
                weigh<Rows, kSlotKeys>(p, o, softmax, q, keys, keys + kSlotKeys * Rows::kRowBytes,
                                       current * kPage + part * kSlotKeys, position, args.scale);
                slot = slot + 1 == kSlots ? 0 : slot + 1;
                __syncwarp();
                load_next();
                copy_wait<kSlots - 1>();
                __syncwarp();
                Rows::template weighted<kSlotKeys>(o, p, ring + (u32)slot * kSlotBytes);
                slot = slot + 1 == kSlots ? 0 : slot + 1;
            }
        }
        copy_wait<0>();
        __syncwarp();
    }

    softmax.finish();
    if constexpr (kSplit > 1) {
        // The warps of a token join their parts, each of them a share of the columns.
        __syncthreads();
        float* parts = reinterpret_cast<float*>(memory);  // [kWarps, 16, kDim + 4]
        float* states = parts + kWarps * 16 * (kDim + 4);  // [kWarps, 16, 2]
        static_assert(kWarps * 16 * (kDim + 4 + 2) * 4 <= kWarps * kRingBytes || kSplit == 1, "the parts fit the rings");
        const int row = lane >> 2;
        Rows::store(parts + warp * 16 * (kDim + 4), kDim + 4, o, lane);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if ((lane & 3) == 0) {
                states[(warp * 16 + row + half * 8) * 2] = softmax.peak[half];
                states[(warp * 16 + row + half * 8) * 2 + 1] = softmax.sum[half];
            }
        }
        __syncthreads();
        for (int i = thread; i < tile.count * group * (kDim / 2); i += kThreads) {
            int column = i % (kDim / 2) * 2, h = i / (kDim / 2) % group, token = i / (kDim / 2) / group;
            if (first_position + token + 1 < args.dense_below) continue;
            float peak = -kInfinity;
            for (int w = 0; w < kSplit; ++w)
                peak = fmaxf(peak, states[((token * kSplit + w) * 16 + h) * 2]);
            float sum = 0.0f, x = 0.0f, y = 0.0f;
            for (int w = 0; w < kSplit; ++w) {
                const int index = (token * kSplit + w) * 16 + h;
                float part_peak = states[index * 2];
                if (part_peak == -kInfinity) continue;
                float weight = exp2_fast((part_peak - peak) * args.scale);
                sum = fmaf(weight, states[index * 2 + 1], sum);
                x = fmaf(weight, parts[index * (kDim + 4) + column], x);
                y = fmaf(weight, parts[index * (kDim + 4) + column + 1], y);
            }
            float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
            *reinterpret_cast<u32*>(args.out + (i64)(tile.first + token) * args.out_stride +
                                    (head * group + h) * kDim + column) = E::pack(x * inverse, y * inverse);
        }
    } else {
        if (!active) return;
        unsigned char* staged = memory + warp * kRingBytes;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float inverse = softmax.sum[half] > 0.0f ? 1.0f / softmax.sum[half] : 0.0f;
            Rows::stage(staged, 0, o, half, inverse, lane);
        }
        __syncwarp();
        constexpr int kPieces = kDim / 8;
        u16* rows = args.out + (i64)(tile.first + slot_token) * args.out_stride + head * group * kDim;
#pragma unroll
        for (int i = 0; i < 16 * kPieces / 32; ++i) {
            int row = (i * 32 + lane) / kPieces, piece = lane % kPieces;
            if (row < group)
                *reinterpret_cast<uint4*>(rows + row * kDim + piece * 8) =
                    *reinterpret_cast<const uint4*>(staged + swizzled<kDim>(row, piece));
        }
    }
}
