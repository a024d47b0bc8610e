"""Plugins of packed linears: what they check, serialize and launch. Pointers are numbers; builds are real ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from packed_inputs import MODELS
from tensorrt_case import tensorrt_rtx

from edged.engine.builder import build
from edged.engine.graph import GraphSpec, emit, serialize
from edged.engine.shapes import EngineShapes
from edged.errors import InternalError
from edged.models.architecture import Architecture
from plugins_trt.contract import DeviceArray, LaunchError
from plugins_trt.tensorrt import sessions
from plugins_trt.tensorrt.base import make_creator, make_plugin_class
from plugins_trt.tensorrt.device_session import DeviceSession
from plugins_trt.tensorrt.linear_plugins import (
    MULTIPROCESSORS,
    PackedLinearOperator,
    TernaryLinearOperator,
    W4A16LinearOperator,
)
from plugins_trt.tensorrt.operator import PluginError
from plugins_trt.ternary_linear.contract import LinearPlan as TernaryPlan
from plugins_trt.w4a16_linear.contract import LinearPlan as W4A16Plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from plugins_trt.ternary_linear.contract import TernaryLinear
    from plugins_trt.w4a16_linear.contract import W4A16Linear

FIELDS: dict[str, Any] = {
    "weight": "layers.0.qkv",
    "outputs_of_row": 512,
    "inputs_of_row": 256,
    "group": 128,
    "gated": 0,
    "bias": 1,
}
KINDS = [W4A16LinearOperator, TernaryLinearOperator]
STREAM = 0x5EA


class Stream:
    handle = STREAM


@pytest.fixture
def launched(request: pytest.FixtureRequest) -> Iterator[list[W4A16Linear | TernaryLinear]]:
    """What the session of `STREAM` launches; its parameter names the symmetric weights."""
    products: list[W4A16Linear | TernaryLinear] = []
    session = DeviceSession(
        lambda *_: pytest.fail("there is no attention"),
        stream=Stream(),
        arena=None,  # type: ignore[arg-type]
        workspace=DeviceArray(256, "uint8", (1,)),
        arrived=None,
        multiply=lambda product, _: products.append(product),
        symmetric=getattr(request, "param", frozenset()),
    )
    with session:
        yield products


@pytest.fixture(scope="module")
def trt() -> Any:
    return tensorrt_rtx().module


@pytest.fixture(scope="module")
def plugin_class(trt: Any) -> Any:
    return make_plugin_class(trt)


def sizes_of(operator: PackedLinearOperator, rows: int) -> list[list[int]]:
    return [[rows if size == "M" else int(size) for size in port.shape] for port in operator.inputs]


def descriptions(trt: Any, sizes: list[list[int]]) -> list[Any]:
    kinds = trt.DataType
    result = []
    for dims, dtype in zip(sizes, [kinds.BF16, kinds.INT32, kinds.INT32, kinds.BF16]):  # noqa: B905 - a bias may lack
        each = trt.PluginTensorDesc()
        each.dims, each.type, each.format = dims, dtype, trt.TensorFormat.LINEAR
        result.append(each)
    return result


def enqueue(trt: Any, plugin: Any, rows: int, workspace: int = 1 << 20) -> None:
    sizes = sizes_of(plugin.operator, rows)
    ins = descriptions(trt, sizes)
    outs = descriptions(trt, [[rows, plugin.operator.outputs[0].shape[1]]])
    plugin.on_shape_change(ins, outs)
    pointers = [0x10000 * (1 + index) for index in range(len(sizes))]
    plugin.enqueue(ins, outs, pointers, [0xF00000], workspace, STREAM)


@pytest.mark.parametrize("kind", KINDS)
def test_fields_survive_the_way_into_a_plan_and_back(kind: Any, trt: Any, plugin_class: Any) -> None:
    creator = make_creator(trt, plugin_class, kind)
    plugin = plugin_class(kind(**FIELDS), "n")
    again = creator.create_plugin("n", plugin.get_fields_to_serialize(), trt.TensorRTPhase.RUNTIME)
    assert vars(again.operator) == FIELDS


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_multiplied_as_many_at_a_time_as_a_launch_takes(
    kind: Any, trt: Any, plugin_class: Any, launched: list[Any]
) -> None:
    plugin = plugin_class(kind(**FIELDS), "n").attach_to_context(None)
    step = kind.LAUNCH_ROWS
    enqueue(trt, plugin, 2 * step + 5)
    assert [each.rows for each in launched] == [step, step, 5]
    assert [each.x.pointer for each in launched] == [0x10000 + first * 512 for first in (0, step, 2 * step)]
    assert [each.out.pointer for each in launched] == [
        0xF00000 + first * 1024 for first in (0, step, 2 * step)
    ]
    assert {each.tiles.pointer for each in launched} == {0x20000}
    assert {each.bias.pointer for each in launched} == {0x40000}
    assert {each.gated for each in launched} == {False}


@pytest.mark.parametrize("launched", [{"layers.0.qkv"}], indirect=True)
@pytest.mark.parametrize(("weight", "symmetric"), [("layers.0.qkv", True), ("layers.1.qkv", False)])
def test_a_weight_whose_zero_points_are_all_8_is_multiplied_as_such(
    weight: str, symmetric: bool, trt: Any, plugin_class: Any, launched: list[Any]
) -> None:
    plugin = plugin_class(W4A16LinearOperator(**{**FIELDS, "weight": weight}), "n").attach_to_context(None)
    enqueue(trt, plugin, 70)
    assert [each.symmetric for each in launched] == [symmetric] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_gated_nodes_give_half_as_many_outputs(
    kind: Any, trt: Any, plugin_class: Any, launched: list[Any]
) -> None:
    operator = kind(**{**FIELDS, "gated": 1, "bias": 0})
    assert operator.outputs[0].shape == ("M", 256)
    enqueue(trt, plugin_class(operator, "n").attach_to_context(None), 3)
    (product,) = launched
    assert (product.gated, product.out.shape, product.bias) == (True, (3, 256), None)


def needed_workspace(operator: PackedLinearOperator, rows: int, device: int) -> int:
    of = TernaryPlan.of if isinstance(operator, TernaryLinearOperator) else W4A16Plan.of
    outputs, inputs = operator.outputs_of_row, operator.inputs_of_row
    return of(rows=rows, outputs=outputs, inputs=inputs, multiprocessors=device).workspace_bytes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 16384), (512, 256)])
def test_the_workspace_is_enough_on_every_device_for_every_number_of_rows(
    kind: Any, shape: tuple[int, int]
) -> None:
    operator = kind(**{**FIELDS, "outputs_of_row": shape[0], "inputs_of_row": shape[1]})
    planned = operator.workspace_bytes({"M": 2048})
    assert planned == operator.workspace_bytes({"M": kind.LAUNCH_ROWS})
    random = np.random.default_rng(0)
    rows = random.integers(1, kind.LAUNCH_ROWS + 1, 300)
    devices = random.integers(1, MULTIPROCESSORS + 1, 300)
    needed = [
        needed_workspace(operator, int(row), int(device)) for row, device in zip(rows, devices, strict=True)
    ]
    assert 0 < max(needed) <= planned if shape[1] > 4096 else max(needed) <= planned
    for row, device in zip(rows[:50], devices[:50], strict=True):
        assert needed_workspace(operator, int(row), int(device)) <= operator.workspace_bytes({"M": int(row)})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"group": 48}, "group: 48"),
        ({"inputs_of_row": 100}, "inputs: 100"),
        ({"outputs_of_row": 0}, "outputs: 0"),
        ({"outputs_of_row": 504, "gated": 1}, "outputs: 504, must be a multiple of 16"),
        ({"gated": 2}, "gated: 2, must be 0 or 1"),
        ({"bias": -1}, "bias: -1, must be 0 or 1"),
    ],
)
def test_fields_that_the_kernels_do_not_take_are_refused(
    kind: Any, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(PluginError) as error:
        kind.from_fields("n", {**FIELDS, **changes})
    assert str(error.value).startswith(f"edged::{kind.NAME} (n): {said}")


@pytest.mark.parametrize(
    ("kind", "index", "dims", "said"),
    [
        (W4A16LinearOperator, 0, [3, 128], "input x has shape [3, 128], must be [M, 256]"),
        (
            W4A16LinearOperator,
            1,
            [32, 4, 32, 2],
            "input tiles has shape [32, 4, 32, 2], must be [32, 4, 32, 4]",
        ),
        (
            W4A16LinearOperator,
            2,
            [32, 4, 8, 2],
            "input groups has shape [32, 4, 8, 2], must be [32, 2, 8, 2]",
        ),
        (W4A16LinearOperator, 3, [511], "input bias has shape [511], must be [512]"),
        (
            TernaryLinearOperator,
            1,
            [32, 1, 32, 4],
            "input tiles has shape [32, 1, 32, 4], must be [32, 2, 32, 4]",
        ),
        (
            TernaryLinearOperator,
            2,
            [32, 2, 8, 4],
            "input scales has shape [32, 2, 8, 4], must be [32, 2, 8, 1]",
        ),
    ],
)
def test_a_tensor_of_another_shape_is_refused_by_name(
    kind: Any, index: int, dims: list[int], said: str, trt: Any
) -> None:
    plugin = make_plugin_class(trt)(kind(**FIELDS), "n")
    sizes = sizes_of(plugin.operator, 3)
    sizes[index] = dims
    with pytest.raises(PluginError) as error:
        plugin.on_shape_change(descriptions(trt, sizes), [])
    assert str(error.value).startswith(f"edged::{kind.NAME} (layers.0.qkv): {said}")


def test_element_types_are_those_of_the_kernels(trt: Any, plugin_class: Any) -> None:
    kinds = trt.DataType
    plugin = plugin_class(W4A16LinearOperator(**FIELDS), "n")
    usual = [kinds.HALF, kinds.INT32, kinds.INT32, kinds.HALF]
    assert plugin.get_output_data_types(usual) == [kinds.HALF]
    for index, dtype, said in (
        (0, kinds.FLOAT, "input x is float32, must be float16 or bfloat16"),
        (1, kinds.INT64, "input tiles is int64, must be int32"),
        (3, kinds.BF16, "input bias is bfloat16, must be float16"),
    ):
        with pytest.raises(PluginError, match=said):
            plugin.get_output_data_types(
                [dtype if place == index else each for place, each in enumerate(usual)]
            )
    with pytest.raises(PluginError, match="3 inputs, must be 4: x, tiles, groups, bias"):
        plugin.get_output_data_types(usual[:3])


def test_a_session_without_kernels_of_packed_weights_is_refused(trt: Any, plugin_class: Any) -> None:
    plugin = plugin_class(W4A16LinearOperator(**FIELDS), "n").attach_to_context(None)
    session = DeviceSession(
        lambda *_: None,
        stream=Stream(),
        arena=None,  # type: ignore[arg-type]
        workspace=DeviceArray(256, "uint8", (1,)),
        arrived=None,
    )
    with session, pytest.raises(sessions.SessionError, match="the plan belongs to another model"):
        enqueue(trt, plugin, 1)


def test_a_null_workspace_is_refused_by_the_kernels_contract(trt: Any, plugin_class: Any) -> None:
    operator = W4A16LinearOperator(**{**FIELDS, "outputs_of_row": 4096, "inputs_of_row": 16384})
    product = operator.product(
        DeviceArray(0x10000, "bfloat16", (64, 16384)),
        [DeviceArray(0x20000, "int32", shape) for shape in ((256, 256, 32, 4), (256, 128, 8, 2))],
        DeviceArray(0x30000, "bfloat16", (64, 4096)),
        None,
        DeviceArray(0, "uint8", (operator.workspace_bytes({"M": 64}),)),
    )
    assert needed_workspace(operator, 64, 132) > 0
    with pytest.raises(LaunchError, match="workspace: pointer 0x0"):
        product.plan(132)


@pytest.mark.parametrize("name", ["gptq, a group a row, biases", "ternary, group 32"])
def test_packed_models_build_for_three_targets(name: str) -> None:
    spec = GraphSpec(Architecture.from_config(MODELS[name]), "bfloat16")
    shapes = EngineShapes(prefill_tokens=256, max_sequences=4)
    plan = build(tensorrt_rtx(), serialize(emit(spec)), spec, shapes, ("sm86", "sm89", "sm120"))
    assert 100_000 < len(plan.data) < 20_000_000
    assert 0 < plan.activation_bytes["decode"] < plan.activation_bytes["prefill"] < 2**26


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        (
            "group",
            64,
            r"edged::W4A16Linear \(layers.0.qkv\): input groups has shape \[32, 2, 8, 2\], must be",
        ),
        ("bias", 0, r"edged::W4A16Linear \(layers.0.qkv\): 4 inputs, must be 3: x, tiles, groups"),
        ("inputs_of_row", None, r"edged::W4A16Linear \(layers.0.qkv.w4a16linear\): lacks inputs_of_row"),
    ],
)
def test_a_node_that_is_not_what_the_plugin_takes_is_refused_by_name(
    attribute: str, value: int | None, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    spec = GraphSpec(Architecture.from_config(MODELS["gptq, a group a row, biases"]), "bfloat16")
    model = emit(spec)
    node = next(each for each in model.graph.node if each.op_type == "W4A16Linear")
    kept = [each for each in node.attribute if each.name != attribute]
    del node.attribute[:]
    node.attribute.extend(kept)
    if value is not None:
        node.attribute.append(onnx.helper.make_attribute(attribute, value))
    with pytest.raises(InternalError, match=message):
        build(
            tensorrt_rtx(),
            serialize(model),
            spec,
            EngineShapes(prefill_tokens=256, max_sequences=4),
            ("sm89",),
        )
    capfd.readouterr()
