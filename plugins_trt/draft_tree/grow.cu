// One level of a draft's tree: the likeliest tokens below each node that was run become its children in the pool, and the
// likeliest of these by joint probability are the rows that run next. One thread block, a warp a row.
#include "draft_tree/keys.cuh"

struct Grow {
    const u64* candidates;     // [rows, parts, width] keys, falling
    const float2* statistics;  // [rows, parts]
    const i32* token_map;      // token ids of the logits' columns, or null
    const i32* lengths;        // [1] tokens before the tree
    const i32* root_row;       // [1] row of the layer's outputs that stands for the root
    i32* tokens;               // [width + width² (levels - 1)] the pool
    i32* parents;              // likewise: place in the pool, -1: the root
    float* chances;            // likewise: probability given the parent
    float* joint;              // [width] of the rows that ran, by themselves and their ancestors
    i32* nodes;                // [width] their places in the pool
    i32* token_ids;            // [levels - 1, width] what runs
    i32* hidden_rows;          // likewise
    i32* positions;            // likewise
    u64* masks;                // likewise
    i32 parts;
    i32 width;
    i32 level;                 // of the children: 0 below the root
    i32 levels;
    i32 first_row;             // row of the layer's outputs of the first node that runs
    i32 unused;
};

constexpr int kMostWidth = 16;
constexpr int kLists = 8;  // lists that a lane merges at most

extern "C" __global__ void __launch_bounds__(32 * kMostWidth) draft_grow(const Grow args) {
    __shared__ float joint[kMostWidth * kMostWidth];
    __shared__ i32 chosen[kMostWidth];
    __shared__ u64 kept_masks[kMostWidth];
    wait_for_dependencies();
    launch_dependents();
    int lane = threadIdx.x & 31, row = threadIdx.x >> 5, width = args.width, level = args.level;
    int first = level == 0 ? 0 : width + (level - 1) * width * width;  // in the pool
    float above = 1.0f;
    i32 parent = -1;
    if (level > 0) {
        above = args.joint[row], parent = args.nodes[row];
        if (lane == 0) kept_masks[row] = args.masks[(level - 1) * width + row];
    }
    // Each lane has some of the row's lists, and knows how far it has come in each.
    float largest = -kInfinity;
    for (int part = lane; part < args.parts; part += 32)
        largest = fmaxf(largest, args.statistics[(i64)row * args.parts + part].x);
    largest = warp_max(largest);
    float total = 0.0f;
    for (int part = lane; part < args.parts; part += 32) {
        float2 of_part = args.statistics[(i64)row * args.parts + part];
        if (of_part.x > -kInfinity) total += of_part.y * expf(of_part.x - largest);
    }
    total = warp_sum(total);
    const u64* lists = args.candidates + (i64)row * args.parts * width;
    u64 heads[kLists];
    i32 places[kLists];
#pragma unroll
    for (int i = 0; i < kLists; ++i) {
        int part = lane + 32 * i;
        places[i] = 0;
        heads[i] = part < args.parts ? lists[(i64)part * width] : 0;
    }
    for (int child = 0; child < width; ++child) {
        u64 best = 0;
#pragma unroll
        for (int i = 0; i < kLists; ++i) best = best > heads[i] ? best : heads[i];
        best = warp_largest(best);
#pragma unroll
        for (int i = 0; i < kLists; ++i) {
            if (heads[i] == best && best != 0) {
                int next = ++places[i];
                heads[i] = next < width ? lists[(i64)(lane + 32 * i) * width + next] : 0;
            }
        }
        if (lane == 0) {
            int id = best == 0 ? 0 : id_of(best);
            float chance = best == 0 ? 0.0f : expf(logit_of(best) - largest) / total;
            int place = first + row * width + child;
            args.tokens[place] = args.token_map == nullptr ? id : args.token_map[id];
            args.parents[place] = parent;
            args.chances[place] = chance;
            joint[row * width + child] = above * chance;
        }
    }
    __syncthreads();
    if (level + 1 == args.levels || row > 0) return;

    // The likeliest `width` of all children, in the order of their places.
    int children = level == 0 ? width : width * width;
    constexpr int kMine = kMostWidth * kMostWidth / 32;
    u64 keys[kMine];
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
        int child = lane + 32 * i;
        keys[i] = child < children ? key_of(joint[child], child) : 0;
    }
    for (int found = 0; found < width; ++found) {
        u64 best = 0;
#pragma unroll
        for (int i = 0; i < kMine; ++i) best = best > keys[i] ? best : keys[i];
        best = warp_largest(best);
#pragma unroll
        for (int i = 0; i < kMine; ++i)
            if (keys[i] == best) keys[i] = 0;
        if (lane == 0) chosen[found] = id_of(best);
    }
    __syncwarp();
    if (lane >= width) return;
    int child = chosen[lane], place = 0;
    for (int i = 0; i < width; ++i) place += chosen[i] < child;
    int above_row = child / width, at = level * width + place;
    args.joint[place] = joint[child];
    args.nodes[place] = first + child;
    args.token_ids[at] = args.tokens[first + child];
    args.positions[at] = args.lengths[0] + level;
    // The row of its parent, which ran a level earlier; below the root it is the root's.
    args.hidden_rows[at] = level == 0 ? args.root_row[0] : args.first_row + (level - 1) * width + above_row;
    args.masks[at] = (level == 0 ? 0 : kept_masks[above_row]) | 1ull << at;
}
