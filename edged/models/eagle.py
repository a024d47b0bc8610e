"""An EAGLE draft: what its folder holds, and whether it goes with a target.

EAGLE (arXiv 2401.15077) and EAGLE-2 (2406.16858): one decoder layer over ``fc([embedding; hidden])``, where ``hidden`` is the
target's final norm's output at a position and ``embedding`` that of the token after it. Embedding and LM head are the
target's. The layouts that are read: EAGLE's own (``layers.0``, without a norm before attention) and MiniCPM4's
(``eagle_layers.0``, with norms before ``fc``). FR-Spec (arXiv 2502.14856): drafts are taken from the tokens of a map alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from edged.checkpoint.safetensors_files import WeightFiles
from edged.errors import CheckpointError
from edged.models.architecture import Architecture

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy.typing as npt

    Int32Array = npt.NDArray[np.int32]
    Int64Array = npt.NDArray[np.int64]

FLOATS = ("F64", "F32", "BF16", "F16")
_LAYERS = ("layers.0.", "eagle_layers.0.")
_UNUSED = ("embed_tokens.weight", "lm_head.weight")
"""The target's own are used in their place."""


@dataclass(frozen=True)
class Eagle:
    """One draft.

    Attributes:
        layer: Sizes of its layer (:class:`Architecture` of one layer), with the scales that its forward has.
        names: The tensor of each part in the folder's files.
    """

    folder: Path
    layer: Architecture
    names: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path, target: Architecture, *, residual_layers: int | None = None) -> Eagle:
        """Read a draft's configuration and the headers of its files.

        Args:
            folder: The draft's folder.
            target: The model it drafts for.
            residual_layers: Layers that its residual scale counts with, where the folder does not say ``mup_denominator``;
                those of the target and its own by default. Public engines disagree on it.

        Raises:
            CheckpointError: The folder is damaged, or the draft is of another target; names the key or tensor.
        """
        layer = Architecture.read(folder)
        file = folder / "config.json"
        for key, own, wanted in (
            ("num_hidden_layers", layer.layers, 1),
            ("hidden_size", layer.hidden, target.hidden),
            ("vocab_size", layer.vocabulary, target.vocabulary),
            ("scale_emb", layer.embedding_scale, target.embedding_scale),
            ("dim_model_base", layer.logit_divisor, target.logit_divisor),
        ):
            if own != wanted:
                whose = "a draft has" if key == "num_hidden_layers" else "the target has"
                raise CheckpointError(f"{file}: {key} gives {own} and {whose} {wanted}", field=key)
        if layer.quantization is not None:
            raise CheckpointError(f"{file}: quantized drafts are not read yet", field="quantization_config")
        if layer.residual_scale != 1.0:
            depth = layer.residual_scale  # of one layer: scale_depth itself
            said = json.loads(file.read_text("utf-8")).get("mup_denominator")
            count = residual_layers or said or target.layers + 1
            if isinstance(count, bool) or not isinstance(count, int | float) or count <= 0:
                raise CheckpointError(
                    f"{file}: mup_denominator {count!r} must be a number above 0", field="mup_denominator"
                )
            layer = replace(layer, residual_scale=depth / float(count) ** 0.5)
        with WeightFiles.open(folder) as files:
            return cls(folder, layer, _names(files, layer))

    def has(self, part: str) -> bool:
        """Whether the draft has an optional part."""
        return part in self.names

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """What is held in memory, by part: q, k, v and gate, up lie in one matrix each."""
        a = self.layer
        shapes: dict[str, tuple[int, ...]] = {
            "fc": (a.hidden, 2 * a.hidden),
            "qkv": (a.qkv_width, a.hidden),
            "output": (a.hidden, a.q_width),
            "mlp_norm": (a.hidden,),
            "gate_up": (2 * a.intermediate, a.hidden),
            "down": (a.hidden, a.intermediate),
        }
        optional = {
            "fc_bias": a.hidden,
            "embedding_norm": a.hidden,
            "hidden_norm": a.hidden,
            "attention_norm": a.hidden,
        }
        return shapes | {part: (size,) for part, size in optional.items() if self.has(part)}


