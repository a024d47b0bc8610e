"""The static budget: every byte that daemon and engine will hold, computed before anything is loaded.

The sizes of buffers are exact (:mod:`edged.memory.buffers` is what the executor allocates). What Python, torch and
their libraries take themselves was measured and stands here as constants.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edged.engine.gpu import find_gpu
from edged.errors import ConfigError, LedgerError
from edged.memory.available import available_memory
from edged.memory.buffers import (
    ACTIVATIONS,
    COMPRESSED_KEYS,
    ELEMENT_BYTES,
    ENGINE,
    KV_NAMES,
    KV_PAGES,
    LOGITS,
    PAGE_TOKENS,
    SPARSE_QUERIES,
    TENSORRT,
    WEIGHTS,
    BufferSpec,
    ModelPlan,
    draft_buffers,
    step_buffers,
    weight_buffers,
)
from edged.memory.cuda_buffers import graphs
from edged.memory.cuda_ledger import CUDA_CONTEXT, CUDA_RUNTIME, graph_bytes
from edged.memory.draft_plan import DRAFT
from edged.memory.residency import EVICTABLE, Residency, shared_room
from edged.models.architecture import Architecture
from edged.models.cuda_weights import cuda_packed
from edged.models.weights import packed_count, parameter_count
from edged.units import format_size
from plugins_trt.arena import FINE_SLOTS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from edged.config import Config

MIB = 2**20

TORCH_RUNTIME = 272 * MIB
"""Proportional set size of an engine process on the CPU beyond its buffers: the interpreter, numpy and torch 2.13
(220 MiB once imported), what MKL and OpenMP keep for their threads, tokenizer and channel."""

EVICTABLE_MODELS = "evictable models"
"""Row of the ledger for the room that they share."""
SUSPENDED = "suspended sequences"
"""Row of the ledger for pages in host memory."""

SAMPLING_ROWS = 8
SAMPLING_BYTES = 64
"""Scratch of the sampling operator: bytes an entry of the vocabulary for each row that is drawn together."""

DEFAULT_SHARE = 0.8
"""Part of the available memory that is the budget when the configuration names none."""

SMALLEST_CONTEXT = PAGE_TOKENS

HOST, DEVICE = "host", "device"


@dataclass(frozen=True)
class LedgerRow:
    """One use of memory: what it is, its bytes, and how they come about."""

    name: str
    bytes: int
    note: str = ""
    place: str = HOST
    """:data:`HOST` or :data:`DEVICE`; a Jetson has one memory for both."""


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
        plans, budget=budget, host=config.host, device_memory=device_memory, evictable=evictable
    )


def make_ledger(
    plans: dict[str, ModelPlan],
    *,
    budget: int,
    host: int,
    device_memory: int | None = None,
    evictable: Collection[str] = (),
) -> Ledger:
    """The ledger of planned models.

    Args:
        plans: By the models' names.
        budget: Bytes that everything must fit in.
        host: Bytes set aside for the daemon process.
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
    shared = {name: model_bytes(plans[name]) for name in plans if name in evictable}
    if shared:
        room = shared_room(shared.values(), budget - sum(row.bytes for row in rows))
        sizes = ", ".join(f"{name} {format_size(size)}" for name, size in shared.items())
        on_device = any(plans[name].device == "cuda" for name in shared)
        rows.insert(
            len(rows) - 2,
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
    return replace(ledger, advice=_advice(needed, left))


def plan_residency(config: Config, ledger: Ledger) -> Residency:
    """Which models are loaded at start, and what the others have to go for.

    Raises:
        CheckpointError: A model folder's ``config.json`` is refused.
    """
    sizes = {model.name: model_bytes(ModelPlan.of(model, Architecture.of(model))) for model in config.models}
    evictable = [model.name for model in config.models if model.residency == EVICTABLE]
    room = sum(row.bytes for row in ledger.rows if row.name == EVICTABLE_MODELS)
    return Residency(sizes, evictable, room)


def model_rows(plan: ModelPlan) -> tuple[LedgerRow, ...]:
    """What one model holds: weights, KV pages, compressed keys, activations and scratch, logits, captured graphs."""
    buffers = (*weight_buffers(plan), *step_buffers(plan))
    a = plan.architecture
    page = _bytes_of(buffers, KV_PAGES) // plan.pages
    kind = "" if plan.quantized_kv is None else f" in {KV_NAMES[plan.quantized_kv]} with their scales"
    rows = [
        LedgerRow(WEIGHTS, _bytes_of(buffers, WEIGHTS), _weights_note(plan)),
        LedgerRow(
            KV_PAGES,
            _bytes_of(buffers, KV_PAGES),
            f"{plan.pages} pages of {PAGE_TOKENS} tokens, {format_size(page)} each{kind}: "
            f"{plan.max_sequences} x {plan.context_length} tokens",
        ),
        LedgerRow(
            ACTIVATIONS,
            _bytes_of(buffers, ACTIVATIONS) + attention_scratch(plan),
            f"{plan.step_tokens} tokens a step"
            + (
                ": prefill_chunk and one for each sequence"
                if plan.max_step_tokens is None
                else " (max_step_tokens)"
            ),
        ),
        LedgerRow(
            LOGITS,
            _bytes_of(buffers, LOGITS) + sampling_scratch(plan),
            f"{plan.max_sequences if plan.device == 'cuda' else plan.logit_rows} x {a.vocabulary} logits",
        ),
    ]
    compressed = _bytes_of(buffers, COMPRESSED_KEYS)
    if plan.selection is not None:
        rows.insert(
            2, LedgerRow(COMPRESSED_KEYS, compressed, "means of 32 and of 128 keys, for block selection")
        )
    if plan.draft is not None:
        held = _bytes_of(draft_buffers(plan), DRAFT) + plan.draft.scratch(plan.max_sequences)
        rows.append(
            LedgerRow(
                DRAFT,
                held,
                f"{plan.draft.eagle.folder.name}, {plan.draft.window} tokens of {plan.max_sequences}",
            )
        )
    suspended = _suspended_rows(plan)
    if plan.device != "cuda":
        return (*rows, *suspended)
    if plan.executor == TENSORRT:
        rows.insert(-1, LedgerRow(ENGINE, _bytes_of(buffers, ENGINE), _engine_note(plan)))
    rows.append(LedgerRow("CUDA graphs", graph_bytes(plan), f"{graphs(plan)} captured steps"))
    if plan.selection is None:
        rows[2] = replace(rows[2], bytes=rows[2].bytes + compressed)
    return (*(replace(row, place=DEVICE) for row in rows), *suspended)


def _engine_note(plan: ModelPlan) -> str:
    """Where the figure comes from."""
    if plan.engine_bytes is None:
        return "activations and scratch of its layers, estimated until it is built (edgectl build)"
    return "activations and scratch of its layers, as its build said"


def page_bytes(plan: ModelPlan) -> int:
    """Bytes of one page with its compressed keys, in every layer."""
    buffers = step_buffers(plan)
    return (_bytes_of(buffers, KV_PAGES) + _bytes_of(buffers, COMPRESSED_KEYS)) // plan.pages


def _suspended_rows(plan: ModelPlan) -> tuple[LedgerRow, ...]:
    """Host memory for suspended sequences, where there is any."""
    if not plan.host_kv:
        return ()
    page = page_bytes(plan)
    slots = plan.host_kv // page
    if not slots:
        raise ConfigError(
            f"host_kv is {format_size(plan.host_kv)} and a page takes {format_size(page)}: nothing could be suspended",
            field="host_kv",
        )
    return (
        LedgerRow(SUSPENDED, slots * page, f"{slots} pages of {format_size(page)} in host memory (host_kv)"),
    )


def _weights_note(plan: ModelPlan) -> str:
    """How many parameters there are, and in what."""
    count, packed = parameter_count(plan.architecture), packed_count(plan.architecture)
    if plan.device == "cuda":  # where a packed head is widened
        packed = sum(each.outputs * each.inputs for each in cuda_packed(plan.architecture))
    if not packed:
        return f"{count:,} parameters in {plan.dtype}"
    quantization = plan.architecture.quantization
    bits = 2 if quantization is not None and quantization.ternary else 4
    return f"{packed:,} parameters in {bits} bits with their scales, {count - packed:,} in {plan.dtype}"


def attention_scratch(plan: ModelPlan) -> int:
    """What attention on the CPU allocates itself.

    Two partial results and their merged one in fp32; with a selection rule also the scores and the gathered blocks of
    the queries that are looked at together.
    """
    if plan.device == "cuda":
        return 0
    a, size = plan.architecture, ELEMENT_BYTES[plan.compute_dtype]
    partial = 3 * plan.step_tokens * a.q_width * size
    if plan.quantized_kv:
        # What rounding the new keys and values makes of them, one after the other.
        partial += 6 * plan.step_tokens * 2 * a.kv_width * 4
    if plan.selection is None:
        return partial
    # Products, what is exponentiated and masked, and the compressed keys themselves in fp32.
    keys = plan.pages_per_sequence * FINE_SLOTS
    scores = 4 * SPARSE_QUERIES * a.heads * keys * 4 + 3 * a.kv_width * keys * 4
    blocks = min(plan.selection.total, plan.pages_per_sequence)
    gathered = SPARSE_QUERIES * blocks * PAGE_TOKENS * (3 * a.head_dim + 3 * a.group) * size
    return partial + scores + gathered


def sampling_scratch(plan: ModelPlan) -> int:
    """What drawing tokens allocates for a moment."""
    if plan.device == "cuda":
        return 0
    return min(plan.logit_rows, SAMPLING_ROWS) * plan.architecture.vocabulary * SAMPLING_BYTES


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


def _bytes_of(buffers: Iterable[BufferSpec], row: str) -> int:
    return sum(buffer.nbytes for buffer in buffers if buffer.row == row)
