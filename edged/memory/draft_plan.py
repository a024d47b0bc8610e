"""What a draft model holds beside its target."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from edged.errors import CheckpointError
from edged.memory.specs import ELEMENT_BYTES, PAGE_TOKENS, BufferSpec
from edged.models.eagle import Eagle, check_token_map, check_tokenizers

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
        """
        speculation = config.speculation
        if speculation.method != "eagle" or speculation.draft is None:
            return None
        eagle = Eagle.read(speculation.draft, target, residual_layers=speculation.residual_layers)
        check_tokenizers(speculation.draft, config.path)
        token_map = None
        if speculation.token_map is not None:
            file = speculation.token_map
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

    def buffers(self, dtype: str, sequences: int) -> tuple[BufferSpec, ...]:
        """Its weights, and what it holds of each sequence."""
        a = self.eagle.layer
        specs = [
            BufferSpec(f"draft.{part}", DRAFT, shape, dtype if len(shape) > 1 else "float32")
            for part, shape in self.eagle.shapes().items()
        ]
        if self.token_map is not None:
            specs.append(BufferSpec("draft.head", DRAFT, (len(self.token_map), a.hidden), dtype))
        specs.append(
            BufferSpec("draft.kv", DRAFT, (sequences, 2, a.kv_heads, self.rows, a.head_dim), "float32")
        )
        return tuple(specs)

    def scratch(self, sequences: int) -> int:
        """Bytes that it takes for a moment: hidden states that wait, scores of a chunk, a level's logits."""
        a = self.eagle.layer
        waiting = sequences * self.window * a.hidden
        scores = 3 * a.heads * CHUNK * self.rows
        states = 2 * a.heads * self.rows * a.head_dim
        vocabulary = a.vocabulary if self.token_map is None else len(self.token_map)
        weights = max(2 * a.hidden * a.hidden, 2 * a.intermediate * a.hidden, vocabulary * a.hidden)
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
