"""The plugin classes: what they check, what they serialize, and what a node hands to its session.

Nothing runs on a GPU here: the pointers are numbers. Everything up to the session is the code that runs on one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorrt_case import tensorrt_rtx

from plugins_trt.arena import Arena
from plugins_trt.contract import DeviceArray, LaunchError, SelectionRule
from plugins_trt.tensorrt import sessions
from plugins_trt.tensorrt.attention_plugin import ALWAYS_DENSE, AttentionOperator
from plugins_trt.tensorrt.base import make_creator, make_plugin_class
from plugins_trt.tensorrt.device_session import DeviceSession
from plugins_trt.tensorrt.operator import PluginError, PluginOperator, Port
from plugins_trt.tensorrt.source_hash import source_hash

if TYPE_CHECKING:
    from collections.abc import Iterator

    from plugins_trt.attention.contract import Attention

FIELDS: dict[str, Any] = {
    "layer": 3,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "qk_norm": 0,
    "epsilon": 1e-5,
    "dense_below": 1024,
    "init_blocks": 1,
    "window": 512,
    "top_k": 8,
    "local_blocks": 9,
    "lse": "exact",
}
STREAM = 0x5EA
WIDTH = (4 + 2 * 2) * 64


@dataclass
class Recorder:
    """A session that keeps what it is asked for."""

    tree: bool = False
    calls: list[sessions.AttentionCall] = field(default_factory=list)

    def attend(self, call: sessions.AttentionCall) -> None:
        self.calls.append(call)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    session = Recorder()
    sessions.open_session(STREAM, session)
    yield session
    sessions.close_session(STREAM)


@pytest.fixture(scope="module")
def trt() -> Any:
    return tensorrt_rtx().module


@pytest.fixture(scope="module")
def plugin_class(trt: Any) -> Any:
    return make_plugin_class(trt)


def shapes(tokens: int = 5, sequences: int = 2, *, norms: bool = False) -> list[list[int]]:
    usual = [
        [tokens, WIDTH],
        [tokens],
        [sequences + 1],
        [sequences],
        [sequences, 7],
        [tokens, 2],
        [4096, 32],
        [4096, 32],
    ]
    return [*usual, [64], [64]] if norms else usual


def descriptions(trt: Any, sizes: list[list[int]], element: Any = None) -> list[Any]:
    kinds = trt.DataType
    element = kinds.BF16 if element is None else element
    types = [element, *[kinds.INT32] * 5, kinds.FLOAT, kinds.FLOAT, element, element]
    result = []
    for dims, dtype in zip(sizes, types):  # noqa: B905 - there may be fewer sizes
        each = trt.PluginTensorDesc()
        each.dims = dims
        each.type = dtype
        each.format = trt.TensorFormat.LINEAR
        result.append(each)
    return result


def enqueue(trt: Any, plugin: Any, sizes: list[list[int]], stream: int = STREAM) -> None:
    inputs = descriptions(trt, sizes)
    out = descriptions(trt, [[sizes[0][0], 256]])
    plugin.on_shape_change(inputs, out)
    plugin.enqueue(inputs, out, [0x1000 * (1 + index) for index in range(len(sizes))], [0xF000], 0, stream)


def test_fields_survive_the_way_into_a_plan_and_back(trt: Any, plugin_class: Any) -> None:
    creator = make_creator(trt, plugin_class, AttentionOperator)
    plugin = plugin_class(AttentionOperator(**FIELDS), "layers.3.attention")
    again = creator.create_plugin(
        "layers.3.attention", plugin.get_fields_to_serialize(), trt.TensorRTPhase.RUNTIME
    )
    changed = {**FIELDS, "epsilon": pytest.approx(1e-5)}
    assert vars(again.operator) == changed
    assert (again.plugin_name, again.plugin_version, again.plugin_namespace) == ("Attention", "1", "edged")
    assert again.num_outputs == 1


def test_a_plan_whose_fields_changed_is_refused_by_name(trt: Any, plugin_class: Any) -> None:
    creator = make_creator(trt, plugin_class, AttentionOperator)
    plugin = plugin_class(AttentionOperator(**FIELDS), "x")
    kept = [each for each in plugin.get_fields_to_serialize() if each.name != "top_k"]
    import numpy as np

    kept.append(trt.PluginField("scale", np.array([1.0], np.float32), trt.PluginFieldType.FLOAT32))
    with pytest.raises(
        PluginError, match=r"edged::Attention \(x\): lacks top_k and has unknown scale: .*build it again"
    ):
        creator.create_plugin("x", trt.PluginFieldCollection(kept), trt.TensorRTPhase.RUNTIME)


def test_a_node_hands_its_session_views_into_the_fused_projection(
    trt: Any, plugin_class: Any, recorder: Recorder
) -> None:
    plugin = plugin_class(AttentionOperator(**FIELDS), "x").attach_to_context(None)
    enqueue(trt, plugin, shapes(tokens=5, sequences=2))
    (call,) = recorder.calls
    assert call.layer == 3
    assert call.q == DeviceArray(0x1000, "bfloat16", (5, 4, 64), (WIDTH, 64, 1))
    assert call.k == DeviceArray(0x1000 + 4 * 64 * 2, "bfloat16", (5, 2, 64), (WIDTH, 64, 1))
    assert call.v == DeviceArray(0x1000 + 6 * 64 * 2, "bfloat16", (5, 2, 64), (WIDTH, 64, 1))
    assert call.out == DeviceArray(0xF000, "bfloat16", (5, 4, 64))
    assert (call.batch.tokens, call.batch.sequences, call.batch.max_pages) == (5, 2, 7)
    assert call.batch.positions.pointer == 0x2000
    assert call.batch.tree_masks is None
    assert (call.cosine.pointer, call.sine.pointer) == (0x7000, 0x8000)
    assert (call.q_norm, call.k_norm) == (None, None)
    assert call.selection == SelectionRule(1, 512, 8, 1024, "exact", 9)


def test_masks_count_in_a_tree_alone(trt: Any, plugin_class: Any, recorder: Recorder) -> None:
    recorder.tree = True
    plugin = plugin_class(AttentionOperator(**FIELDS), "x").attach_to_context(None)
    enqueue(trt, plugin, shapes(tokens=16, sequences=1))
    masks = recorder.calls[0].batch.tree_masks
    assert masks == DeviceArray(0x6000, "int64", (16,))


def test_norms_and_dense_attention(trt: Any, plugin_class: Any, recorder: Recorder) -> None:
    operator = AttentionOperator(**{**FIELDS, "qk_norm": 1, "dense_below": ALWAYS_DENSE})
    plugin = plugin_class(operator, "x").attach_to_context(None)
    enqueue(trt, plugin, shapes(norms=True))
    call = recorder.calls[0]
    assert call.q_norm == DeviceArray(0x9000, "bfloat16", (64,))
    assert call.k_norm == DeviceArray(0xA000, "bfloat16", (64,))
    assert call.selection is None


def test_a_node_that_tensorrt_times_while_it_builds_does_nothing(
    trt: Any, plugin_class: Any, recorder: Recorder
) -> None:
    plugin = plugin_class(AttentionOperator(**FIELDS), "x")
    enqueue(trt, plugin, shapes())
    enqueue(trt, plugin.clone(), shapes())
    assert recorder.calls == []
    enqueue(trt, plugin.attach_to_context(None).clone(), shapes())
    assert len(recorder.calls) == 1
    # Whether it attaches what it times is its own affair.
    creator = make_creator(trt, plugin_class, AttentionOperator)
    for phase, runs in ((trt.TensorRTPhase.BUILD, 0), (trt.TensorRTPhase.RUNTIME, 1)):
        recorder.calls.clear()
        made = creator.create_plugin("x", plugin.get_fields_to_serialize(), phase)
        enqueue(trt, made.clone().attach_to_context(None), shapes())
        assert len(recorder.calls) == runs


def test_a_stream_without_a_session_is_refused(trt: Any, plugin_class: Any, recorder: Recorder) -> None:
    plugin = plugin_class(AttentionOperator(**FIELDS), "x").attach_to_context(None)
    with pytest.raises(sessions.SessionError, match="stream 0x1 has no session"):
        enqueue(trt, plugin, shapes(), stream=1)
    with pytest.raises(sessions.SessionError, match="stream 0x5ea has a session already"):
        sessions.open_session(STREAM, Recorder())


class Stream:
    """As much of PyCUDA's as a session asks for."""

    handle = STREAM


