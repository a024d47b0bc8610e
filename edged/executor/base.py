"""The executor's contract: one step of one model on one device.

A step is a ragged batch. Sequence ``s`` owns rows ``sequence_starts[s] : sequence_starts[s + 1]`` of the step's tokens:
one row when it decodes, many when a piece of its prompt is prefilled. Its earlier tokens lie in KV pages of 64 tokens
that its page table names. Nothing here allocates: buffers and pages are made once, in ``load``, from the ledger.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edged.errors import UnsupportedError

PAGE_TOKENS = 64

Int32Array = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
ByteArray = npt.NDArray[np.uint8]
UInt64Array = npt.NDArray[np.uint64]

MAX_TREE = 64
"""Most nodes of a tree: a mask has so many bits."""
OFF_PATH = -2
"""May stand for the token of a node that no accepted path reaches."""


class HostDraw(Protocol):
    """Draws a row's token on the host (:class:`edged.executor.host_sampler.HostSampler`)."""

    def draw(self, logits: FloatArray, row: SamplingRow) -> int:
        """The token id, from logits fp32 ``[V]`` that must not be changed; -1 if all are forbidden."""


@dataclass(frozen=True)
class SamplingRow:
    """How the next token of one row of logits is chosen.

    ``temperature`` 0 takes the largest logit (the smaller id on a tie). Otherwise the logits are divided by the
    temperature, cut to the ``top_k`` largest (0: all) and then to the smallest set whose probability reaches ``top_p``
    (1: all), and one token is drawn with a Philox number keyed by ``(seed, position)``: the draw depends on nothing
    else, so a seeded request gives the same text at any batch size.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    position: int = 0
    """Position of the token to be drawn, counted from the start of the sequence."""
    host: HostDraw | None = None
    """What only :func:`edged.executor.host_sampler.draw` can do: penalties, bias, forbidden tokens, a constraint, min_p,
    typical_p, log probabilities."""

    @property
    def simple(self) -> bool:
        """Whether the fields above say all; an executor draws such a row itself and hands the others to the host's."""
        return self.host is None


@dataclass(frozen=True)
class StepBatch:
    """One ragged step of S sequences and T tokens.

    Attributes:
        token_ids: New tokens of all sequences, int32 [T].
        positions: Their positions, int32 [T].
        sequence_starts: Offsets into the T tokens, int32 [S + 1]; the first is 0 and the last is T.
        lengths: Tokens of each sequence already in its pages, int32 [S].
        page_tables: Page ids of each sequence in order; table s covers ``lengths[s]`` plus its new tokens.
        logit_rows: Rows of the T tokens whose logits are needed, int32 [R], ascending.
        sampling: One entry a needed row, in the same order.
        tree_masks: Ancestors, uint64 [T], where some sequences bring trees of draft tokens: bit j of word t says that
            new token j of the same sequence is an ancestor of token t, or t itself. A tree has at most 64 nodes, the
            first of them its root, parents stand before their children, and every node is a needed row. The node at
            depth d has the position ``lengths[s] + d``, and token i of the sequence is written to slot
            ``lengths[s] + i`` of its pages. A sequence that brings no tree has zeros. None: there is no tree.
        draft_slots: One entry a sequence, or nothing: what :meth:`DraftModel.open` gave for it. It is shown the hidden
            states of the tokens that the step stores.
    """

    token_ids: Int32Array
    positions: Int32Array
    sequence_starts: Int32Array
    lengths: Int32Array
    page_tables: Sequence[Int32Array]
    logit_rows: Int32Array
    sampling: Sequence[SamplingRow] = field(default_factory=tuple)
    tree_masks: UInt64Array | None = None
    draft_slots: Sequence[object | None] = ()


@dataclass(frozen=True)
class ExecutorLimits:
    """What a loaded executor can take; fixed for its life."""

    max_step_tokens: int
    """Most tokens in one step."""
    max_sequences: int
    """Most sequences in one step."""
    context_length: int
    """Most tokens a sequence may hold."""
    pages: int
    """KV pages in the pool."""
    vocabulary: int
    """Number of token ids with a logit."""
    max_tree_tokens: int | None = None
    """Most tokens in one step that brings trees; None: as many as in any."""

    @property
    def tree_tokens(self) -> int:
        """Most tokens in one step that brings trees."""
        return self.max_step_tokens if self.max_tree_tokens is None else self.max_tree_tokens


