"""The static budget: every byte that daemon and engine will hold, computed before anything is loaded.

The sizes of buffers are exact (:mod:`edged.memory.buffers` is what the executor allocates). What Python, torch and
their libraries take themselves was measured and stands here as constants.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edged.errors import LedgerError
from edged.memory.available import available_memory
from edged.memory.buffers import (
    ACTIVATIONS,
    ELEMENT_BYTES,
    KV_PAGES,
    LOGITS,
    PAGE_TOKENS,
    WEIGHTS,
    BufferSpec,
    ModelPlan,
    step_buffers,
    weight_buffers,
)
from edged.models.architecture import Architecture
from edged.models.weights import parameter_count
from edged.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from edged.config import Config

MIB = 2**20

TORCH_RUNTIME = 272 * MIB
"""Proportional set size of an engine process on the CPU beyond its buffers: the interpreter, numpy and torch 2.13
(220 MiB once imported), what MKL and OpenMP keep for their threads, tokenizer and channel."""

SAMPLING_ROWS = 8
SAMPLING_BYTES = 64
"""Scratch of the sampling operator: bytes an entry of the vocabulary for each row that is drawn together."""

DEFAULT_SHARE = 0.8
"""Part of the available memory that is the budget when the configuration names none."""

SMALLEST_CONTEXT = PAGE_TOKENS


@dataclass(frozen=True)
class LedgerRow:
    """One use of memory: what it is, its bytes, and how they come about."""

    name: str
    bytes: int
    note: str = ""


@dataclass(frozen=True)
class Ledger:
    """All rows, and the budget that they must fit in (bytes)."""

    rows: tuple[LedgerRow, ...]
    budget: int
    advice: str = ""
    """What would fit, when this does not."""

    @property
    def total(self) -> int:
        """Bytes of all rows."""
        return sum(row.bytes for row in self.rows)

    @property
    def fits(self) -> bool:
        """Whether the total is inside the budget."""
        return self.total <= self.budget

    def check(self) -> None:
        """Refuse what does not fit.

        Raises:
            LedgerError: With the shortfall and what would fit.
        """
        if not self.fits:
            raise LedgerError(
                f"{format_size(self.total)} are needed, {format_size(self.total - self.budget)} more than the budget of "
                f"{format_size(self.budget)} (memory.budget); {self.advice}",
                field="memory.budget",
            )


def plan_memory(config: Config) -> Ledger:
    """The ledger of a configuration; reads each model's ``config.json`` and nothing else.

    Raises:
        CheckpointError: A model folder's ``config.json`` is refused.
        LedgerError: It does not fit, or no budget is given and the system does not say how much memory there is.
    """
    ledger = compute_ledger(config)
    ledger.check()
    return ledger


def compute_ledger(config: Config) -> Ledger:
    """As :func:`plan_memory`, also when it does not fit; :attr:`Ledger.advice` then says what would.

    Raises:
        CheckpointError: A model folder's ``config.json`` is refused.
        LedgerError: No budget is given and the system does not say how much memory there is.
    """
    plans = {model.name: ModelPlan.of(model, Architecture.of(model)) for model in config.models}
    budget = config.memory.budget
    if budget is None:
        available = available_memory()
        if available is None:
            raise LedgerError(
                "the system does not say how much memory it has: set memory.budget", field="memory.budget"
            )
        budget = int(available * DEFAULT_SHARE)
    return make_ledger(plans, budget=budget, host=config.host)


def make_ledger(plans: dict[str, ModelPlan], *, budget: int, host: int) -> Ledger:
    """The ledger of planned models.

    Args:
        plans: By the models' names.
        budget: Bytes that everything must fit in.
        host: Bytes set aside for the daemon process.
    """
    rows: list[LedgerRow] = []
    for name, plan in plans.items():
        prefix = f"{name}: " if len(plans) > 1 else ""
        rows += [replace(row, name=prefix + row.name) for row in model_rows(plan)]
    rows.append(LedgerRow("engine process", TORCH_RUNTIME, "Python, torch and their libraries, measured"))
    rows.append(LedgerRow("daemon process", host, "memory.host"))
    ledger = Ledger(tuple(rows), budget)
    return ledger if ledger.fits else replace(ledger, advice=_advice(plans, budget - ledger.total))


def model_rows(plan: ModelPlan) -> tuple[LedgerRow, ...]:
    """What one model holds: weights, KV pages, activations and scratch, logits and sampling."""
    buffers = (*weight_buffers(plan), *step_buffers(plan))
    a = plan.architecture
    page = 2 * a.layers * a.kv_width * PAGE_TOKENS * ELEMENT_BYTES[plan.dtype]
    return (
        LedgerRow(WEIGHTS, _bytes_of(buffers, WEIGHTS), f"{parameter_count(a):,} parameters in {plan.dtype}"),
        LedgerRow(
            KV_PAGES,
            _bytes_of(buffers, KV_PAGES),
            f"{plan.pages} pages of {PAGE_TOKENS} tokens, {format_size(page)} each: "
            f"{plan.max_sequences} x {plan.context_length} tokens",
        ),
        LedgerRow(
            ACTIVATIONS,
            _bytes_of(buffers, ACTIVATIONS) + attention_scratch(plan),
            f"{plan.step_tokens} tokens a step: prefill_chunk and one for each sequence",
        ),
        LedgerRow(
            LOGITS,
            _bytes_of(buffers, LOGITS) + sampling_scratch(plan),
            f"{plan.max_sequences} x {a.vocabulary} logits",
        ),
    )


def attention_scratch(plan: ModelPlan) -> int:
    """Results of torch's attention, which it allocates itself: two partial ones, and their merged one in fp32."""
    return 3 * plan.step_tokens * plan.architecture.q_width * ELEMENT_BYTES[plan.compute_dtype]


