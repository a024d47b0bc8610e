"""The weights a decoder needs: their names, shapes, and the checkpoint tensors that each is made of.

q, k and v lie in one matrix ``[q; k; v]`` and gate and up in one ``[gate; up]``, so that a step reads each in one call.
A checkpoint that lacks a tensor, has one that nothing maps, or one of another shape is refused, with all of them listed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edged.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from edged.models.architecture import Architecture

EMBEDDING = "embedding"
FINAL_NORM = "final_norm"
HEAD = "head"

_SHOWN = 8


@dataclass(frozen=True)
class WeightSource:
    """A checkpoint tensor that fills rows ``start`` to ``start + shape[0]`` of a weight."""

    name: str
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class WeightSpec:
    """One weight of the decoder: a matrix ``[out, in]`` or a vector, and where its rows come from."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[WeightSource, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


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
    return tuple(specs)


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


def check_checkpoint(architecture: Architecture, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Hold a checkpoint's tensors against what the decoder needs.

    Args:
        architecture: The model's hyper-parameters.
        shapes: Shape of each tensor in the checkpoint, by name.

    Raises:
        CheckpointError: Tensors are missing, unmapped or of another shape; lists them.
    """
    needed = {source.name: source.shape for spec in weight_specs(architecture) for source in spec.sources}
    missing = [name for name in needed if name not in shapes]
    unmapped = [name for name in shapes if name not in needed and not _is_redundant(name, architecture)]
    wrong = [
        f"{name} is {list(shapes[name])} instead of {list(shape)}"
        for name, shape in needed.items()
        if name in shapes and tuple(shapes[name]) != shape
    ]
    faults = [
        f"{len(names)} {what}: {_listed(names)}"
        for what, names in (
            ("tensors are missing", missing),
            ("tensors have no place in this architecture", unmapped),
            ("tensors have shapes that contradict config.json", wrong),
        )
        if names
    ]
    if faults:
        raise CheckpointError(
            f"the weights do not fit the {architecture.model_type} model: {'; '.join(faults)}"
        )


def _is_redundant(name: str, architecture: Architecture) -> bool:
    """Whether a tensor repeats what is known: the tied head, or the table that rope parameters already give."""
    return (architecture.tied and name == "lm_head.weight") or name.endswith(".rotary_emb.inv_freq")


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
