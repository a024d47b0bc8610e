"""A draft's weights: the tensors that its folder has for each, which must fit the target, plain or in 4 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.checkpoint import gptq
from edged.checkpoint.packed import Shape
from edged.errors import CheckpointError
from edged.models.quantization import WORD_WEIGHTS
from edged.models.weights import Packing, WeightSource, WeightSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edged.checkpoint.safetensors_files import WeightFiles
    from edged.models.architecture import Architecture
    from edged.models.draft_layout import Layout

FLOATS = ("F64", "F32", "BF16", "F16")
_MADE_OF = {
    "fc": ("fc",),
    "qkv": ("q", "k", "v"),
    "output": ("output",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
    "head": ("head",),
    "fc_bias": ("fc_bias",),
    "qkv_bias": ("q_bias", "k_bias", "v_bias"),
    **{
        norm: (norm,)
        for norm in (
            "embedding_norm",
            "hidden_norm",
            "attention_norm",
            "q_norm",
            "k_norm",
            "mlp_norm",
            "final_norm",
        )
    },
}
"""The parts that lie one below the other in each weight that is held."""


def bare_names(files: WeightFiles) -> dict[str, str]:
    """The tensors without ``model.`` in front, to their names in the files; 4-bit linears under the name of a plain one."""
    bare = {}
    for name in files.names():
        stem, _, last = name.rpartition(".")
        packed = f"{stem}.qweight" in files
        if packed and last in ("qzeros", "scales", "g_idx"):
            continue
        full = f"{stem}.weight" if packed and last == "qweight" else name
        bare[full.removeprefix("model.")] = full
    return bare


def draft_specs(
    files: WeightFiles, names: Mapping[str, str], layout: Layout, a: Architecture, draft_vocabulary: int
) -> tuple[WeightSpec, ...]:
    """The weights that are held, from the tensors that there are.

    Args:
        files: The draft's.
        names: Tensor of each part, a 4-bit linear's as ``.weight``.
        layout: The draft's.
        a: Its layer.
        draft_vocabulary: Rows of a head of its own.

    Raises:
        CheckpointError: Tensors of another shape or type, 4 bits that are not read; lists them.
    """
    faults: list[str] = []
    specs = []
    for weight, parts in _MADE_OF.items():
        there = [part for part in parts if part in names]
        if not there:
            continue
        sources, start = [], 0
        for part in there:
            source = WeightSource(names[part], start, layout.shape(part, a, draft_vocabulary))
            sources.append(source)
            start += source.shape[0]
        packing = _packing(files, a, sources, faults)
        for source in sources:
            faults += (
                tensor_faults(files, source.name, source.shape, FLOATS)
                if packing is None
                else _packed_faults(files, source, packing)
            )
        specs.append(WeightSpec(weight, (start, *sources[0].shape[1:]), tuple(sources), packing))
    if faults:
        raise CheckpointError(f"{files.folder}: no draft of this target: {'; '.join(faults[:8])}")
    return tuple(specs)


def tensor_faults(
    files: WeightFiles, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]
) -> list[str]:
    """What is wrong with a tensor; one that is there in 4 bits alone was found to be wrong elsewhere."""
    if name not in files:
        return []
    info = files.info(name)
    if tuple(info.shape) != shape:
        return [f"{name} is {list(info.shape)} instead of {list(shape)}"]
    if info.dtype not in dtypes:
        return [f"{name} is {info.dtype} instead of {'a float' if dtypes is FLOATS else ' or '.join(dtypes)}"]
    return []


def _packing(
    files: WeightFiles, a: Architecture, sources: Sequence[WeightSource], faults: list[str]
) -> Packing | None:
    """How a weight is grouped that the files have in 4 bits; None where it is plain, or refused."""
    packed = [source.module for source in sources if f"{source.module}.qweight" in files]
    if not packed:
        return None
    quantization, inputs = a.quantization, sources[0].shape[-1]
    if quantization is None:
        faults.append(f"{packed[0]} is in 4 bits, and config.json has no quantization_config")
    elif quantization.method != "gptq":
        faults.append(f"quant_method is {quantization.method}, and 4-bit drafts are read in the layout gptq")
    elif quantization.act_order:
        faults.append("desc_act is true, and 4-bit drafts are read without act-order")
    elif len(packed) < len(sources):
        faults.append(
            f"{', '.join(packed)} of {len(sources)} linears that are one product here are in 4 bits"
        )
    elif inputs % quantization.group_of(inputs) or inputs % WORD_WEIGHTS:
        faults.append(
            f"{packed[0]} has {inputs} inputs, no whole number of groups of {quantization.group_of(inputs)}"
        )
    else:
        return Packing(quantization.group_of(inputs), act_order=False)
    return None


def packed_shape(source: WeightSource, packing: Packing) -> Shape:
    """Sizes of one 4-bit linear."""
    outputs, inputs = source.shape
    return Shape(outputs, inputs, packing.group)


def _packed_faults(files: WeightFiles, source: WeightSource, packing: Packing) -> list[str]:
    faults = []
    wanted = gptq.expected(source.module, packed_shape(source, packing), act_order=False)
    for tensor, expected in wanted.items():
        if tensor in files:
            faults += tensor_faults(files, tensor, expected.shape, expected.dtypes)
        elif expected.needed:
            faults.append(f"{tensor} is missing")
    return faults
