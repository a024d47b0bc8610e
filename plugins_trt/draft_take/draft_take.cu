// The rows of the tokens that a sequence has accepted, for a draft that goes on before the host has seen them. One thread
// block, a thread a row.
#include "common.cuh"

struct Take {
    const i32* drawn;     // [T], by row of the step
    const i32* path;      // [64] rows of the step
    const i32* accepted;  // [1]
    const i32* lengths;   // [1] rows that the draft has
    i32* token_ids;       // [64]; -1: padding
    i32* hidden_rows;     // [64]
    i32* positions;       // [64]
    i32* starts;          // [2]
    i32* tree_lengths;    // [1]
    i32* root_row;        // [1]
};

constexpr int kRows = 64;

extern "C" __global__ void __launch_bounds__(kRows) draft_take(const Take args) {
    wait_for_dependencies();
    launch_dependents();
    int row = threadIdx.x, accepted = args.accepted[0], length = args.lengths[0];
    bool is_taken = row < accepted;
    int node = is_taken ? args.path[row] : 0;
    args.token_ids[row] = is_taken ? args.drawn[node] : -1;
    args.hidden_rows[row] = node;
    args.positions[row] = is_taken ? length + row : 0;
    if (row == 0) {
        args.starts[0] = 0, args.starts[1] = accepted;
        args.tree_lengths[0] = length + accepted;
        args.root_row[0] = max_int(accepted - 1, 0);
    }
}
