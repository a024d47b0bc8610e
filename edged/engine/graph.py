"""The decoder as one ONNX model, emitted from the definition that the torch executor runs.

Every weight is an input, but those of dense products in a graph that asks for constants. A step is a ragged batch of S sequences with T new tokens in all; the node ``edged::Attention``
of each layer stores their keys and values in pages that it finds by layer index, selects and attends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx
from onnx import helper

from edged import __version__
from edged.engine.held_weights import HeldWeight, held_weights
from edged.engine.onnx_nodes import ELEMENT_TYPES, Dim, OnnxNodes
from edged.engine.onnx_operators import OnnxOperators, StepInputs
from edged.errors import UnsupportedError
from edged.models.cuda_weights import GROUPS, cuda_packed, cuda_weight_parts
from edged.models.decoder import Decoder
from edged.models.weights import EMBEDDING, HEAD, weight_specs
from plugins_trt.contract import LaunchError
from plugins_trt.tensorrt.names import NAMESPACE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edged.models.architecture import Architecture
    from plugins_trt.contract import SelectionRule

OPSET, IR_VERSION = 18, 8
"""What the parser of TensorRT 10.3 (ONNX 1.16) reads."""

DTYPES = ("float32", "float16", "bfloat16")

TOKENS, SEQUENCES, BOUNDARIES, PAGES, ROWS, POSITIONS = (
    "tokens",
    "sequences",
    "sequences_and_one",
    "pages",
    "rows",
    "max_positions",
)
"""Names of the sizes that are known at run time alone."""

STEP_INPUTS: Mapping[str, tuple[str, tuple[Dim, ...]]] = {
    "token_ids": ("int32", (TOKENS,)),
    "positions": ("int32", (TOKENS,)),
    "sequence_starts": ("int32", (BOUNDARIES,)),
    "lengths": ("int32", (SEQUENCES,)),
    "page_tables": ("int32", (SEQUENCES, PAGES)),
    "tree_masks": ("int32", (TOKENS, 2)),
    "logit_rows": ("int32", (ROWS,)),
}
"""Element type and shape of what changes from step to step.

A tree mask is a 64-bit word in two halves, the lower first: bit j says that new token j of the same sequence is the
row's ancestor or the row itself. Chains have masks too.
"""

LOGITS = "logits"
"""The output: fp32 ``[rows, vocabulary]``."""


@dataclass(frozen=True)
class GraphSpec:
    """What a graph depends on.

    Attributes:
        architecture: The model's hyper-parameters.
        dtype: Of activations and weights: float32, float16 or bfloat16 (plugins take the last two).
        selection: Which blocks a query attends to; None attends densely everywhere.
        refitted: The weights of dense products are constants, of which the plan is stripped; who loads it puts them in.
    """

    architecture: Architecture
    dtype: str
    selection: SelectionRule | None = None
    refitted: bool = False

    def __post_init__(self) -> None:
        """Refuse a dtype or weights that no graph has."""
        if self.dtype not in DTYPES:
            raise UnsupportedError(
                f"dtype {self.dtype!r}: a graph has one of {', '.join(DTYPES)}", field="dtype"
            )
        _check_packed(self.architecture)
        if self.refitted and not self.held:
            raise UnsupportedError(
                "refit: every product of this model has packed weights or the embedding's, which are inputs of any plan: "
                "build without it",
                field="refit",
            )

    @property
    def held(self) -> tuple[HeldWeight, ...]:
        """The weights that are constants."""
        return held_weights(self.architecture, self.dtype) if self.refitted else ()

    def input_shapes(self) -> dict[str, tuple[str, tuple[Dim, ...]]]:
        """Element type and shape of every input: the step's, the rotary tables, the weights that are no constants."""
        held = {each.name for each in self.held}
        half = self.architecture.head_dim // 2
        shapes = dict(STEP_INPUTS)
        shapes["rope_cosine"] = shapes["rope_sine"] = ("float32", (POSITIONS, half))
        for spec in weight_specs(self.architecture):
            for part in cuda_weight_parts(spec):
                if part.name not in held:
                    shapes[part.name] = (part.dtype or self.dtype, part.shape)
        for name, source in self.aliases().items():
            shapes[name] = shapes[source]
        return shapes

    def aliases(self) -> dict[str, str]:
        """Inputs that are bound to the memory of another input: the head of a tied model.

        As one input, read by rows in the embedding and as a matrix in the head, TensorRT-RTX 1.7 copies the whole
        table, transposed, in every step (601 MB for a vocabulary of 73 448 by 4096).
        """
        return {HEAD: EMBEDDING} if self.architecture.tied else {}


def _check_packed(architecture: Architecture) -> None:
    """Refuse packed weights that the plugins do not take.

    Raises:
        UnsupportedError: Names the weight and what would do.
    """
    quantization = architecture.quantization
    if quantization is not None and quantization.act_order:
        raise UnsupportedError(
            "quantization_config.desc_act: no graph has 4-bit weights whose groups are not consecutive inputs; quantize with "
            "edgectl quantize --act-order static, or use executor: torch",
            field="quantization_config",
        )
    for packed in cuda_packed(architecture):
        try:
            packed.check()
        except LaunchError as error:
            raise UnsupportedError(
                f"the packed weight {packed.name}: {error}; quantize with another group, or use executor: torch on "
                "device: cpu",
                field="quantization_config",
            ) from None


def emit(spec: GraphSpec) -> onnx.ModelProto:
    """Emit the model.

    Raises:
        onnx.checker.ValidationError: It does not pass ONNX's own checker, which is a fault of edged's.
    """
    nodes = OnnxNodes()
    values = {name: nodes.input(name, dtype, shape) for name, (dtype, shape) in spec.input_shapes().items()}
    values |= {each.name: nodes.held(each.name, each.dtype, each.shape) for each in spec.held}
    step = StepInputs(**{name: values[name] for name in (*STEP_INPUTS, "rope_cosine", "rope_sine")})
    weights = {each.name: values[each.name] for each in weight_specs(spec.architecture)}
    decoder = Decoder(spec.architecture, weights)
    operators = OnnxOperators(
        nodes,
        spec.architecture,
        step,
        dtype=spec.dtype,
        selection=spec.selection,
        head=values[HEAD],
        scales={each.name: values[each.name + GROUPS] for each in cuda_packed(spec.architecture)},
    )
    result = decoder.forward(operators)
    nodes.nodes.append(helper.make_node("Identity", [result.name], [LOGITS], name=LOGITS))
    output = helper.make_tensor_value_info(
        LOGITS, ELEMENT_TYPES["float32"], [ROWS, spec.architecture.vocabulary]
    )

    def model_of(inputs: list[onnx.ValueInfoProto], constants: list[onnx.TensorProto]) -> onnx.ModelProto:
        graph = helper.make_graph(
            nodes.nodes, "decoder", inputs, [output], initializer=constants, value_info=nodes.values
        )
        return helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(NAMESPACE, 1)],
            ir_version=IR_VERSION,
            producer_name="edged",
            producer_version=__version__,
        )

    # The checker opens the files of constants: to it they are inputs.
    onnx.checker.check_model(model_of([*nodes.inputs, *nodes.constants], nodes.initializers))
    held = [each.to_onnx() for each in spec.held]
    return model_of(nodes.inputs, [*nodes.initializers, *held])


def serialize(model: onnx.ModelProto) -> bytes:
    """The model's bytes; the same for the same model."""
    return model.SerializeToString(deterministic=True)