def _parts(a: Architecture) -> dict[str, tuple[str, tuple[int, ...], bool]]:
    """By part: its tensor behind the layer's prefix or without one, its shape, and whether it must be there."""
    return {
        "fc": ("fc.weight", (a.hidden, 2 * a.hidden), True),
        "fc_bias": ("fc.bias", (a.hidden,), False),
        "embedding_norm": ("input_norm1.weight", (a.hidden,), False),
        "hidden_norm": ("input_norm2.weight", (a.hidden,), False),
        "attention_norm": ("*input_layernorm.weight", (a.hidden,), False),
        "q": ("*self_attn.q_proj.weight", (a.q_width, a.hidden), True),
        "k": ("*self_attn.k_proj.weight", (a.kv_width, a.hidden), True),
        "v": ("*self_attn.v_proj.weight", (a.kv_width, a.hidden), True),
        "output": ("*self_attn.o_proj.weight", (a.hidden, a.q_width), True),
        "mlp_norm": ("*post_attention_layernorm.weight", (a.hidden,), True),
        "gate": ("*mlp.gate_proj.weight", (a.intermediate, a.hidden), True),
        "up": ("*mlp.up_proj.weight", (a.intermediate, a.hidden), True),
        "down": ("*mlp.down_proj.weight", (a.hidden, a.intermediate), True),
    }


def _names(files: WeightFiles, a: Architecture) -> dict[str, str]:
    """The tensor of each part; everything in the files must be one."""
    bare = {name.removeprefix("model."): name for name in files.names()}
    prefix = next((each for each in _LAYERS if any(name.startswith(each) for name in bare)), _LAYERS[0])
    found: dict[str, str] = {}
    faults: list[str] = []
    for part, (pattern, shape, needed) in _parts(a).items():
        name = bare.pop(pattern.replace("*", prefix), None)
        if name is None:
            if needed:
                faults.append(f"{pattern.replace('*', prefix)} is missing")
            continue
        info = files.info(name)
        if tuple(info.shape) != shape:
            faults.append(f"{name} is {list(info.shape)} instead of {list(shape)}")
        elif info.dtype not in FLOATS:
            faults.append(f"{name} is {info.dtype} instead of a float")
        found[part] = name
    faults += [f"{name} has no place in an EAGLE draft" for name in bare if name not in _UNUSED]
    if ("embedding_norm" in found) != ("hidden_norm" in found):
        faults.append("input_norm1 and input_norm2 come together")
    if faults:
        raise CheckpointError(f"{files.folder}: no EAGLE draft of this target: {'; '.join(faults[:8])}")
    return found


def check_tokenizers(draft: Path, target: Path) -> None:
    """Refuse a draft whose folder has a tokenizer of its own that names tokens otherwise.

    Raises:
        CheckpointError: The two vocabularies differ.
    """
    files = [folder / "tokenizer.json" for folder in (draft, target)]
    if not all(file.is_file() for file in files):
        return
    try:
        own, wanted = (json.loads(file.read_text("utf-8"))["model"]["vocab"] for file in files)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{files[0]}: cannot be held against {files[1]}: {error}") from None
    if own != wanted:
        raise CheckpointError(
            f"{files[0]}: its tokens are not those of {files[1]}: the draft is of another model"
        )


def check_token_map(ids: Int64Array, vocabulary: int, where: str) -> Int32Array:
    """The token ids that drafts are taken from, int32 [n], in rising order.

    Raises:
        CheckpointError: It is empty, or holds an id twice or one outside the vocabulary.
    """
    if ids.ndim != 1 or not len(ids):
        raise CheckpointError(f"{where}: a token map is a list of token ids, found shape {list(ids.shape)}")
    if ids.min() < 0 or ids.max() >= vocabulary:
        worst = int(ids[(ids < 0) | (ids >= vocabulary)][0])
        raise CheckpointError(
            f"{where}: token id {worst} is outside the vocabulary: ids go from 0 to {vocabulary - 1}"
        )
    unique, counts = np.unique(ids, return_counts=True)
    if len(unique) < len(ids):
        raise CheckpointError(f"{where}: token id {int(unique[counts > 1][0])} is in it more than once")
    return unique.astype(np.int32)
