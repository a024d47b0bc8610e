"""A draft model: what its folder holds, and whether it goes with a target.

EAGLE (arXiv 2401.15077), EAGLE-2 (2406.16858) and EAGLE-3 (2503.01840), and heads for multi-token prediction (DeepSeek-V3,
2412.19437): one decoder layer that goes on from the target's hidden states; :mod:`edged.models.draft_layout` has the tensors of
each. The embedding is the target's, and so is the LM head but for EAGLE-3. FR-Spec (2502.14856): drafts are taken from the
tokens of a map alone. Linears may be in 4 bits in GPTQ's layout.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from edged.checkpoint import gptq
from edged.checkpoint.safetensors_files import WeightFiles
from edged.errors import CheckpointError
from edged.models.architecture import Architecture
from edged.models.draft_layout import EAGLE, EAGLE3, MTP, Layout
from edged.models.draft_weights import bare_names, draft_specs, packed_shape, tensor_faults

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy.typing as npt

    from edged.checkpoint.packed import PackedModule
    from edged.models.weights import Packing, WeightSource, WeightSpec

    Int32Array = npt.NDArray[np.int32]
    Int64Array = npt.NDArray[np.int64]

_TABLES = {"d2t": ("I64", "I32"), "t2d": ("BOOL", "U8")}


@dataclass(frozen=True)
class Eagle:
    """One draft.

    Attributes:
        layer: Sizes of its layer (:class:`Architecture` of one layer), with the scales that its forward has.
        names: The tensor of each part in the folder's files; of a 4-bit linear the name that it would have as ``.weight``.
        layout: How its tensors are spelled, and what that says of the forward.
        specs: The weights as they are held, and what they are made of.
        hidden_layers: EAGLE-3: layers of the target whose inputs it sees; otherwise it sees the final norm's output.
        token_ids: EAGLE-3: the ids of its own vocabulary; None: the target's.
    """

    folder: Path
    layer: Architecture
    names: Mapping[str, str]
    layout: Layout
    specs: tuple[WeightSpec, ...]
    hidden_layers: tuple[int, ...] = ()
    token_ids: Int32Array | None = None

    @classmethod
    def read(cls, folder: Path, target: Architecture, *, residual_layers: int | None = None) -> Eagle:
        """Read a draft's configuration and the headers of its files.

        Args:
            folder: The draft's folder; of MTP heads it may be the target's own.
            target: The model it drafts for.
            residual_layers: Layers that its residual scale counts with, where the folder does not say ``mup_denominator``;
                those of the target and its own by default. Public engines disagree on it.

        Raises:
            CheckpointError: The folder is damaged, or the draft is of another target; names the key or tensor.
        """
        layer = Architecture.read(folder)
        file = folder / "config.json"
        config = json.loads(file.read_text("utf-8"))
        with WeightFiles.open(folder) as files:
            bare = bare_names(files)
            layout = Layout.of(bare)
            _check_sizes(layer, target, layout, file)
            if layer.residual_scale != 1.0:
                layer = replace(layer, residual_scale=_residual_scale(config, target, residual_layers, file))
            vocabulary = _draft_vocabulary(config, layer, file) if layout.kind == EAGLE3 else 0
            names = layout.resolve(bare, str(folder))
            specs = draft_specs(files, names, layout, layer, vocabulary)
            ids = _own_vocabulary(files, names, vocabulary, target) if layout.kind == EAGLE3 else None
        hidden_layers = _hidden_layers(config, target, file) if layout.kind == EAGLE3 else ()
        return cls(folder, layer, names, layout, specs, hidden_layers, ids)

    def has(self, part: str) -> bool:
        """Whether the draft has an optional part."""
        return part in self.names

    @property
    def is_plain(self) -> bool:
        """Whether it is an EAGLE draft without biases of attention and norms of heads."""
        return self.layout.kind == EAGLE and not any(map(self.has, ("q_bias", "q_norm")))

    @property
    def hidden_width(self) -> int:
        """Elements of what it sees of each of the target's tokens."""
        return max(1, len(self.hidden_layers)) * self.layer.hidden

    def read_packed(self, files: WeightFiles, source: WeightSource, packing: Packing) -> PackedModule:
        """A 4-bit linear of the draft.

        Raises:
            CheckpointError: It is damaged.
        """
        quantization = self.layer.quantization
        assert quantization is not None, "or it would have no packing"  # noqa: S101
        shape = packed_shape(source, packing)
        return gptq.read(files, source.module, shape, act_order=False, zero_offset=quantization.zero_offset)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The weights' shapes, by part: q, k, v and gate, up lie in one matrix each."""
        return {spec.name: spec.shape for spec in self.specs}


