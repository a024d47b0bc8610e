"""The configuration's keys of one model's speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path  # noqa: TC003 - the reader resolves the annotations

from edged.config_keys import key as _key

EAGLE_DEPTH = 6
"""Levels of a draft model's trees where nothing is said; deeper ones are seldom right."""


@dataclass(frozen=True)
class SpeculationConfig:
    """Draft tokens that a step verifies together; the text is the same with and without them."""

    method: str = field(
        default="off",
        metadata=_key(
            "Where draft tokens come from; prompt_lookup takes what followed the last tokens earlier in the prompt or the "
            "answer, eagle asks a draft model (EAGLE-2, EAGLE-3), mtp a head for multi-token prediction",
            choices=("off", "prompt_lookup", "eagle", "mtp"),
        ),
    )
    tree_size: int = field(
        default=16,
        metadata=_key(
            "Most tokens of a sequence in one step: the one that plain decoding has, and its drafts",
            low=1,
            high=64,
        ),
    )
    depth: int | None = field(
        default=None,
        metadata=_key(
            "Most draft tokens that follow one another, below tree_size",
            low=1,
            high=63,
            default="tree_size - 1; with eagle and mtp at most 6",
        ),
    )
    adaptive: bool = field(
        default=True,
        metadata=_key(
            "Verify only the drafts that pay by what was measured of steps and acceptance; false verifies all that are "
            "drafted, whatever it costs: for measurements, and where a request must take the same steps each time"
        ),
    )
    draft: Path | None = field(
        default=None,
        metadata=_key(
            "eagle: folder of the draft (config.json, safetensors), made for this very model; mtp: that of the head",
            default="none; with mtp the model's own folder",
        ),
    )
    token_map: Path | None = field(
        default=None,
        metadata=_key(
            "eagle, mtp: JSON list of the token ids that drafts are taken from (FR-Spec)",
            default="every token",
        ),
    )
    window: int = field(
        default=1024,
        metadata=_key("eagle, mtp: last tokens of a sequence that the draft attends to", low=64, high=65536),
    )
    width: int = field(
        default=10,
        metadata=_key(
            "eagle, mtp: likeliest tokens below a node, and nodes of a level that go on", low=1, high=10
        ),
    )
    residual_layers: int | None = field(
        default=None,
        metadata=_key(
            "eagle: layers that a muP draft's residual scale counts with",
            low=1,
            high=1024,
            default="the draft's mup_denominator, or one more than the model has",
        ),
    )

    @property
    def has_model(self) -> bool:
        """Whether a draft model runs beside the target."""
        return self.method in ("eagle", "mtp")

    @property
    def most_nodes(self) -> int:
        """Most tokens of a sequence in a step that verifies; 1 where nothing does."""
        return 1 if self.method == "off" else self.tree_size

    @property
    def most_depth(self) -> int:
        """Most draft tokens that follow one another."""
        if self.depth is not None:
            return self.depth
        return min(self.most_nodes - 1, EAGLE_DEPTH) if self.has_model else self.most_nodes - 1
