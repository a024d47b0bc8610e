// Finds the path of each sequence's tree that the target's tokens follow. A thread block a sequence, a thread a node.
//
// A node is right if its token is the one drawn at its parent, and no earlier child of that parent is. It is accepted
// if it and all its ancestors are right, which its mask says in one comparison; its depth is its place on the path.
#include "common.cuh"

struct Verify {
    const i32* token_ids;  // [T]
    const i32* targets;    // [T]
    const i32* given;      // [sequences] n > 0: the first n nodes are right; below 0: nothing is accepted; or null
    i32* paths;            // [sequences, 64]
    i32* accepted;         // [sequences]
};

constexpr int kNodes = 64;

extern "C" __global__ void __launch_bounds__(kNodes) verify_tree(const Batch batch, const Verify args) {
    __shared__ i32 first_right[kNodes];
    __shared__ u32 right[kNodes / 32];
    wait_for_dependencies();
    launch_dependents();
    int sequence = blockIdx.x, node = threadIdx.x;
    int start = batch.sequence_starts[sequence], nodes = batch.sequence_starts[sequence + 1] - start;
    int given = args.given == nullptr ? 0 : args.given[sequence];
    if (nodes <= 0 || given != 0) {
        int accepted = nodes <= 0 || given < 0 ? 0 : min_int(given, min_int(nodes, kNodes));
        if (node < accepted) args.paths[sequence * kNodes + node] = node;
        if (node == 0) args.accepted[sequence] = accepted;
        return;
    }
    first_right[node] = kNodes;
    __syncthreads();
    u64 mask = node < nodes ? batch.tree_masks[start + node] : 0;  // (0: no node)
    u64 above = mask & ~(1ull << node);
    int parent = above == 0 ? 0 : 63 - __clzll(above);
    bool follows = above != 0 && args.token_ids[start + node] == args.targets[start + parent];
    if (follows) atomicMin(&first_right[parent], node);
    __syncthreads();
    bool is_right = mask != 0 && (node == 0 || (follows && first_right[parent] == node));
    u32 of_warp = __ballot_sync(kFull, is_right);
    if (node % 32 == 0) right[node / 32] = of_warp;
    __syncthreads();
    u64 all_right = (u64)right[0] | (u64)right[1] << 32;
    bool is_accepted = is_right && (mask & ~all_right) == 0;
    if (is_accepted) args.paths[sequence * kNodes + __popcll(mask) - 1] = node;
    int accepted = __syncthreads_count(is_accepted);
    if (node == 0) args.accepted[sequence] = accepted;
}