def device_session(launched: list[tuple[Attention, Any]], **changes: Any) -> DeviceSession:
    arena = Arena.contiguous(8, 20, 2, 64, "bfloat16", keys=256, values=512, fine=768, coarse=1024)
    parts: dict[str, Any] = {
        "stream": Stream(),
        "arena": arena,
        "workspace": DeviceArray(0x100000, "uint8", (1 << 20,)),
        "arrived": DeviceArray(0x200000, "int32", (2, 2)),
        **changes,
    }
    return DeviceSession(lambda args, stream: launched.append((args, stream)), **parts)


def test_a_device_session_launches_the_layers_attention_on_its_stream(trt: Any, plugin_class: Any) -> None:
    launched: list[tuple[Attention, Any]] = []
    plugin = plugin_class(AttentionOperator(**{**FIELDS, "qk_norm": 1}), "x").attach_to_context(None)
    with device_session(launched) as session:
        enqueue(trt, plugin, shapes(norms=True))
        session.tree = True
        enqueue(trt, plugin, shapes(norms=True))
    (chain, stream), (tree, _) = launched
    assert isinstance(stream, Stream)
    assert (chain.layer, chain.arena.layers, chain.rule) == (3, 8, AttentionOperator(**FIELDS).selection)
    assert chain.epsilon == pytest.approx(1e-5)
    assert (chain.q_norm, chain.out.shape) == (DeviceArray(0x9000, "bfloat16", (64,)), (5, 4, 64))
    assert chain.layout(multiprocessors=16).total > 0
    assert chain.batch.tree_masks is None
    assert tree.batch.tree_masks == DeviceArray(0x6000, "int64", (5,))
    with pytest.raises(sessions.SessionError, match="has no session"):
        enqueue(trt, plugin, shapes(norms=True))


