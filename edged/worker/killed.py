"""What can be said of an engine that the system killed while it loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.memory.available import available_memory
from edged.units import format_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edged.worker.messages import Loading


def describe_kill(loading: Mapping[str, Loading]) -> str:
    """Where loading was and what memory there is, in words.

    A kernel without memory answers a process that touches what it was promised with SIGKILL, so the process itself
    can report nothing.

    Args:
        loading: Last progress by model.
    """
    model = list(loading.values())[-1]
    available = available_memory()
    left = "" if available is None else f", and {format_size(available)} are available now that it is gone"
    return (
        f"model {model.model}, {model.what} ({model.done} of {model.total}){left}. If it was the kernel for want of memory "
        f"(journalctl -k says so), this machine has less than {_needed(model.what)}: lower "
        "memory.budget, context_length or max_sequences, or stop what else uses memory"
    )


def _needed(what: str) -> str:
    """What of the ledger was being taken while a model's loading was at ``what``."""
    if what in ("tokenizer", "executor"):  # no row of a model has been begun
        row = "engine process"
    elif what.startswith("allocating "):
        row = what.removeprefix("allocating ")
    elif what.endswith("weights"):
        row = "weights"
    else:
        return "the ledger's rows need together"
    return f"the ledger row {row!r} and those before it need"
