"""Small launches of what drafts and verifies trees, for the sanitizer, which slows every kernel down:

compute-sanitizer --tool memcheck (or racecheck) python tests/plugins/sanitize_trees.py
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch


def grow_trees(rig, array) -> None:
    from test_draft_tree import cuda_tree

    from plugins_trt.draft_tree.contract import DraftGrow, DraftTop, parts_of
    from plugins_trt.draft_tree.launch import TreeGrower

    grower = TreeGrower(rig.kernels.operator("draft_tree"))
    for width, levels, vocabulary in ((10, 3, 5000), (16, 5, 257), (1, 2, 2048), (3, 1, 9)):
        state = cuda_tree(width, levels, vocabulary)
        for level in range(levels):
            rows, parts = 1 if level == 0 else width, parts_of(vocabulary)
            logits = torch.randn(rows, vocabulary).cuda()
            candidates = torch.zeros(rows, parts, width, dtype=torch.int64).cuda()
            statistics = torch.zeros(rows, parts, 2).cuda()
            torch.cuda.synchronize()
            grower.top(DraftTop(array(logits), array(candidates), array(statistics)), rig.stream)
            known = {name: array(tensor) for name, tensor in state.items()}
            shape = {"level": level, "levels": levels, "first_row": 64}
            grower.grow(DraftGrow(array(candidates), array(statistics), **known, **shape), rig.stream)
            rig.stream.synchronize()
        assert int(state["tokens"].max()) < vocabulary


def verify_trees(rig, make_case, array, random_parents) -> None:
    from sanitize_case import on_gpu

    from plugins_trt.commit.contract import Commit
    from plugins_trt.commit.launch import Committer
    from plugins_trt.verify_tree.contract import VerifyTree
    from plugins_trt.verify_tree.launch import TreeVerifier

    rng = random.Random(0)
    parents = [random_parents(40, rng, 0.9), random_parents(20, rng, 0.5)]
    case = on_gpu(make_case([(100, 40), (30, 20)], heads=4, kv_heads=2, dim=64, tokens=64, parents=parents))
    tokens = torch.ones(64, dtype=torch.int32).cuda()
    paths, accepted = torch.zeros(2, 64, dtype=torch.int32).cuda(), torch.zeros(2, dtype=torch.int32).cuda()
    batch = case.batch
    args = VerifyTree(batch, array(tokens), array(tokens), array(paths), array(accepted))
    torch.cuda.synchronize()
    TreeVerifier(rig.kernels.operator("verify_tree"))(args, rig.stream)
    commit = Committer(rig.kernels.operator("commit"), dtype="bfloat16", head_dim=64)
    commit(Commit(batch, case.arena, array(paths), array(accepted)), rig.stream)
    rig.stream.synchronize()
    assert int(accepted.min()) > 1


def write_rows(rig, array) -> None:
    from plugins_trt.draft_input.contract import DraftInput
    from plugins_trt.draft_input.launch import DraftInputWriter

    size, rows = 136, 5
    embedding, norm = torch.randn(50, size).bfloat16().cuda(), torch.ones(size).bfloat16().cuda()
    numbers = torch.tensor([0, 49, -1, 3, 7], dtype=torch.int32).cuda()
    out = torch.zeros(rows, 2 * size).bfloat16().cuda()
    blocks, counts = (torch.zeros(shape, dtype=torch.int32).cuda() for shape in ((rows, 2, 3), (rows, 2)))
    positions = torch.tensor([0, 63, 0, 64, 1000], dtype=torch.int32).cuda()
    args = DraftInput(
        array(embedding), array(numbers), array(embedding), array(numbers), array(positions), array(out),
        array(blocks), array(counts), array(norm), array(norm), 2.0,
    )  # fmt: skip
    torch.cuda.synchronize()
    DraftInputWriter(rig.kernels.operator("draft_input"), dtype="bfloat16")(args, rig.stream)
    rig.stream.synchronize()
    assert not out.isnan().any()


def main() -> None:
    here = Path(__file__).resolve().parent
    sys.path[:0] = [str(here.parent.parent), str(here)]
    from decode_cases import array, gpu, make_case, random_parents

    rig = gpu()
    grow_trees(rig, array)
    verify_trees(rig, make_case, array, random_parents)
    write_rows(rig, array)
    sys.stdout.write("done\n")


if __name__ == "__main__":
    main()