def test_what_the_kernels_refuse_is_refused_by_the_node_with_the_arguments_name(
    trt: Any, plugin_class: Any
) -> None:
    from plugins_trt.tensorrt.logger import record

    record.clear()
    plugin = plugin_class(AttentionOperator(**FIELDS), "x").attach_to_context(None)
    with device_session([], arrived=None), pytest.raises(LaunchError, match=r"^arrived: missing"):
        enqueue(trt, plugin, shapes())
    assert record.reason().startswith("arrived: missing")


@pytest.mark.parametrize(
    ("index", "dims", "said"),
    [
        (0, [5, 999], "input qkv has shape [5, 999], must be [T, 512]"),
        (1, [6], "input positions has shape [6], must be [T] with T = 5"),
        (2, [2, 2], "input sequence_starts has shape [2, 2], must be [S+1]"),
        (3, [4], "input lengths has shape [4], must be [S] with T = 5, S = 2"),
        (5, [5, 1], "input tree_masks has shape [5, 1], must be [T, 2]"),
        (7, [4095, 32], "input rope_sine has shape [4095, 32], must be [max_positions, 32]"),
    ],
)
def test_a_tensor_of_another_shape_is_refused_by_name(
    index: int, dims: list[int], said: str, trt: Any, plugin_class: Any
) -> None:
    plugin = plugin_class(AttentionOperator(**FIELDS), "x")
    sizes = shapes()
    sizes[index] = dims
    with pytest.raises(PluginError) as error:
        plugin.on_shape_change(descriptions(trt, sizes), [])
    assert said in str(error.value)
    assert str(error.value).startswith("edged::Attention (layer 3): ")