def sampling_scratch(plan: ModelPlan) -> int:
    """What drawing tokens allocates for a moment."""
    return min(plan.max_sequences, SAMPLING_ROWS) * plan.architecture.vocabulary * SAMPLING_BYTES


def model_bytes(plan: ModelPlan) -> int:
    """Bytes that one model holds."""
    return sum(row.bytes for row in model_rows(plan))


def largest_context_length(plan: ModelPlan, room: int) -> int | None:
    """Largest context length, up to the plan's own, with which the model holds at most ``room`` bytes; None: none."""
    return _largest(
        lambda length: replace(plan, context_length=length, prefill_chunk=min(plan.prefill_chunk, length)),
        SMALLEST_CONTEXT,
        plan.context_length,
        room,
    )


def largest_max_sequences(plan: ModelPlan, room: int) -> int | None:
    """Largest number of sequences, up to the plan's own, with which the model fits ``room`` bytes; None: none."""
    return _largest(lambda count: replace(plan, max_sequences=count), 1, plan.max_sequences, room)


def _largest(plan_of: Callable[[int], ModelPlan], low: int, high: int, room: int) -> int | None:
    """Largest number from ``low`` to ``high`` whose plan fits; bytes grow with the number."""
    if low > high or model_bytes(plan_of(low)) > room:
        return None
    while low < high:
        middle = (low + high + 1) // 2
        if model_bytes(plan_of(middle)) <= room:
            low = middle
        else:
            high = middle - 1
    return low


def _advice(plans: dict[str, ModelPlan], left: int) -> str:
    """What would fit; ``left`` is negative, the bytes that are missing."""
    offers = []
    for name, plan in plans.items():
        room = model_bytes(plan) + left
        context, sequences = largest_context_length(plan, room), largest_max_sequences(plan, room)
        ways = []
        if context is not None:
            ways.append(f"context_length of at most {context}")
        if sequences is not None:
            ways.append(f"max_sequences of at most {sequences}")
        if ways:
            subject = f"model {name}" if len(plans) > 1 else "it"
            offers.append(f"{subject} would fit with {' or '.join(ways)}")
    if offers:
        return "; ".join(offers)
    missing = -left - sum(model_bytes(plan) - model_bytes(_smallest(plan)) for plan in plans.values())
    if missing <= 0:
        return "it would fit with smaller context_length and max_sequences of several models together"
    narrow = [
        replace(plan, dtype="bfloat16") if ELEMENT_BYTES[plan.dtype] > ELEMENT_BYTES["bfloat16"] else plan
        for plan in plans.values()
    ]
    saved = sum(model_bytes(plan) for plan in plans.values()) - sum(
        model_bytes(_smallest(plan)) for plan in narrow
    )
    return (
        f"no context_length and max_sequences would fit: raise memory.budget by at least {format_size(missing)}"
        f"{', or set dtype to bfloat16 and lower both' if left + saved >= 0 else ''}"
    )


def _smallest(plan: ModelPlan) -> ModelPlan:
    """The plan with one sequence of one page."""
    chunk = min(plan.prefill_chunk, SMALLEST_CONTEXT)
    return replace(plan, context_length=SMALLEST_CONTEXT, max_sequences=1, prefill_chunk=chunk)


def _bytes_of(buffers: Iterable[BufferSpec], row: str) -> int:
    return sum(buffer.nbytes for buffer in buffers if buffer.row == row)
