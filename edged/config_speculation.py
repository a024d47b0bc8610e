"""The configuration's keys of one model's speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass, field

from edged.config_keys import key as _key


@dataclass(frozen=True)
class SpeculationConfig:
    """Draft tokens that a step verifies together; the text is the same with and without them."""

    method: str = field(
        default="off",
        metadata=_key(
            "Where draft tokens come from; prompt_lookup takes what followed the last tokens earlier in the prompt or the "
            "answer",
            choices=("off", "prompt_lookup"),
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
            default="tree_size - 1",
        ),
    )

    @property
    def most_nodes(self) -> int:
        """Most tokens of a sequence in a step that verifies; 1 where nothing does."""
        return 1 if self.method == "off" else self.tree_size

    @property
    def most_depth(self) -> int:
        """Most draft tokens that follow one another."""
        return self.most_nodes - 1 if self.depth is None else self.depth
