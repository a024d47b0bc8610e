"""An EAGLE draft on a GPU: the layer of :mod:`edged.executor.torch_eagle`, a whole tree in one captured graph.

A run takes the rows of tokens that the target has stored since the last one, up to 64 of them, and grows a tree below the
last: each level's likeliest tokens, the nodes that go on and their rows are found on the device, and the pool comes back by
one copy. More rows than that (behind a prompt) are taken by runs that grow nothing.

Where one sequence alone drafts step after step, the run of the next tree is enqueued right behind the step, on the tokens that
this draws and accepts (:meth:`CudaEagle.go_on`): the host looks at them while the device drafts already. If it then goes on
with other tokens, that run counts for nothing.

Rows and blocks are counted from the first token since tokens were last missed; the rotary embedding knows differences
alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from edged.checkpoint.safetensors_files import WeightFiles
from edged.executor.base import GrownTree
from edged.executor.cuda_eagle_graph import DraftGraph
from edged.executor.cuda_packed import PackedLoader, tensors_of
from edged.executor.torch_weights import read_whole
from edged.memory.cuda_draft import TAKEN, DraftLayout, DraftSizes, draft_packed
from edged.memory.specs import PAGE_TOKENS
from edged.models.checkpoint import PackedLinear
from edged.models.draft_weights import packed_shape
from plugins_trt.contract import MAX_DECODE, MAX_TREE
from plugins_trt.draft_tree.contract import pool_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from edged.executor.base import Int32Array, StepBatch
    from edged.executor.cuda_device import Device, StepKernels
    from edged.memory.buffers import ModelPlan
    from edged.memory.draft_plan import DraftPlan
    from edged.models.operators import Linear

_CHAIN = np.array([(2 << row) - 1 for row in range(MAX_DECODE)], np.uint64)


@dataclass
class DraftSlot:
    """What is held of one sequence.

    Hidden states of ``waiting`` positions from ``first`` on wait for the tokens after them: those before ``fresh`` in the
    ring, the others in the rows of the last step.
    """

    index: int
    base: int = 0  # position of the first row since tokens were last missed
    end: int = 0  # position behind the last row of keys and values
    first: int = 0
    waiting: int = 0
    rows: list[int] = field(default_factory=list)  # of the last step, of the last positions that wait
    ahead: bool = False  # whether a run has been enqueued behind the last step
    accepted: list[int] = field(default_factory=list)  # tokens that it went on from


class CudaEagle:
    """Runs one draft.

    Args:
        plan: The model's plan, which has a draft.
        buffers: Every buffer of the plan, by name; the draft's begin with ``draft.``.
        device: Captures and copies.
        kernels: The target's operators.
        head: The target's LM head, loaded.

    Raises:
        CheckpointError: A file of the draft is damaged.
        UnsupportedError: No compiled kernels suit the device.
    """

    def __init__(
        self,
        plan: ModelPlan,
        buffers: Mapping[str, torch.Tensor],
        device: Device,
        *,
        kernels: StepKernels,
        head: Linear[torch.Tensor],
    ) -> None:
        self._sizes = sizes = DraftSizes.of(plan)
        self._plan, self._device, self._buffers = plan, device, buffers
        self._graph = DraftGraph(plan, buffers, kernels, device.draft_kernels(plan), head)
        hidden = plan.architecture.hidden
        self._hidden = buffers["normed"].view(-1, hidden)
        self._ring = len(self._hidden) - plan.max_sequences * sizes.ring
        self._free = list(range(plan.max_sequences))[::-1]
        at = DraftLayout.of(sizes)
        self._words = words = device.host_words(at.words)
        self._token_ids = words[at.token_ids : at.token_ids + MAX_DECODE]
        self._hidden_rows = words[at.hidden_rows : at.hidden_rows + MAX_DECODE]
        self._positions = words[at.positions : at.positions + MAX_DECODE]
        words[at.masks : at.masks + 2 * MAX_DECODE].view(np.uint64)[:] = _CHAIN
        self._starts = words[at.starts : at.starts + 2]
        self._lengths = words[at.lengths : at.lengths + 1]
        self._tree_lengths = words[at.tree_lengths : at.tree_lengths + 1]
        self._root_row = words[at.root_row : at.root_row + 1]
        self._table = words[at.table : at.table + sizes.table]
        self._turns = np.arange(sizes.table, dtype=np.int32) % sizes.pages
        pool = pool_size(sizes.width, sizes.levels)
        self._pool = device.host_words(3 * pool)
        self._grow: dict[int, Callable[[], None]] = {}
        self._take: Callable[[], None] | None = None
        self._fresh: list[DraftSlot] = []  # that may have rows of the last step
        self._ahead: dict[bool, Callable[[], None]] = {}  # behind a step with trees, and behind one token
        self._ahead_rows = min(MAX_DECODE, next(rows for rows in TAKEN if rows > min(sizes.levels, 63)))
        draft = plan.draft
        assert draft is not None, "asked of a plan with a draft"  # noqa: S101
        with device.scope():
            self._read(draft, head.weight)
            device.synchronize()

    def _read(self, draft: DraftPlan, head: torch.Tensor) -> None:
        """Fill the weights from the draft's files."""
        eagle, buffers = draft.eagle, self._buffers
        store = PackedLoader(tensors_of(draft_packed(draft), buffers), buffers, self._device)
        with WeightFiles.open(eagle.folder) as files:
            for spec in eagle.specs:
                for index, source in enumerate(spec.sources):
                    if spec.packing is None:
                        end = source.start + source.shape[0]
                        buffers[f"draft.{spec.name}"][source.start : end].copy_(read_whole(files, source))
                    else:
                        shape = packed_shape(source, spec.packing)
                        linear = PackedLinear(f"draft.{spec.name}", source.module, shape, source.start, index)
                        store(linear, eagle.read_packed(files, source, spec.packing))
        if draft.token_map is not None:
            ids = torch.from_numpy(draft.token_map)
            buffers["draft.map"].copy_(ids)
            torch.index_select(head, 0, ids.long().to(head.device), out=buffers["draft.head"])
        self._graph.fill()

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture every run."""
        self._token_ids[:] = -1  # no row: only padding runs
        self._device.upload(self._buffers["draft.step"], self._words)
        capture = self._device.capture
        self._take = capture(partial(self._graph.take, MAX_DECODE))
        for rows in reversed(TAKEN):
            self._grow[rows] = capture(partial(self._take_and_grow, rows))

        buffers = self._buffers
        one, path = buffers["draft.one_token"], buffers["paths"]
        counts = path[self._plan.max_sequences * MAX_TREE :]
        self._ahead[False] = capture(partial(self._go_on, one[:MAX_TREE], one[MAX_TREE:]))
        self._ahead[True] = capture(partial(self._go_on, path[:MAX_TREE], counts[:1]))

    def _go_on(self, path: torch.Tensor, accepted: torch.Tensor) -> None:
        self._graph.take_accepted(path, accepted)
        self._take_and_grow(self._ahead_rows)

    def _take_and_grow(self, rows: int) -> None:
        self._graph.take(rows)
        self._graph.grow()
        self._device.download(self._pool, self._buffers["draft.pool"])

    def open(self) -> DraftSlot | None:
        """Room for a new sequence; None where all is taken."""
        return DraftSlot(self._free.pop()) if self._free else None

    def close(self, slot: DraftSlot) -> None:
        """The sequence has ended."""
        slot.waiting, slot.rows, slot.ahead = 0, [], False
        self._free.append(slot.index)

    def observe(self, slot: DraftSlot, rows: Sequence[int], first: int) -> None:
        """The target has stored more of a sequence.

        Args:
            slot: The sequence's; what it had of an earlier step was put away (:meth:`put_away`).
            rows: Rows of the step that has run, one a token.
            first: Position of the first of them.
        """
        assert not slot.rows, "rows of the step before were put away"  # noqa: S101
        if slot.first + slot.waiting != first:
            slot.waiting = 0
        if not slot.waiting:
            slot.first = first
        slot.rows = list(rows[-self._sizes.ring :])
        slot.waiting += len(rows)
        excess = slot.waiting - self._sizes.ring
        if excess > 0:  # no row will look back further
            slot.first += excess
            slot.waiting -= excess

    def go_on(self, batch: StepBatch) -> None:
        """Enqueue the run of the next tree behind a step that has been enqueued, where that is likely to be wanted.

        It is where the last step was drafted for, too, and the device draws every token itself.
        """
        slot = batch.draft_slots[0] if len(batch.draft_slots) == 1 else None
        if not isinstance(slot, DraftSlot) or not all(row.simple for row in batch.sampling):
            return
        length, count = int(batch.lengths[0]), len(batch.token_ids)
        tree = count > 1
        depth = int(batch.positions.max()) - length + 1
        if tree and (batch.tree_masks is None or not batch.tree_masks[0]):
            return  # a piece of a prompt
        if slot.waiting or slot.end != length or depth > self._ahead_rows or not len(batch.sampling):
            return
        if not self._has_room(slot, length + depth):
            return
        np.add(self._turns, slot.index * self._sizes.pages, out=self._table)
        self._lengths[0] = length - slot.base
        self._device.upload(self._buffers["draft.step"], self._words)
        self._ahead[tree]()
        slot.ahead = True

    def _has_room(self, slot: DraftSlot, end: int) -> bool:
        """Whether a tree fits behind position ``end``."""
        rows = end - slot.base + self._sizes.nodes + MAX_DECODE
        return rows <= self._sizes.table * PAGE_TOKENS

    def observe_step(self, batch: StepBatch, paths: Mapping[int, Sequence[int]], drawn: Int32Array) -> None:
        """The target has run a step: of each sequence with a slot, show what it stored.

        Args:
            batch: The step.
            paths: Accepted nodes of each tree, by the sequence.
            drawn: Token of each needed row, int32 [R].
        """
        starts, lengths = batch.sequence_starts.tolist(), batch.lengths.tolist()
        for index, slot in enumerate(batch.draft_slots):
            if isinstance(slot, DraftSlot):
                path = paths.get(index)
                nodes = range(starts[index + 1] - starts[index]) if path is None else path
                self.observe(slot, [starts[index] + node for node in nodes], lengths[index])
                self._fresh.append(slot)
                if slot.ahead:  # of one sequence, whose every row is needed
                    slot.accepted = drawn[[starts[index] + node for node in nodes]].tolist()

    def put_all_away(self) -> None:
        """Before the next step, which overwrites the rows of the last one."""
        fresh, self._fresh = self._fresh, []
        with self._device.scope():
            for slot in fresh:
                self.put_away(slot)

    def put_away(self, slot: DraftSlot) -> None:
        """Before the next step: what waits in the rows of the last one goes to the ring."""
        slot.ahead = False
        rows, slot.rows = slot.rows, []
        position = slot.first + slot.waiting - len(rows)
        while rows:  # runs of rows that follow one another, up to the ring's end
            count, room = 1, self._sizes.ring - position % self._sizes.ring
            while count < min(len(rows), room) and rows[count] == rows[0] + count:
                count += 1
            place = self._ring_row(slot, position)
            self._hidden[place : place + count].copy_(self._hidden[rows[0] : rows[0] + count])
            rows, position = rows[count:], position + count

    def start(self, slot: DraftSlot, tokens: Sequence[int]) -> GrownTree | None:
        """Take what waits into the window and grow a tree.

        Args:
            slot: The sequence's.
            tokens: All tokens of the sequence; the last one is the root.

        Returns:
            The tree; None where no hidden state tells of the root, or the sequence is at its end.
        """
        count = slot.waiting
        if not count or slot.first + count != len(tokens) - 1:
            return None
        if slot.ahead and slot.accepted == list(tokens[slot.first + 1 :]):
            self._device.synchronize()
            self._taken(slot, slot.first + count)
            return self._grown()
        if slot.first != slot.end:
            slot.base = slot.first  # tokens between were never seen
        if not self._has_room(slot, slot.first + count):
            return None
        np.add(self._turns, slot.index * self._sizes.pages, out=self._table)
        first, fresh = slot.first, slot.first + count - len(slot.rows)
        while count:
            some = min(count, MAX_DECODE)
            positions = range(first, first + some)
            self._token_ids[:some] = tokens[first + 1 : first + some + 1]
            self._token_ids[some:] = -1
            self._hidden_rows[:some] = [
                slot.rows[at - fresh] if at >= fresh else self._ring_row(slot, at) for at in positions
            ]
            self._positions[:some] = np.arange(some, dtype=np.int32) + (first - slot.base)
            self._starts[1] = some
            self._lengths[0] = first - slot.base
            self._tree_lengths[0] = first - slot.base + some
            self._root_row[0] = some - 1
            self._device.upload(self._buffers["draft.step"], self._words)
            count, first = count - some, first + some
            if count:
                assert self._take is not None, "captured at load"  # noqa: S101
                self._take()
            else:
                self.captured(some)()
            self._device.synchronize()
        self._taken(slot, first)
        return self._grown()

    @staticmethod
    def _taken(slot: DraftSlot, end: int) -> None:
        """Everything before position ``end`` is in the window."""
        slot.end = slot.first = end
        slot.waiting, slot.rows, slot.ahead = 0, [], False

    def captured(self, rows: int) -> Callable[[], None]:
        """The captured run that takes so many rows and grows a tree."""
        return self._grow[next(most for most in TAKEN if most >= rows)]

    def _grown(self) -> GrownTree:
        tokens, parents, chances = np.split(self._pool, 3)
        sizes = self._sizes
        return GrownTree(
            sizes.width, tokens.tolist(), parents.tolist(), chances.view(np.float32).astype(float).tolist()
        )

    def _ring_row(self, slot: DraftSlot, position: int) -> int:
        return self._ring + slot.index * self._sizes.ring + position % self._sizes.ring
