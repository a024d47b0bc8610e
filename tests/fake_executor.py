"""A deterministic executor without a model, for tests of everything above the executors.

It keeps the tokens themselves where a model would keep keys and values, in pages that the page tables name. The next
token is a function of the whole history *as read back from the pages*, so a wrong page, position or length changes
every token after it. A page that was never written or belongs to somebody else shows at once.
"""

from __future__ import annotations

import time

import numpy as np

from edged.executor.base import PAGE_TOKENS, Executor, ExecutorLimits, FloatArray, Int32Array, StepBatch
from edged.executor.batch_check import check_batch


def next_token(history, vocabulary, *, seed=0, temperature=0.0):
    """The token that follows ``history``; a sampled one depends on the seed too."""
    state = 17 if temperature == 0 else 17 + 1000003 * (seed % 2**31)
    # state = state * 31 + token + 7 for each token, modulo a prime
    tokens = np.asarray(history, np.int64)
    powers = _powers(len(tokens))  # 31^(n-1) ... 31^0
    state = (state % _PRIME) * (int(powers[0]) * 31 % _PRIME if len(tokens) else 1)
    return int((state + int(((tokens + 7) % _PRIME * powers % _PRIME).sum())) % _PRIME % vocabulary)


_PRIME = 1_000_003
_known_powers = np.ones(1, np.int64)


def _powers(count):
    global _known_powers  # noqa: PLW0603 - grows with the longest history
    while len(_known_powers) < count:
        last = int(_known_powers[0])
        more = [last := last * 31 % _PRIME for _ in range(len(_known_powers))]
        _known_powers = np.concatenate((np.array(more[::-1], np.int64), _known_powers))
    return _known_powers[len(_known_powers) - count :]


def generate(prompt, count, vocabulary, **sampling):
    """What a request gets when it is alone."""
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history, vocabulary, **sampling))
    return history[len(prompt) :]


def nodes_of(batch, row):
    """The nodes from the root to a row's, which is one of a tree."""
    mask = int(batch.tree_masks[row])
    return [node for node in range(64) if mask >> node & 1]


