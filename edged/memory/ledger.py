"""The static budget: every byte that daemon and engine will hold, computed before anything is loaded.

The sizes of buffers are exact (:mod:`edged.memory.buffers` is what the executor allocates). What Python, torch and
their libraries take themselves was measured and stands here as constants.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edged.config import CHECKS
from edged.engine.gpu import find_gpu
from edged.errors import LedgerError
from edged.memory.available import available_memory
from edged.memory.buffers import (
    ModelPlan,
)
from edged.memory.cuda_ledger import CUDA_CONTEXT, CUDA_RUNTIME
from edged.memory.fitting import advice
from edged.memory.model_rows import DEVICE, HOST, LedgerRow, model_bytes, model_rows
from edged.memory.residency import EVICTABLE, Residency, shared_room
from edged.models.architecture import Architecture
from edged.units import format_size

if TYPE_CHECKING:
    from collections.abc import Collection

    from edged.config import Config

MIB = 2**20

TORCH_RUNTIME = 272 * MIB
"""Proportional set size of an engine process on the CPU beyond its buffers: the interpreter, numpy and torch 2.13
(220 MiB once imported), what MKL and OpenMP keep for their threads, tokenizer and channel."""

EVICTABLE_MODELS = "evictable models"
"""Row of the ledger for the room that they share."""


DEFAULT_SHARE = 0.8
"""Part of the available memory that is the budget when the configuration names none."""


@dataclass(frozen=True)
class Ledger:
    """All rows, and the budget that they must fit in (bytes)."""

    rows: tuple[LedgerRow, ...]
    budget: int
    device_memory: int | None = None
    """Memory of a GPU that has its own; None where there is none, or nothing runs there."""
    advice: str = ""
    """What would fit, when this does not."""

    @property
    def total(self) -> int:
        """Bytes of all rows."""
        return sum(row.bytes for row in self.rows)

    @property
    def device_total(self) -> int:
        """Bytes of the rows that lie on the GPU."""
        return sum(row.bytes for row in self.rows if row.place == DEVICE)

    @property
    def fits(self) -> bool:
        """Whether the total is inside the budget, and what lies on the GPU inside its memory."""
        return self.total <= self.budget and not self._exceeds_device

    @property
    def _exceeds_device(self) -> bool:
        return self.device_memory is not None and self.device_total > self.device_memory

    def check(self) -> None:
        """Refuse what does not fit.

        Raises:
            LedgerError: With the shortfall and what would fit.
        """
        if self._exceeds_device:
            raise LedgerError(
                f"{format_size(self.device_total)} are needed on the GPU, which has {format_size(self.device_memory or 0)}; "
                f"{self.advice}",
                field="memory.budget",
            )
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
    gpu = find_gpu() if any(plan.device == "cuda" for plan in plans.values()) else None
    device_memory = None if gpu is None or gpu.integrated else gpu.memory
    budget = config.memory.budget
    if budget is None:
        available = available_memory()
        if available is None:
            raise LedgerError(
                "the system does not say how much memory it has: set memory.budget", field="memory.budget"
            )
        budget = int((available + (device_memory or 0)) * DEFAULT_SHARE)
    evictable = [model.name for model in config.models if model.residency == EVICTABLE]
    return make_ledger(
        plans,
        budget=budget,
        host=config.host,
        checks=config.checks,
        device_memory=device_memory,
        evictable=evictable,
    )


def make_ledger(
    plans: dict[str, ModelPlan],
    *,
    budget: int,
    host: int,
    checks: int = 0,
    device_memory: int | None = None,
    evictable: Collection[str] = (),
) -> Ledger:
    """The ledger of planned models.

    Args:
        plans: By the models' names.
        budget: Bytes that everything must fit in.
        host: Bytes set aside for the daemon process.
        checks: Bytes of the processes that check constraints.
        device_memory: Memory of a GPU that has its own.
        evictable: Names of the models that share one room.
    """
    rows: list[LedgerRow] = []
    for name, plan in plans.items():
        if name in evictable:
            continue
        prefix = f"{name}: " if len(plans) > 1 else ""
        rows += [replace(row, name=prefix + row.name) for row in model_rows(plan)]
    if any(plan.device == "cuda" for plan in plans.values()):
        rows.append(
            LedgerRow("CUDA", CUDA_CONTEXT, "context, libraries and their workspaces, measured", DEVICE)
        )
        rows.append(LedgerRow("engine process", CUDA_RUNTIME, "Python, torch and CUDA on the host, measured"))
    else:
        rows.append(LedgerRow("engine process", TORCH_RUNTIME, "Python, torch and their libraries, measured"))
    rows.append(LedgerRow("daemon process", host, "memory.host"))
    if checks:
        rows.append(LedgerRow("constraint checks", checks, f"{CHECKS} at a time, by limits.constraint_size"))
    shared = {name: model_bytes(plans[name]) for name in plans if name in evictable}
    if shared:
        room = shared_room(shared.values(), budget - sum(row.bytes for row in rows))
        sizes = ", ".join(f"{name} {format_size(size)}" for name, size in shared.items())
        on_device = any(plans[name].device == "cuda" for name in shared)
        rows.insert(
            next(index for index, row in enumerate(rows) if row.name == "engine process"),
            LedgerRow(EVICTABLE_MODELS, room, f"room that {sizes} share", DEVICE if on_device else HOST),
        )
    ledger = Ledger(tuple(rows), budget, device_memory)
    if ledger.fits:
        return ledger
    left = budget - ledger.total
    if device_memory is not None:
        left = min(left, device_memory - ledger.device_total)
    # Of those that share a room the largest one decides.
    largest = max(shared, key=lambda name: shared[name], default="")
    needed = {name: plan for name, plan in plans.items() if name not in shared or name == largest}
    return replace(ledger, advice=advice(needed, left))


def plan_residency(config: Config, ledger: Ledger) -> Residency:
    """Which models are loaded at start, and what the others have to go for.

    Raises:
        CheckpointError: A model folder's ``config.json`` is refused.
    """
    sizes = {model.name: model_bytes(ModelPlan.of(model, Architecture.of(model))) for model in config.models}
    evictable = [model.name for model in config.models if model.residency == EVICTABLE]
    room = sum(row.bytes for row in ledger.rows if row.name == EVICTABLE_MODELS)
    return Residency(sizes, evictable, room)