def _check_sizes(layer: Architecture, target: Architecture, layout: Layout, file: Path) -> None:
    """Refuse a draft of another model."""
    checks: list[tuple[str, Any, Any]] = [
        ("hidden_size", layer.hidden, target.hidden),
        ("vocab_size", layer.vocabulary, target.vocabulary),
    ]
    if layout.kind != MTP:
        checks.insert(0, ("num_hidden_layers", layer.layers, 1))
    if layout.kind != EAGLE3:  # whose head and norms are its own
        checks += [
            ("scale_emb", layer.embedding_scale, target.embedding_scale),
            ("dim_model_base", layer.logit_divisor, target.logit_divisor),
        ]
    for key, own, wanted in checks:
        if own != wanted:
            whose = "a draft has" if key == "num_hidden_layers" else "the target has"
            raise CheckpointError(f"{file}: {key} gives {own} and {whose} {wanted}", field=key)


def _draft_vocabulary(config: Mapping[str, Any], layer: Architecture, file: Path) -> int:
    """Of an EAGLE-3 draft."""
    count: Any = config.get("draft_vocab_size", layer.vocabulary)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 < count <= layer.vocabulary:
        raise CheckpointError(
            f"{file}: draft_vocab_size {count!r} must be a whole number from 1 to {layer.vocabulary}",
            field="draft_vocab_size",
        )
    return count


def _residual_scale(
    config: Mapping[str, Any], target: Architecture, residual_layers: int | None, file: Path
) -> float:
    """Of a muP draft's layer."""
    count: Any = residual_layers or config.get("mup_denominator") or target.layers + 1
    if isinstance(count, bool) or not isinstance(count, int | float) or not 0 < count < math.inf:
        raise CheckpointError(
            f"{file}: mup_denominator {count!r} must be a number above 0", field="mup_denominator"
        )
    scale: float = float(config["scale_depth"]) / float(count) ** 0.5
    return scale


def _hidden_layers(config: Mapping[str, Any], target: Architecture, file: Path) -> tuple[int, ...]:
    """Layers of the target whose inputs an EAGLE-3 draft sees; by default the third, the middle and the third last."""
    key = "eagle_aux_hidden_state_layer_ids"
    nested = config.get("eagle_config")
    said = config.get(key) or (nested.get(key) if isinstance(nested, dict) else None)
    layers = said or [2, target.layers // 2, target.layers - 3]
    sound = (
        isinstance(layers, list)
        and len(layers) == 3  # as many as fc fuses
        and all(isinstance(each, int) and not isinstance(each, bool) for each in layers)
        and all(0 <= each < target.layers for each in layers)
    )
    if not sound:
        raise CheckpointError(
            f"{file}: {key} {layers!r} must name three layers of the target, which has {target.layers}",
            field=key,
        )
    return tuple(layers)


def _own_vocabulary(
    files: WeightFiles, names: Mapping[str, str], count: int, target: Architecture
) -> Int32Array | None:
    """EAGLE-3: the target's id of each of the draft's tokens; None where they are the same.

    Raises:
        CheckpointError: The tables contradict each other, or name a token twice or one that the target has not.
    """
    faults = [
        fault
        for part, size in (("d2t", count), ("t2d", target.vocabulary))
        if part in names
        for fault in tensor_faults(files, names[part], (size,), _TABLES[part])
    ]
    if faults:
        raise CheckpointError(f"{files.folder}: no draft of this target: {'; '.join(faults)}")
    if "d2t" not in names:
        if count != target.vocabulary:
            raise CheckpointError(
                f"{files.folder}: d2t is missing, and draft_vocab_size is {count}", field="draft_vocab_size"
            )
        return None
    ids: Int64Array = np.arange(count, dtype=np.int64) + files.read_array(names["d2t"]).astype(np.int64)
    sorted_ids = check_token_map(ids, target.vocabulary, f"{files.folder}: d2t")
    if "t2d" in names:
        said = np.flatnonzero(files.read_array(names["t2d"]))
        if not np.array_equal(said, sorted_ids):
            raise CheckpointError(f"{files.folder}: t2d does not mark the tokens that d2t names", field="t2d")
    own: Int32Array = ids.astype(np.int32)
    return own


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
