"""What a draft model holds beside its target."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from edged.errors import CheckpointError, UnsupportedError
from edged.memory.specs import ELEMENT_BYTES, PAGE_TOKENS, BufferSpec
from edged.models.draft_layout import MTP, TITLES
from edged.models.eagle import Eagle, check_token_map, check_tokenizers
from edged.models.weights import weight_parts

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from edged.config import ModelConfig
    from edged.models.architecture import Architecture

DRAFT = "draft model"
"""The ledger's row."""
CHUNK = 128
"""Rows that the draft runs at once."""
MOST_NODES = 640
"""Rows of a tree: ten of each of 64 levels."""
PACKED_TILE = 1 << 18
"""4-bit weights of the draft that are widened at a time."""
STATES = "draft.states"
"""What an EAGLE-3 draft sees of a step's tokens, ``[T, 3 H]``."""


@dataclass(frozen=True)
class DraftPlan:
    """One draft.

    Attributes:
        eagle: What its folder holds.
        window: Rows that a row attends to, and what stands before them in their block of 64.
        token_map: Token ids that drafts are taken from, int32 [n]; None: all.
        width: Likeliest tokens below a node, and nodes of a level that go on.
        levels: Levels of a tree.
    """

    eagle: Eagle
    window: int
    token_map: npt.NDArray[np.int32] | None = field(default=None, compare=False)
    width: int = 10
    levels: int = 6

    @classmethod
    def of(cls, config: ModelConfig, target: Architecture) -> DraftPlan | None:
        """The draft of a configured model; None where it has none.

        Raises:
            CheckpointError: The draft or its token map is damaged, or of another model.
            UnsupportedError: The device does not run such drafts.
        """
        speculation = config.speculation
        folder = config.path if speculation.method == "mtp" else None
        folder = speculation.draft or folder
        if not speculation.has_model or folder is None:
            return None
        eagle = Eagle.read(folder, target, residual_layers=speculation.residual_layers)
        if (eagle.layout.kind == MTP) != (speculation.method == "mtp"):
            held = "an MTP head" if eagle.layout.kind == MTP else "no MTP head"
            raise CheckpointError(
                f"{folder}: holds {held}, and speculation.method is {speculation.method}",
                field="speculation.method",
            )
        if config.device == "cuda" and not eagle.is_plain:
            raise UnsupportedError(
                f"model {config.name}: device cuda runs EAGLE and EAGLE-2 drafts; {folder} is "
                f"{TITLES[eagle.layout.kind]} or has biases or norms of heads: set device to cpu, or speculation.method to prompt_lookup",
                field="speculation.draft",
            )
        check_tokenizers(folder, config.path)
        token_map = eagle.token_ids
        if speculation.token_map is not None:
            file = speculation.token_map
            if eagle.has("head"):
                raise CheckpointError(
                    f"{file}: the draft {folder} has a vocabulary of its own; remove token_map",
                    field="speculation.token_map",
                )
            token_map = check_token_map(_read_ids(file), target.vocabulary, str(file))
        width, levels = speculation.width, max(speculation.most_depth, 1)
        return cls(eagle, speculation.window, token_map, width, levels)

    def own_angles(self, target: Architecture) -> bool:
        """Whether its rotary embedding turns otherwise than the target's."""
        own = self.eagle.layer
        return (own.head_dim, own.rope) != (target.head_dim, target.rope)

    @property
    def rows(self) -> int:
        """Rows of keys and values of a sequence."""
        return 2 * (-(-self.window // PAGE_TOKENS) + 1) * PAGE_TOKENS + MOST_NODES

    def buffers(self, dtype: str, sequences: int, tokens: int) -> tuple[BufferSpec, ...]:
        """Its weights, and what it holds of each sequence and of a step's tokens."""
        a, eagle = self.eagle.layer, self.eagle
        specs = [
            BufferSpec(
                f"draft.{part.name}",
                DRAFT,
                part.shape,
                part.dtype or (dtype if len(part.shape) > 1 else "float32"),
            )
            for spec in eagle.specs
            for part in weight_parts(spec)
        ]
        if self.token_map is not None and not eagle.has("head"):
            specs.append(BufferSpec("draft.head", DRAFT, (len(self.token_map), a.hidden), dtype))
        if eagle.hidden_layers:
            specs.append(BufferSpec(STATES, DRAFT, (tokens * eagle.hidden_width,), "float32"))
        packed = [spec.shape[1] for spec in eagle.specs if spec.packing is not None]
        if packed:
            half = max(PACKED_TILE, *packed) // 2
            specs += [
                BufferSpec("draft.packed_in", DRAFT, (CHUNK * max(packed),), "float32"),
                BufferSpec("draft.packed_tile", DRAFT, (half,), "float32"),
                BufferSpec("draft.packed_octets", DRAFT, (half,), "uint8"),
            ]
        specs.append(
            BufferSpec("draft.kv", DRAFT, (sequences, 2, a.kv_heads, self.rows, a.head_dim), "float32")
        )
        return tuple(specs)

    def scratch(self, sequences: int) -> int:
        """Bytes that it takes for a moment: hidden states that wait, scores of a chunk, a level's logits."""
        a = self.eagle.layer
        waiting = sequences * self.window * self.eagle.hidden_width
        scores = 3 * a.heads * CHUNK * self.rows
        states = 2 * a.heads * self.rows * a.head_dim
        vocabulary = a.vocabulary if self.token_map is None else len(self.token_map)
        widest = max(spec.shape[0] * spec.shape[1] for spec in self.eagle.specs if len(spec.shape) > 1)
        weights = max(widest, vocabulary * a.hidden)
        return (waiting + scores + states + weights + 30 * vocabulary) * ELEMENT_BYTES["float32"]


def _read_ids(file: Path) -> npt.NDArray[np.int64]:
    """The numbers of a token map."""
    try:
        ids = np.array(json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: a token map is a JSON list of token ids: {error}", field="speculation.token_map"
        ) from None
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise CheckpointError(
            f"{file}: a token map is a JSON list of whole numbers", field="speculation.token_map"
        )
    return ids.astype(np.int64)