Progress = Callable[[str, int, int], None]
"""Called with (what is being done, units done, units in all)."""


class DraftTree(Protocol):
    """A tree that a draft model grows (:class:`edged.speculation.expansion.Expander`)."""

    def expand(self, nodes: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Run the draft on nodes of one level."""

    def likeliest(self, node: int, count: int) -> tuple[list[int], list[float]]:
        """The likeliest tokens after a node that was run, and their probabilities."""


@dataclass(frozen=True)
class GrownTree:
    """A tree that was grown on the device: its pool, level after level (:func:`edged.speculation.expansion.proposal_of`).

    Attributes:
        width: k, children of a node that was run. Level 0 has the places 0 to k, level l the k² from k + (l - 1) k² on.
        tokens: Token of each node.
        parents: Place of each node's parent; -1 is the root.
        chances: Probability of each node given its parent.
    """

    width: int
    tokens: list[int]
    parents: list[int]
    chances: list[float]


class DraftModel(Protocol):
    """A draft model beside the target."""

    def open(self) -> Any:  # noqa: ANN401 - the model's own
        """Room for a new sequence; None where all is taken."""

    def close(self, slot: Any) -> None:  # noqa: ANN401
        """The sequence has ended."""

    def start(self, slot: Any, tokens: Sequence[int]) -> DraftTree | GrownTree | None:  # noqa: ANN401
        """Begin a tree below the last of a sequence's tokens, or grow it; None where too little was seen of it."""


class Executor(abc.ABC):
    """Runs steps of one model. Not thread-safe: the engine's loop alone calls it."""

    @abc.abstractmethod
    def load(self, progress: Progress) -> None:
        """Read the weights and allocate everything the ledger planned.

        Raises:
            CheckpointError: The model folder is damaged or does not match its configuration.
            LedgerError: The device refused memory that the ledger had planned.
        """

    @property
    @abc.abstractmethod
    def limits(self) -> ExecutorLimits:
        """The loaded limits."""

    @abc.abstractmethod
    def step(self, batch: StepBatch) -> Int32Array:
        """Run one step: keys and values of the new tokens are stored, one token is drawn for each needed row.

        A tree is verified: from its root on, the child whose token is the one drawn at its parent is accepted, and the
        accepted nodes are moved to the slots behind the sequence's earlier tokens, as if they had been decoded one by
        one. Its rows are drawn parents first, those off the path not at all or without effect.

        Returns:
            The drawn token ids, int32 [R]; -1 where everything is forbidden, which only a row that is not simple can
            say. The entry of a node off the accepted path means nothing.
        """

    @abc.abstractmethod
    def logits(self, batch: StepBatch) -> FloatArray:
        """Run one step and return the raw logits of the needed rows, fp32 [R, V], instead of drawing.

        Nothing is accepted of a tree: its nodes stay where they are.
        """

    def hidden_states(self, batch: StepBatch) -> FloatArray:
        """Run one step and return the final norm's output at the needed rows, fp32 [R, H], instead of drawing.

        Raises:
            UnsupportedError: This executor does not bring it to the host.
        """
        raise UnsupportedError(
            f"{type(self).__name__} gives no hidden states, of {len(batch.logit_rows)} rows or any: set embeddings to "
            "none, or executor to torch",
            field="embeddings",
        )

    @abc.abstractmethod
    def close(self) -> None:
        """Give the device memory back."""

    @property
    def draft_model(self) -> DraftModel | None:
        """The draft model beside the target, where one is configured."""
        return None

    @property
    def page_bytes(self) -> int:
        """Bytes of a page with all that belongs to it, in every layer; 0 where pages cannot be copied."""
        return 0

    def read_pages(self, pages: Int32Array, out: ByteArray) -> None:
        """Copy KV pages to host memory, bit by bit, between two steps.

        Args:
            pages: Page ids, int32 [n].
            out: Where they go, uint8 [n, page_bytes].
        """
        raise UnsupportedError(
            f"{type(self).__name__} does not copy {len(pages)} pages to {out.nbytes} bytes"
        )

    def write_pages(self, pages: Int32Array, data: ByteArray) -> None:
        """Copy KV pages back from host memory, between two steps.

        Args:
            pages: Page ids, int32 [n].
            data: What :meth:`read_pages` gave, uint8 [n, page_bytes].
        """
        raise UnsupportedError(
            f"{type(self).__name__} does not copy {data.nbytes} bytes to {len(pages)} pages"
        )