class FakeExecutor(Executor):
    """See the module.

    Args:
        limits: What it claims to take; every batch is held to them.
        step_seconds: Time a step takes.
        fail_at: Number of the step that raises.
        hang_at: Number of the step that never returns.
        long_at: Number of the step that takes `long_seconds` of a processor, and is the only one.
        slow_load: Seconds of each piece of loading.
        slow_pieces: How many pieces take that long.
    """

    def __init__(
        self,
        limits,
        *,
        step_seconds=0.0,
        fail_at=None,
        load_error=None,
        hang_at=None,
        slow_load=0.0,
        slow_pieces=3,
        long_at=None,
        long_seconds=0.0,
    ):
        self._limits = limits
        self.step_seconds = step_seconds
        self.fail_at = fail_at
        self.load_error = load_error
        self.hang_at = hang_at
        self.slow_load = slow_load
        self.slow_pieces = slow_pieces
        self.long_at = long_at
        self.long_seconds = long_seconds
        self.memory = np.full((limits.pages, PAGE_TOKENS), -1, np.int64)
        self.batches = []
        self.trees = 0

    def load(self, progress):
        for done in range(3):
            progress("weights", done, 2)
            if done < self.slow_pieces:
                time.sleep(self.slow_load)
        if self.load_error is not None:
            raise self.load_error

    @property
    def limits(self) -> ExecutorLimits:
        return self._limits

    def step(self, batch: StepBatch) -> Int32Array:
        if self.step_seconds:
            time.sleep(self.step_seconds)
        self.batches.append((len(batch.lengths), len(batch.token_ids)))
        if self.hang_at is not None and len(self.batches) >= self.hang_at:
            time.sleep(1e6)
        if len(self.batches) == self.long_at:
            end = time.monotonic() + self.long_seconds
            while time.monotonic() < end:
                pass
        if self.fail_at is not None and len(self.batches) >= self.fail_at:
            raise RuntimeError("the device fell off the bus")
        drawn = np.zeros(len(batch.logit_rows), np.int32)
        for row, history in self._run(batch):
            sampling = batch.sampling[row]
            if sampling.temperature:
                assert sampling.position == len(history)
            drawn[row] = next_token(
                history, self._limits.vocabulary, seed=sampling.seed, temperature=sampling.temperature
            )
        if batch.tree_masks is not None:
            self._keep(batch, drawn)
        return drawn

    def logits(self, batch: StepBatch) -> FloatArray:
        rows = np.zeros((len(batch.logit_rows), self._limits.vocabulary), np.float32)
        for row, history in self._run(batch):
            rows[row, next_token(history, self._limits.vocabulary)] = 1.0
        return rows

    @property
    def page_bytes(self):
        return PAGE_TOKENS * self.memory.itemsize

    def read_pages(self, pages, out):
        out[:] = self.memory[pages].view(np.uint8)

    def write_pages(self, pages, data):
        self.memory[pages] = data.view(np.int64)

    def close(self):
        self.memory = None

    def _run(self, batch):
        """Check and store one step; yield the history behind each needed row."""
        limits = self._limits
        starts, lengths = batch.sequence_starts.tolist(), batch.lengths.tolist()
        assert all(
            array.dtype == np.int32
            for array in (
                batch.token_ids,
                batch.positions,
                batch.sequence_starts,
                batch.lengths,
                batch.logit_rows,
            )
        )
        assert len(batch.positions) == len(batch.token_ids) == starts[-1] <= limits.max_step_tokens
        assert 0 < len(lengths) == len(starts) - 1 == len(batch.page_tables) <= limits.max_sequences
        assert len(batch.sampling) == len(batch.logit_rows)
        assert batch.logit_rows.tolist() == sorted(set(batch.logit_rows.tolist()))
        # Pages may be shared, but nobody writes where another one reads or writes.
        written = [
            table[length // PAGE_TOKENS :].tolist()
            for table, length in zip(batch.page_tables, lengths, strict=True)
        ]
        for index, pages in enumerate(written):
            assert len(set(batch.page_tables[index].tolist())) == len(batch.page_tables[index])
            others = [t.tolist() for other, t in enumerate(batch.page_tables) if other != index]
            assert not set(pages) & {page for table in others for page in table}, "a shared page is written"
        if batch.tree_masks is not None:
            self.trees += 1
            check_batch(batch, limits)
        needed = {row: index for index, row in enumerate(batch.logit_rows.tolist())}
        histories = []
        for index, length in enumerate(lengths):
            first, end = starts[index], starts[index + 1]
            table = batch.page_tables[index]
            total = length + end - first
            assert end > first
            assert self.trees or total <= limits.context_length
            pages = -(-total // PAGE_TOKENS)
            assert len(table) == pages or (self.trees and len(table) > pages), "the table covers no more"
            tree = batch.tree_masks is not None and batch.tree_masks[first] != 0
            assert tree or batch.positions[first:end].tolist() == list(range(length, total))
            slots = np.arange(length, total)
            self.memory[table[slots // PAGE_TOKENS], slots % PAGE_TOKENS] = batch.token_ids[first:end]
            for row in range(first, end):
                if tree:
                    slots = np.array([*range(length), *(length + node for node in nodes_of(batch, row))])
                    histories.append(
                        (needed[row], self.memory[table[slots // PAGE_TOKENS], slots % PAGE_TOKENS])
                    )
                    continue
                if row in needed:
                    assert row == end - 1
                    slots = np.arange(total)
                    histories.append(
                        (needed[row], self.memory[table[slots // PAGE_TOKENS], slots % PAGE_TOKENS])
                    )
        return histories

    def _keep(self, batch, drawn):
        """Move the accepted nodes; what lies behind them is lost."""
        starts, lengths = batch.sequence_starts.tolist(), batch.lengths.tolist()
        row_of = {token: row for row, token in enumerate(batch.logit_rows.tolist())}
        for index, length in enumerate(lengths):
            first, end = starts[index], starts[index + 1]
            if not batch.tree_masks[first]:
                continue
            path = [0]
            for node in range(1, end - first):
                parents = nodes_of(batch, first + node)[:-1]
                if parents == path and batch.token_ids[first + node] == drawn[row_of[first + path[-1]]]:
                    path.append(node)
            slots = length + np.array(path)
            table = batch.page_tables[index]
            tokens = self.memory[table[slots // PAGE_TOKENS], slots % PAGE_TOKENS]
            slots = np.arange(length, length + end - first)
            self.memory[table[slots // PAGE_TOKENS], slots % PAGE_TOKENS] = -1
            slots = np.arange(length, length + len(path))
            self.memory[table[slots // PAGE_TOKENS], slots % PAGE_TOKENS] = tokens
