"""The node that verifies trees: what it serializes and launches; on a GPU, what it accepts and keeps, also in a graph."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from gpu_case import bindings, created, descriptions, first_gpu
from tensorrt_case import tensorrt_rtx

from plugins_trt.arena import Arena
from plugins_trt.contract import DeviceArray
from plugins_trt.tensorrt import sessions
from plugins_trt.tensorrt.base import make_creator, make_plugin_class
from plugins_trt.tensorrt.device_session import DeviceSession
from plugins_trt.tensorrt.operator import PluginError
from plugins_trt.tensorrt.tree_plugin import VerifyTreeOperator

if TYPE_CHECKING:
    from plugins_trt.commit.contract import Commit
    from plugins_trt.verify_tree.contract import VerifyTree

STREAM = 0x5EA
ARENA = Arena.contiguous(1, 4, 2, 64, "float16", keys=256, values=512, fine=768, coarse=1024)


class Stream:
    handle = STREAM


def session(stream: Any = None, **changes: Any) -> DeviceSession:
    return DeviceSession(
        lambda *_: pytest.fail("there is no attention"),
        stream=stream or Stream(),
        arena=changes.pop("arena", ARENA),
        workspace=DeviceArray(256, "uint8", (1,)),
        arrived=None,
        **changes,
    )


@pytest.fixture(scope="module")
def trt() -> Any:
    return tensorrt_rtx().module


@pytest.fixture(scope="module")
def plugin_class(trt: Any) -> Any:
    return make_plugin_class(trt)


def enqueue(trt: Any, plugin: Any, tokens: int, sequences: int = 2) -> None:
    sizes = {"T": tokens, "S": sequences, "S+1": sequences + 1, "P": 3}
    shapes = [
        [[sizes.get(size, size) for size in port.shape] for port in ports]
        for ports in (plugin.operator.inputs, plugin.operator.outputs)
    ]
    ins, outs = ([described(trt, shape) for shape in each] for each in shapes)
    plugin.on_shape_change(ins, outs)
    plugin.enqueue(ins, outs, [0x1000 * (1 + i) for i in range(7)], [0x10000, 0x20000], 0, STREAM)


def described(trt: Any, shape: list[Any]) -> Any:
    each = trt.PluginTensorDesc()
    each.dims, each.type, each.format = shape, trt.DataType.INT32, trt.TensorFormat.LINEAR
    return each


@pytest.mark.parametrize("keep", [0, 1])
def test_a_node_finds_paths_and_keeps_them_if_told_to(keep: int, trt: Any, plugin_class: Any) -> None:
    creator = make_creator(trt, plugin_class, VerifyTreeOperator)
    written = plugin_class(VerifyTreeOperator(keep), "n").get_fields_to_serialize()
    plugin = creator.create_plugin("n", written, trt.TensorRTPhase.RUNTIME).attach_to_context(None)
    found: list[VerifyTree] = []
    kept: list[Commit] = []
    trees = (lambda args, _: found.append(args), lambda args, _: kept.append(args))
    with session(trees=trees):
        enqueue(trt, plugin, 40)
    (tree,) = found
    assert tree.batch.tokens == 40
    assert tree.batch.tree_masks == DeviceArray(0x7000, "int64", (40,))
    assert (tree.token_ids.pointer, tree.targets.pointer) == (0x1000, 0x2000)
    assert (tree.paths.shape, tree.accepted.shape) == ((2, 64), (2,))
    assert [(args.arena, args.paths, args.accepted) for args in kept] == [
        (ARENA, tree.paths, tree.accepted)
    ] * keep


def test_of_a_chunk_only_as_much_is_looked_at_as_trees_could_have(trt: Any, plugin_class: Any) -> None:
    found: list[VerifyTree] = []
    plugin = plugin_class(VerifyTreeOperator(0), "n").attach_to_context(None)
    with session(trees=(lambda args, _: found.append(args), lambda *_: None)):
        enqueue(trt, plugin, 2048)
    assert found[0].batch.tokens == 128


def test_an_executor_without_kernels_for_trees_says_so(trt: Any, plugin_class: Any) -> None:
    plugin = plugin_class(VerifyTreeOperator(1), "n").attach_to_context(None)
    with session(), pytest.raises(sessions.SessionError, match="brought no kernels for them"):
        enqueue(trt, plugin, 4)
    with pytest.raises(PluginError, match="keep: 2, must be 0 or 1"):
        VerifyTreeOperator.from_fields("n", {"keep": 2})


@pytest.mark.gpu
@pytest.mark.parametrize("length", [0, 31, 100, 127])
def test_a_node_accepts_and_moves_what_the_kernels_alone_do(length: int) -> None:
    """Through TensorRT's base classes, and again in a captured graph."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "plugins"))
    from decode_cases import copy_of, make_case
    from test_append import reference_of

    from plugins_trt.commit.launch import Committer
    from plugins_trt.commit.reference import commit
    from plugins_trt.verify_tree.launch import TreeVerifier
    from plugins_trt.verify_tree.reference import verify_tree

    trt, gpu = bindings(), first_gpu()
    torch = gpu.torch
    parents = [[-1, 0, 0, 1, 2, 4, 4, 6, 7], [-1, 0, 1, 1, 3]]
    case = make_case([(length, 9), (40, 5)], parents=parents, device="cuda", appended=False)
    # Of the first tree nodes 0, 2, 4, 6, 7, 8 hold what is drawn, of the second 0, 1, 3.
    token_ids = torch.tensor([9, 1, 2, 1, 2, 1, 2, 2, 2, 9, 2, 1, 2, 1], dtype=torch.int32, device="cuda")
    targets = torch.full((14,), 2, dtype=torch.int32, device="cuda")
    before, _ = reference_of(case)
    expected = copy_of(before)
    masks = [case.masks[:9], case.masks[9:]]
    paths = [
        verify_tree(token_ids[start:end].cpu(), targets[start:end].cpu(), each)
        for start, end, each in ((0, 9, masks[0]), (9, 14, masks[1]))
    ]
    assert paths == [[0, 2, 4, 6, 7, 8], [0, 1, 3]]
    commit(expected, lengths=case.lengths, page_tables=case.tables, paths=paths)

    words = torch.tensor(case.masks, dtype=torch.int64, device="cuda")
    int32 = [
        torch.tensor(each, dtype=torch.int32, device="cuda")
        for each in (case.positions, case.starts, case.lengths)
    ]
    inputs = [token_ids, targets, *int32, case.tables, words.view(torch.int32).view(14, 2)]
    outputs = [
        torch.full((2, 64), -9, dtype=torch.int32, device="cuda"),
        torch.full((2,), -9, dtype=torch.int32, device="cuda"),
    ]
    trees = (
        TreeVerifier(gpu.kernels.operator("verify_tree")),
        Committer(gpu.kernels.operator("commit"), dtype="bfloat16", head_dim=128),
    )
    node = created(trt, VerifyTreeOperator(1), "tree")
    ins, outs = descriptions(trt, inputs), descriptions(trt, outputs)
    node.on_shape_change(ins, outs)

    def run() -> None:
        pointers = ([each.data_ptr() for each in some] for some in (inputs, outputs))
        node.enqueue(ins, outs, *pointers, 0, gpu.stream.handle)

    def check() -> None:
        torch.cuda.synchronize()
        assert outputs[1].tolist() == [6, 3]
        assert [row[:6] for row in outputs[0].tolist()] == [paths[0], [*paths[1], -9, -9, -9]]
        for name, pool in vars(expected).items():
            torch.testing.assert_close(
                getattr(case.pages, name).float().nan_to_num(7.0),
                pool.float().nan_to_num(7.0),
                rtol=0,
                atol=2e-2 if name in ("fine", "coarse") else 0,  # means are rounded another way
            )

    def reset() -> None:
        for name, pool in vars(before).items():
            getattr(case.pages, name).copy_(pool)
        for each in outputs:
            each.fill_(-9)
        torch.cuda.synchronize()

    with session(gpu.stream, arena=case.arena, trees=trees):
        reset()
        run()
        check()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            run()
    reset()
    graph.replay()
    check()
