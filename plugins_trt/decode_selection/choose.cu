// The best blocks of each token and KV head, a CTA each, from the scores of all blocks.
#include "decode_selection/choose.cuh"

// Grid: (tokens, kv_heads).
__device__ __forceinline__ void choose_all(const Batch& batch, const Select& args) {
    // The batch was there before the step began.
    int token = blockIdx.x;
    int kv_head = blockIdx.y;
    int position = batch.positions[token];
    int sequence = batch.sequence_of(token);
    bool selects = sequence >= 0 && is_sparse(args, position);
    int stored = selects ? stored_tokens(batch, sequence, position) : 0;
    wait_for_dependencies();
    launch_dependents();
    if (selects) choose_any(batch, args, stored, token, kv_head, position);
    else write_nothing(args, token, kv_head);
}

extern "C" __global__ void __launch_bounds__(kChooseThreads, 1) choose_blocks(
    const __grid_constant__ Batch batch, const __grid_constant__ Select args) {
    choose_all(batch, args);
}
