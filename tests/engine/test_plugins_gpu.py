"""An attention node on a GPU, made by its creator from TensorRT's registry: what it enqueues through TensorRT's base
classes, also inside a captured graph, equals the reference, and a launch of the kernels alone to the bit.

The bindings are the first of `BINDINGS` that is installed. `pip install tensorrt-lean-cu13-libs
tensorrt-lean-cu13-bindings` (44 MB) is the smallest that brings the registry and the base classes.
"""

from __future__ import annotations

from typing import Any

import pytest
from gpu_case import bindings, created, descriptions, first_gpu

from plugins_trt.arena import Arena
from plugins_trt.contract import Batch, DeviceArray, SelectionRule
from plugins_trt.tensorrt.attention_plugin import ALWAYS_DENSE, AttentionOperator
from plugins_trt.tensorrt.device_session import DeviceSession

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, DIM, LAYERS, PAGES, PER_SEQUENCE = 8, 2, 64, 2, 40, 16
WIDTH = (HEADS + 2 * KV_HEADS) * DIM
STEPS = {
    "decode": ([700, 90], [1, 1], False),
    "tree": ([700, 90], [5, 3], True),
    "chunk": ([640, 63], [100, 80], False),
}
"""Tokens stored, tokens brought, whether these are a tree."""
RULE = SelectionRule(init_blocks=1, window=128, top_k=4, dense_below=256)


@pytest.fixture(scope="module")
def trt() -> Any:
    return bindings()


@pytest.fixture(scope="module")
def gpu() -> Any:
    return first_gpu()


class Step:
    """Tensors of one step of two sequences, in pages that earlier tokens fill."""

    def __init__(self, gpu: Any, lengths: list[int], new: list[int], *, tree: bool) -> None:
        torch = gpu.torch
        random = torch.Generator("cuda").manual_seed(1)

        def normal(*shape: int) -> Any:
            return torch.randn(shape, generator=random, device="cuda").to(torch.bfloat16)

        def int32(values: list[int]) -> Any:
            return torch.tensor(values, dtype=torch.int32, device="cuda")

        tokens = sum(new)
        self.pools = [normal(LAYERS, PAGES, KV_HEADS, slots, DIM) for slots in (64, 64, 4, 1)]
        order = torch.randperm(PAGES, generator=random, device="cuda")[: 2 * PER_SEQUENCE]
        starts = [0, new[0], tokens]
        own = [row for count in new for row in range(count)]
        depths = [min(row, 1) for row in own] if tree else own  # a root with leaves, or a chain
        words = [1 | 1 << row for row in own] if tree else [0] * tokens
        stored = [length for length, count in zip(lengths, new, strict=True) for _ in range(count)]
        self.positions = int32([base + depth for base, depth in zip(stored, depths, strict=True)])
        halves = torch.tensor(words, dtype=torch.int64, device="cuda").view(torch.int32).view(tokens, 2)
        angles = torch.outer(
            torch.arange(2048, device="cuda"), 10000.0 ** -torch.linspace(0, 1, 32, device="cuda")
        )
        self.inputs = [
            normal(tokens, WIDTH),
            self.positions,
            int32(starts),
            int32(lengths),
            order.to(torch.int32).view(2, PER_SEQUENCE).contiguous(),
            halves.contiguous(),
            angles.cos().contiguous(),
            angles.sin().contiguous(),
            normal(DIM),
            normal(DIM),
        ]
        self.words, self.starts, self.lengths = words if tree else None, starts, lengths
        self.out = torch.full((tokens, HEADS * DIM), float("nan"), dtype=torch.bfloat16, device="cuda")

    @property
    def arena(self) -> Arena:
        keys, values, fine, coarse = (pool.data_ptr() for pool in self.pools)
        return Arena.contiguous(
            LAYERS, PAGES, KV_HEADS, DIM, "bfloat16", keys=keys, values=values, fine=fine, coarse=coarse
        )


