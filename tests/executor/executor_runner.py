"""Drives an executor the way the engine does, a few sequences at a time; and the references it is held to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from edged.config import ModelConfig
from edged.executor.base import PAGE_TOKENS, SamplingRow, StepBatch
from edged.executor.torch_executor import TorchExecutor

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NEAR_TIE = 1e-4
"""Where the reference's two best logits are closer than this, either token is right."""


def load(folder: Path, **settings: Any) -> TorchExecutor:
    executor = TorchExecutor(
        ModelConfig(name="m", path=folder, **{"threads": torch.get_num_threads(), **settings})
    )
    executor.load(lambda what, done, total: None)
    return executor


class Prompt:
    """One sequence: its tokens, and how many of them are in its pages."""

    def __init__(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        self.tokens = [int(token) for token in tokens]
        self.stored = 0
        self.table = np.asarray(pages, np.int32)

    def take(self, count: int) -> list[int]:
        return self.tokens[self.stored : self.stored + count]


class Runner:
    """Sequences on one executor; pages are given out in order, or as the caller says."""

    def __init__(self, executor: TorchExecutor) -> None:
        self.executor = executor
        self._free = list(range(executor.limits.pages))

    def sequence(self, tokens: Sequence[int], *, room: int = 0, pages: Sequence[int] | None = None) -> Prompt:
        if pages is None:
            count = -(-(len(tokens) + room) // PAGE_TOKENS)
            pages, self._free = self._free[:count], self._free[count:]
        return Prompt(tokens, pages)

    def batch(self, parts: Sequence[tuple[Prompt, int]], rows: str = "last") -> StepBatch:
        """``parts``: sequences and how many of their tokens to run; ``rows``: ``all``, ``last`` (of each) or ``none``."""
        taken = [(sequence, sequence.take(count)) for sequence, count in parts]
        starts = np.cumsum([0, *(len(tokens) for _, tokens in taken)]).astype(np.int32)
        needed = {"all": np.arange(starts[-1]), "last": starts[1:] - 1, "none": np.arange(0)}[rows]
        return StepBatch(
            token_ids=np.array([token for _, tokens in taken for token in tokens], np.int32),
            positions=np.concatenate(
                [np.arange(s.stored, s.stored + len(tokens), dtype=np.int32) for s, tokens in taken]
            ),
            sequence_starts=starts,
            lengths=np.array([sequence.stored for sequence, _ in taken], np.int32),
            page_tables=[sequence.table for sequence, _ in taken],
            logit_rows=needed.astype(np.int32),
            sampling=tuple(SamplingRow() for _ in needed),
        )

    def hidden_states(self, sequence: Prompt, chunk: int) -> np.ndarray:
        """Of every token of a sequence that is not stored, fp32 [n, H]."""
        found = []
        while count := len(sequence.take(chunk)):
            found.append(self.executor.hidden_states(self.batch([(sequence, count)], "all")))
            sequence.stored += count
        return np.concatenate(found)

    def logits(self, parts: Sequence[tuple[Prompt, int]], rows: str = "last") -> np.ndarray:
        result = self.executor.logits(self.batch(parts, rows))
        for sequence, count in parts:
            sequence.stored += len(sequence.take(count))
        return result

    def prefill(self, sequence: Prompt, chunk: int, rows: str = "all") -> np.ndarray:
        """Run all of a sequence's tokens, ``chunk`` at a time, and return the logits of all of them, or of the last."""
        parts = []
        while sequence.stored < len(sequence.tokens):
            is_last = sequence.stored + chunk >= len(sequence.tokens)
            parts.append(self.logits([(sequence, chunk)], rows if rows == "all" or is_last else "none"))
        return np.concatenate(parts)

    def generate(self, sequences: Sequence[Prompt], count: int, chunk: int = 64) -> list[list[int]]:
        """``count`` greedy tokens of each; prompts are prefilled one by one, then all decode in shared steps."""
        for sequence in sequences:
            while sequence.stored < len(sequence.tokens):
                step = self.batch([(sequence, chunk)])
                token = int(self.executor.step(step)[0])
                sequence.stored += len(step.token_ids)
            sequence.tokens.append(token)
        for _ in range(count - 1):
            parts = [(sequence, 1) for sequence in sequences]
            drawn = self.executor.step(self.batch(parts))
            for sequence, token in zip(sequences, drawn.tolist(), strict=True):
                sequence.stored += 1
                sequence.tokens.append(token)
        return [sequence.tokens[-count:] for sequence in sequences]


def reference_logits(model: torch.nn.Module, tokens: Sequence[int], keep: int = 0) -> np.ndarray:
    """Logits of transformers' model for the last ``keep`` tokens (0: all), ``[keep, V]``."""
    with torch.inference_mode():
        result = model(torch.tensor([list(tokens)]), logits_to_keep=keep, use_cache=False).logits[0]
    return result.numpy()


def assert_greedy(model: torch.nn.Module, prompt: Sequence[int], tokens: Sequence[int]) -> None:
    """Each token is the reference's choice after those before it, except where its two best are nearly equal.

    The reference sees our tokens, so a sequence that passes without a near tie is the reference's own greedy answer.
    """
    assert_choices(reference_logits(model, [*prompt, *tokens[:-1]], keep=len(tokens)), tokens)


def assert_choices(logits: np.ndarray, tokens: Sequence[int]) -> None:
    """Each token is the best of its row of the reference's logits, or nearly."""
    best = logits.argmax(axis=1)
    for place, token in enumerate(tokens):
        if token != best[place]:
            gap = logits[place].max() - logits[place, token]
            assert gap < NEAR_TIE, f"token {place} is {token}, the reference says {best[place]} by {gap}"
