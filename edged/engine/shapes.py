"""The ranges of step sizes that a plan is built for: one profile for decoding and verifying, one for prefill chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edged.engine import graph
from edged.errors import InvalidArgumentError
from plugins_trt.contract import MAX_DECODE, round_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edged.config import ModelConfig
    from edged.engine.onnx_nodes import Dim

Range = tuple[int, int, int]
"""Least, usual and most."""

MAX_PAGES = 65536
"""Pages of a sequence (4 194 304 tokens), the longest context that a configuration may ask for. The pages are no
tensors of the graph, so a plan is no larger for a longer context."""

MAX_POSITIONS = MAX_PAGES * 64

PREFILL_STEP = 16
"""Steps of more than 64 tokens are padded to a multiple of this."""

MOST_TOKENS = 16384
"""Of a step."""

LEAST_MOST = 2
"""Least upper end of a range: TensorRT folds a size that can only be 1, and versions from 10.13 on have done so
wrongly (NVIDIA/TensorRT-Edge-LLM#105)."""


@dataclass(frozen=True)
class Profile:
    """Sizes of the steps that one optimization profile takes."""

    name: str
    tokens: Range
    sequences: Range
    rows: Range

    def shape(self, dims: Sequence[Dim]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Least, usual and most of an input's shape."""
        ranges = {
            graph.TOKENS: self.tokens,
            graph.SEQUENCES: self.sequences,
            graph.BOUNDARIES: tuple(size + 1 for size in self.sequences),
            graph.PAGES: (1, 512, MAX_PAGES),
            graph.ROWS: self.rows,
            graph.POSITIONS: (1, 32768, MAX_POSITIONS),
        }
        least, usual, most = (
            tuple(ranges[dim][which] if isinstance(dim, str) else dim for dim in dims) for which in range(3)
        )
        return least, usual, most


@dataclass(frozen=True)
class EngineShapes:
    """What steps a plan takes.

    Attributes:
        prefill_tokens: Most tokens of a step with a prefill chunk, those of decoding sequences included.
        max_sequences: Most sequences in one step.
    """

    prefill_tokens: int = 2048
    max_sequences: int = 64

    def __post_init__(self) -> None:
        """Refuse sizes that no plan has."""
        if not MAX_DECODE <= self.prefill_tokens <= MOST_TOKENS:
            raise InvalidArgumentError(
                f"prefill_tokens {self.prefill_tokens}: a plan takes chunks of {MAX_DECODE} to {MOST_TOKENS} tokens",
                field="prefill_tokens",
            )
        if not 1 <= self.max_sequences <= 256:
            raise InvalidArgumentError(
                f"max_sequences {self.max_sequences}: a plan takes 1 to 256", field="max_sequences"
            )

    @classmethod
    def of(cls, model: ModelConfig) -> EngineShapes:
        """What a model of the configuration needs: a prefill chunk beside a token of each sequence, padded."""
        tokens = round_up(model.prefill_chunk + model.max_sequences, PREFILL_STEP)
        if not 1 <= model.prefill_chunk <= tokens <= MOST_TOKENS:
            raise InvalidArgumentError(
                f"prefill_chunk {model.prefill_chunk}: with a token of each of {model.max_sequences} sequences a step takes 1 "
                f"to {MOST_TOKENS} tokens",
                field="prefill_chunk",
            )
        return cls(prefill_tokens=max(tokens, MAX_DECODE), max_sequences=model.max_sequences)

    @property
    def profiles(self) -> tuple[Profile, Profile]:
        """Decoding (or verifying) up to 64 tokens; prefill chunks."""
        sequences = (1, 1, max(self.max_sequences, LEAST_MOST))
        decode = (1, min(8, MAX_DECODE), MAX_DECODE)
        # A row for each sequence, in the power of two that steps are padded to.
        rows = (1, 1, max(MAX_DECODE, 1 << (self.max_sequences - 1).bit_length()))
        return (
            Profile("decode", decode, sequences, decode),
            Profile("prefill", (1, self.prefill_tokens, self.prefill_tokens), sequences, rows),
        )

    @property
    def text(self) -> str:
        """All of it in one line, as a part of an engine's key."""
        return (
            " ".join(
                f"{each.name}:tokens={each.tokens}:sequences={each.sequences}:rows={each.rows}"
                for each in self.profiles
            )
            + f" pages={MAX_PAGES}"
        )
