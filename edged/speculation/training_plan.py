"""What decides the draft that a training makes."""

from __future__ import annotations

from dataclasses import dataclass

from edged.errors import InvalidArgumentError

HELD_OUT = 16
"""One sequence of so many is not trained on."""


@dataclass(frozen=True)
class TrainingPlan:
    """What decides the draft that comes out; a run goes on only where all of it is the same.

    Attributes:
        sequences: Prompts that the model goes on from.
        prompt_tokens: Most tokens of a prompt.
        answer_tokens: Tokens behind the longest prompt; all sequences have one length.
        passes: Over all sequences.
        rate: Largest learning rate.
        batch: Sequences of a training step.
        levels: Levels of a tree that are trained together.
        chat_share: Part of the prompts that are chats, where the model has a chat template.
        asked_share: Part of those in which the model itself has written what the user says (arXiv 2406.08464).
        greedy_share: Part of the answers that take the likeliest tokens; the others are drawn at ``temperature``.
        temperature: Of those.
        seed: Of everything random.
    """

    sequences: int = 512
    prompt_tokens: int = 64
    answer_tokens: int = 128
    passes: int = 8
    rate: float = 1e-3
    batch: int = 8
    levels: int = 3
    chat_share: float = 0.5
    asked_share: float = 0.5
    greedy_share: float = 0.5
    temperature: float = 0.7
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses what trains nothing."""
        for name, least in (
            ("sequences", HELD_OUT),
            ("prompt_tokens", 4),
            ("answer_tokens", 8),
            ("passes", 1),
            ("batch", 1),
            ("levels", 1),
        ):
            if getattr(self, name) < least:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}: at least {least}", field=name)
        if not 0 < self.rate <= 1:
            raise InvalidArgumentError(f"rate is {self.rate}: above 0 and at most 1", field="rate")
        for name in ("chat_share", "asked_share", "greedy_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}: from 0 to 1", field=name)

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.prompt_tokens + self.answer_tokens
