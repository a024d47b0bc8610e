"""What of a configuration would fit the memory there is."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from edged.memory.buffers import ELEMENT_BYTES, PAGE_TOKENS, ModelPlan
from edged.memory.model_rows import model_bytes
from edged.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable

SMALLEST_CONTEXT = PAGE_TOKENS


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


def advice(plans: dict[str, ModelPlan], left: int) -> str:
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
        elif plan.max_sequences > 1:
            # Fewer sequences alone do not suffice: name both, so that the reader sees what one sequence could have.
            alone = largest_context_length(replace(plan, max_sequences=1), room)
            if alone is not None and alone > (context or 0):
                ways.append(f"max_sequences of 1 and context_length of at most {alone}")
        if ways and plan.quantized_kv is None and model_bytes(replace(plan, kv_dtype="int8")) <= room:
            ways.append("kv_dtype: int8")
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