def test_element_types_must_agree_and_be_those_of_the_kernels(trt: Any, plugin_class: Any) -> None:
    kinds = trt.DataType
    usual = [kinds.BF16, *[kinds.INT32] * 5, kinds.FLOAT, kinds.FLOAT]
    plugin = plugin_class(AttentionOperator(**{**FIELDS, "qk_norm": 1}), "x")
    assert plugin.get_output_data_types([*usual, kinds.BF16, kinds.BF16]) == [kinds.BF16]
    with pytest.raises(PluginError, match="input k_norm is float16, must be bfloat16"):
        plugin.get_output_data_types([*usual, kinds.BF16, kinds.HALF])
    with pytest.raises(PluginError, match="input lengths is int64, must be int32"):
        plugin.get_output_data_types([*usual[:3], kinds.INT64, *usual[4:], kinds.BF16, kinds.BF16])
    with pytest.raises(PluginError, match="8 inputs, must be 10: qkv, positions"):
        plugin.get_output_data_types(usual)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer": -1}, "layer: -1"),
        ({"qk_norm": 2}, "qk_norm: 2, must be 0 or 1"),
        ({"top_k": 0, "window": 0, "local_blocks": 2}, "top_k: 0 leaves 0 blocks"),
        ({"local_blocks": 0}, "local_blocks: 0"),
        ({"window": 100}, "window: 100, must be a multiple of 64"),
    ],
)
def test_fields_that_the_kernels_do_not_take_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PluginError) as error:
        AttentionOperator.from_fields("n", {**FIELDS, **changes})
    assert str(error.value).startswith(f"edged::Attention (n): {said}")


@dataclass(frozen=True)
class Doubled(PluginOperator):
    """The least that an operator must say."""

    rows: int
    name: str

    NAME: ClassVar[str] = "Doubled"
    VERSION: ClassVar[str] = "2"
    TYPE_VARIABLES: ClassVar[dict[str, tuple[str, ...]]] = {"$x": ("float16", "float32")}

    @property
    def inputs(self) -> tuple[Port, ...]:
        return (Port("a", ("$x",), ("N", self.rows)), Port("b", ("int32", "int64"), ("N+3",)))

    @property
    def outputs(self) -> tuple[Port, ...]:
        return (Port("y", ("$x",), ("N",)),)

    def workspace_bytes(self, sizes: Any) -> int:
        return 4 * int(sizes["N"])

    def enqueue(self, inputs: Any, outputs: Any, workspace: int, stream: int) -> None:
        raise AssertionError


@given(st.integers(0, 50), st.integers(0, 50))
def test_names_of_sizes_may_have_an_offset(n: int, m: int) -> None:
    operator = Doubled(rows=7, name="x")
    if m == n + 3:
        assert operator.check_shapes([[n, 7], [m]]) == {"N": n}
    else:
        with pytest.raises(PluginError, match="input b has shape"):
            operator.check_shapes([[n, 7], [m]])
    assert operator.check_shapes([[-1, 7], [m]]) == {"N": m - 3}


def test_workspace_is_that_of_the_largest_step(trt: Any, plugin_class: Any) -> None:
    plugin = plugin_class(Doubled(rows=7, name="x"), "n")
    inputs = []
    for most in ([90, 7], [93]):
        each = trt.DynamicPluginTensorDesc()
        each.max = most
        inputs.append(each)
    assert plugin.get_workspace_size(inputs, []) == 360


def test_the_hash_of_the_sources_follows_code_and_kernels_but_not_references(tmp_path: Any) -> None:
    (tmp_path / "op").mkdir()
    (tmp_path / "op" / "a.cu").write_text("1")
    (tmp_path / "op" / "reference.py").write_text("1")
    hashes = [source_hash.__wrapped__(tmp_path)]
    (tmp_path / "op" / "reference.py").write_text("2")
    assert source_hash.__wrapped__(tmp_path) == hashes[0]
    for name, text in (("a.cu", "2"), ("b.cuh", ""), ("launch.py", "")):
        (tmp_path / "op" / name).write_text(text)
        hashes.append(source_hash.__wrapped__(tmp_path))
    (tmp_path / "op" / "b.cuh").rename(tmp_path / "op" / "c.cuh")
    hashes.append(source_hash.__wrapped__(tmp_path))
    assert len(set(hashes)) == 5
    assert len(source_hash()) == 64
