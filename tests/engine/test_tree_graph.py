"""Graphs with the node that verifies trees, really built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import onnx
import pytest
from tensorrt_case import tensorrt_rtx

from edged.engine.builder import build
from edged.engine.graph import IR_VERSION, OPSET, SEQUENCES, STEP_INPUTS, TOKENS, serialize
from edged.engine.onnx_nodes import OnnxNodes
from edged.engine.shapes import EngineShapes
from edged.errors import InternalError
from plugins_trt.tensorrt.names import NAMESPACE, VERIFY_TREE, VERIFY_TREE_VERSION

if TYPE_CHECKING:
    from edged.engine.builder import Plan


def graph_of(**attributes: Any) -> onnx.ModelProto:
    """A greedy draw, and the paths that it follows: what a graph with such a node looks like."""
    nodes = OnnxNodes()
    names = ("token_ids", "positions", "sequence_starts", "lengths", "page_tables", "tree_masks")
    given = {name: nodes.input(name, *STEP_INPUTS[name]) for name in names}
    logits = nodes.input("node_logits", "float32", (TOKENS, 300))
    best = nodes.add("ArgMax", [logits], "int64", "best", axis=1, keepdims=0)
    targets = nodes.cast(best, "int32", "best")
    inputs = [given["token_ids"], targets, *(given[name] for name in names[1:])]
    fields = {"keep": 1, "plugin_version": VERIFY_TREE_VERSION, "plugin_namespace": NAMESPACE, **attributes}
    given_fields = {name: value for name, value in fields.items() if value is not None}
    outputs = nodes.add_many(VERIFY_TREE, inputs, ["int32"] * 2, "tree", domain=NAMESPACE, **given_fields)
    shapes = ([SEQUENCES, 64], [SEQUENCES])
    results = [
        onnx.helper.make_tensor_value_info(value.name, onnx.TensorProto.INT32, shape)
        for value, shape in zip(outputs, shapes, strict=True)
    ]
    graph = onnx.helper.make_graph(nodes.nodes, "tree", nodes.inputs, results, initializer=nodes.initializers)
    imports = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid(NAMESPACE, 1)]
    return onnx.helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION)


def plan_of(model: onnx.ModelProto) -> Plan:
    onnx.checker.check_model(model)
    dims: dict[str, Any] = {
        value.name: ("", [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim])
        for value in model.graph.input
    }
    spec: Any = SimpleNamespace(input_shapes=lambda: dims, held=(), refitted=False)
    shapes = EngineShapes(prefill_tokens=256, max_sequences=4)
    return build(tensorrt_rtx(), serialize(model), spec, shapes, ("sm86", "sm89", "sm120"))


def test_a_graph_with_the_node_builds_for_three_targets() -> None:
    assert len(plan_of(graph_of()).data) > 1000


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"keep": 3}, r"edged::VerifyTree \(tree.verifytree\): keep: 3, must be 0 or 1"),
        (
            {"keep": 0.5},
            "field keep is 0.5, must be an integer: the graph or plan was made by another version",
        ),
        ({"keep": None}, "lacks keep: the graph or plan was made by another version; build it again"),
    ],
)
def test_a_node_that_is_not_what_the_plugin_takes_is_refused_by_name(
    attributes: dict[str, Any], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InternalError, match=message):
        plan_of(graph_of(**attributes))
    capfd.readouterr()