def expected(step: Step, rule: SelectionRule | None, epsilon: float) -> Any:
    """The node's output by the operators' references, float32 [T, HEADS * DIM]; `step` is left as it is."""
    import torch

    from plugins_trt.append import reference as append_reference
    from plugins_trt.decode_attention.reference import attend
    from plugins_trt.decode_selection.reference import block_scores, choose

    qkv, positions, _, _, tables, _, cosine, sine, q_norm, k_norm = step.inputs
    pages = append_reference.Pages(*(pool[1].clone() for pool in step.pools))
    q, k, v = qkv.view(len(qkv), -1, DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    appended = append_reference.append(
        pages,
        q,
        k,
        v,
        sequence_starts=step.starts,
        lengths=step.lengths,
        page_tables=tables,
        positions=positions,
        cosine=cosine,
        sine=sine,
        q_norm=q_norm,
        k_norm=k_norm,
        epsilon=epsilon,
        tree_masks=step.words,
    )
    out = torch.zeros(len(qkv), HEADS, DIM, device="cuda")
    for sequence, length in enumerate(step.lengths):
        for token in range(step.starts[sequence], step.starts[sequence + 1]):
            place = {
                "length": length,
                "position": int(positions[token]),
                "mask": None if step.words is None else step.words[token],
            }
            chosen = None
            if rule is not None and place["position"] + 1 >= rule.dense_below:
                scores = block_scores(
                    pages,
                    appended.q[token],
                    tables[sequence],
                    rule=rule,
                    start=step.starts[sequence],
                    node_fine=appended.node_fine,
                    node_coarse=appended.node_coarse,
                    **place,
                )
                chosen = choose(scores, rule)
            out[token] = attend(pages, appended.q[token], tables[sequence], chosen=chosen, **place)
    return out.flatten(1)


@pytest.mark.parametrize("rule", [None, RULE], ids=["dense", "sparse"])
@pytest.mark.parametrize("kind", ["decode", "tree", "chunk"])
def test_a_node_equals_the_reference_and_the_kernels_alone_also_in_a_captured_graph(
    kind: str, rule: SelectionRule | None, trt: Any, gpu: Any
) -> None:
    from plugins_trt.attention.contract import Attention
    from plugins_trt.attention.launch import Attender

    torch = gpu.torch
    lengths, new, tree = STEPS[kind]
    step, alone = (Step(gpu, lengths, new, tree=tree) for _ in range(2))
    wanted = expected(step, rule, 1e-6)
    workspace = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    arrived = torch.zeros(2, KV_HEADS, dtype=torch.int32, device="cuda")
    attender = Attender(gpu.kernels, dtype="bfloat16", heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM)
    operator = AttentionOperator(
        layer=1,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=DIM,
        qk_norm=1,
        epsilon=1e-6,
        dense_below=ALWAYS_DENSE if rule is None else rule.dense_below,
        init_blocks=0 if rule is None else rule.init_blocks,
        window=0 if rule is None else rule.window,
        top_k=0 if rule is None else rule.top_k,
        local_blocks=0 if rule is None else rule.local,
        lse="approximate",
    )
    node = created(trt, operator, "layers.1.attention")
    operator = node.operator  # (epsilon is a float32 field)
    ins, outs = descriptions(trt, step.inputs), descriptions(trt, [step.out])
    node.on_shape_change(ins, outs)
    pointers = [tensor.data_ptr() for tensor in step.inputs]
    session = DeviceSession(
        attender,
        stream=gpu.stream,
        arena=step.arena,
        workspace=DeviceArray.of(workspace),
        arrived=DeviceArray.of(arrived),
    )
    session.tree = tree

    def run() -> None:
        node.enqueue(ins, outs, pointers, [step.out.data_ptr()], 0, gpu.stream.handle)

    qkv, positions, starts, stored, tables, masks, cosine, sine, q_norm, k_norm = alone.inputs
    heads = qkv.view(sum(new), -1, DIM)
    attender(
        Attention(
            batch=Batch(
                sequence_starts=DeviceArray.of(starts),
                lengths=DeviceArray.of(stored),
                page_tables=DeviceArray.of(tables),
                positions=DeviceArray.of(positions),
                tree_masks=DeviceArray(masks.data_ptr(), "int64", (sum(new),)) if tree else None,
            ),
            arena=alone.arena,
            layer=1,
            q=DeviceArray.of(heads[:, :HEADS]),
            k=DeviceArray.of(heads[:, HEADS : HEADS + KV_HEADS]),
            v=DeviceArray.of(heads[:, HEADS + KV_HEADS :]),
            out=DeviceArray.of(alone.out.view(sum(new), HEADS, DIM)),
            cosine=DeviceArray.of(cosine),
            sine=DeviceArray.of(sine),
            workspace=DeviceArray.of(workspace),
            arrived=DeviceArray.of(arrived),
            q_norm=DeviceArray.of(q_norm),
            k_norm=DeviceArray.of(k_norm),
            epsilon=operator.epsilon,
            rule=rule,
        ),
        gpu.stream,
    )
    with session:
        run()
        torch.cuda.synchronize()
        assert torch.isfinite(alone.out).all()
        assert torch.equal(step.out, alone.out)
        rows = (step.out.float() - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert float(rows.median()) < 1e-2
        # A block that scores within rounding of the last one in may be swapped, in a few rows.
        assert int((rows > 2e-2).sum()) <= len(rows) // 20
        for mine, theirs in zip(step.pools, alone.pools, strict=True):
            assert torch.equal(mine, theirs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            run()
    for _ in range(3):
        step.out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(step.out, alone.out)
