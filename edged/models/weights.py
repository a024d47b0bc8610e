"""The weights a decoder needs: their names, shapes, and the checkpoint tensors that each is made of.

q, k and v lie in one matrix ``[q; k; v]`` and gate and up in one ``[gate; up]``, so that a step reads each in one call.
Linears that a checkpoint has in 4 bits stay so: they are made of packed integers, scales and zero points.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from edged.errors import CheckpointError
from edged.models.quantization import TERNARY_WORD_WEIGHTS, WORD_WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from edged.models.architecture import Architecture
    from edged.models.quantization import Quantization

EMBEDDING = "embedding"
FINAL_NORM = "final_norm"
HEAD = "head"


@dataclass(frozen=True)
class WeightSource:
    """A checkpoint tensor that fills rows ``start`` to ``start + shape[0]`` of a weight.

    A 4-bit linear's is there under the name of its module only: :attr:`module` with ``qweight`` and others.
    """

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def module(self) -> str:
        """Name of the module that the tensor belongs to."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Packing:
    """How a packed weight is grouped.

    How it lies in memory: :mod:`edged.checkpoint.packed` (4 bits) and :mod:`edged.checkpoint.ternary`.

    ``order`` of an act-order weight has a row for each source, since each checkpoint module has an order of its own.
    """

    group: int
    act_order: bool
    ternary: bool = False


@dataclass(frozen=True)
class WeightSpec:
    """One weight of the decoder: a matrix ``[out, in]`` or a vector, and where its rows come from."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[WeightSource, ...]
    packing: Packing | None = None
    """4-bit or ternary; None: as wide as the plan says."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class WeightPart(NamedTuple):
    """A tensor that a weight is made of in memory; ``dtype`` is empty where the plan decides it."""

    name: str
    shape: tuple[int, ...]
    dtype: str


SCALES, ZEROS, ORDER = ".scales", ".zeros", ".order"
"""Follow a 4-bit weight's name: ``layers.3.qkv`` itself holds the packed integers."""


def weight_parts(spec: WeightSpec) -> tuple[WeightPart, ...]:
    """The tensors of a weight: itself, or for a packed one the integers, scales, and if 4-bit zero points and orders."""
    if spec.packing is None:
        return (WeightPart(spec.name, spec.shape, ""),)
    outputs, inputs = spec.shape
    groups = inputs // spec.packing.group
    if spec.packing.ternary:
        return (
            WeightPart(spec.name, (outputs, inputs // TERNARY_WORD_WEIGHTS), "int32"),
            WeightPart(spec.name + SCALES, (outputs, groups), "float16"),
        )
    parts = [
        WeightPart(spec.name, (outputs, inputs // WORD_WEIGHTS), "int32"),
        WeightPart(spec.name + SCALES, (outputs, groups), "float16"),
        WeightPart(spec.name + ZEROS, (outputs, groups), "uint8"),
    ]
    if spec.packing.act_order:
        parts.append(WeightPart(spec.name + ORDER, (len(spec.sources), inputs), "int32"))
    return tuple(parts)


def layer_name(layer: int, part: str) -> str:
    """Name of a layer's weight: ``layers.3.qkv``."""
    return f"layers.{layer}.{part}"


def weight_specs(architecture: Architecture) -> tuple[WeightSpec, ...]:
    """Every weight of a model, in the order of the forward.

    A tied model has no ``head``: its LM head is the embedding.
    """
    a = architecture
    specs = [_single(EMBEDDING, "model.embed_tokens.weight", (a.vocabulary, a.hidden))]
    for layer in range(a.layers):
        specs.extend(_layer_specs(a, layer))
    specs.append(_single(FINAL_NORM, "model.norm.weight", (a.hidden,)))
    if not a.tied:
        specs.append(_single(HEAD, "lm_head.weight", (a.vocabulary, a.hidden)))
    quantization = a.quantization
    return tuple(specs if quantization is None else (_packed(spec, quantization) for spec in specs))


def _packed(spec: WeightSpec, quantization: Quantization) -> WeightSpec:
    """The weight with its packing, where it is a linear that the checkpoint has in 4 bits."""
    if len(spec.shape) != 2 or spec.name == EMBEDDING:
        return spec
    covered = [source.module for source in spec.sources if quantization.covers(source.module)]
    if not covered:
        return spec
    if len(covered) < len(spec.sources):
        plain = [source.module for source in spec.sources if source.module not in covered]
        raise CheckpointError(
            f"quantization_config quantizes {', '.join(covered)} and not {', '.join(plain)}, which are one product here: "
            "quantize all of them or none",
            field="quantization_config",
        )
    group = quantization.group_of(spec.shape[1])
    return replace(spec, packing=Packing(group, quantization.act_order, quantization.ternary))


def _layer_specs(a: Architecture, layer: int) -> Iterable[WeightSpec]:
    source = f"model.layers.{layer}."

    def name(part: str) -> str:
        return layer_name(layer, part)

    qkv = [("q_proj", a.q_width), ("k_proj", a.kv_width), ("v_proj", a.kv_width)]
    gate_up = [("gate_proj", a.intermediate), ("up_proj", a.intermediate)]
    output = [("o_proj", a.hidden)]
    down = [("down_proj", a.hidden)]
    yield _single(name("attention_norm"), source + "input_layernorm.weight", (a.hidden,))
    yield _stacked(name("qkv"), source + "self_attn.{}.weight", qkv, a.hidden)
    if a.qkv_bias:
        yield _stacked(name("qkv_bias"), source + "self_attn.{}.bias", qkv)
    if a.qk_norm:
        yield _single(name("q_norm"), source + "self_attn.q_norm.weight", (a.head_dim,))
        yield _single(name("k_norm"), source + "self_attn.k_norm.weight", (a.head_dim,))
    yield _stacked(name("output"), source + "self_attn.{}.weight", output, a.q_width)
    if a.output_bias:
        yield _stacked(name("output_bias"), source + "self_attn.{}.bias", output)
    yield _single(name("mlp_norm"), source + "post_attention_layernorm.weight", (a.hidden,))
    yield _stacked(name("gate_up"), source + "mlp.{}.weight", gate_up, a.hidden)
    if a.mlp_bias:
        yield _stacked(name("gate_up_bias"), source + "mlp.{}.bias", gate_up)
    yield _stacked(name("down"), source + "mlp.{}.weight", down, a.intermediate)
    if a.mlp_bias:
        yield _stacked(name("down_bias"), source + "mlp.{}.bias", down)


def _single(name: str, source: str, shape: tuple[int, ...]) -> WeightSpec:
    return WeightSpec(name, shape, (WeightSource(source, 0, shape),))


def _stacked(
    name: str, pattern: str, parts: Iterable[tuple[str, int]], columns: int | None = None
) -> WeightSpec:
    """Tensors one below the other: ``[rows, columns]`` each, or ``[rows]`` for biases."""
    tail = () if columns is None else (columns,)
    sources = []
    start = 0
    for part, rows in parts:
        sources.append(WeightSource(pattern.format(part), start, (rows, *tail)))
        start += rows
    return WeightSpec(name, (start, *tail), tuple(sources))


def parameter_count(architecture: Architecture) -> int:
    """Number of parameters; a tied embedding counts once."""
    return sum(spec.elements for spec in weight_specs(architecture))


def packed_count(architecture: Architecture) -> int:
    """Number of parameters that are in 4 bits, or ternary in 2."""
    return sum(spec.elements for spec in weight_specs(architecture) if spec.packing is not None)
