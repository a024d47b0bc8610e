"""Steps of trees of draft tokens on a GPU: each bucket a captured graph that verifies the trees and keeps their paths.

One graph runs the model on the nodes, draws a token after each, follows the drawn tokens down the trees, and moves the
keys and values of the accepted nodes to the slots behind their sequence; nothing waits for the host. Only where the host
draws tokens itself (penalties, grammars) it chooses the path, and another graph keeps that.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from edged.errors import InternalError, LedgerError
from edged.executor.base import OFF_PATH
from edged.executor.cuda_operators import CudaOperators
from edged.executor.torch_tree import parent_rows
from edged.memory.cuda_buffers import (
    attention_workspace,
    has_dense_graph,
    has_sparse_graph,
    tree_sizes,
)
from plugins_trt.argmax.contract import Argmax
from plugins_trt.commit.contract import Commit
from plugins_trt.contract import MAX_TREE, DeviceArray
from plugins_trt.verify_tree.contract import VerifyTree

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from edged.executor.base import Int32Array, Progress, SamplingRow, StepBatch
    from edged.executor.cuda_device import Device, StepKernels, Words
    from edged.memory.buffers import ModelPlan
    from edged.models.decoder import Decoder

_of = DeviceArray.of


def draw_along_paths(batch: StepBatch, drawn: Int32Array, draw: Callable[[int, SamplingRow], int]) -> None:
    """Draw the rows of a step of trees that are the host's, parents first, those of nodes that no path reaches not at all.

    Args:
        batch: The step.
        drawn: What the device has drawn, int32 [R]; the host's rows are filled in.
        draw: Draws from the logits of a token's row.
    """
    parents, on_path = parent_rows(batch), [True] * len(drawn)
    for index, row in enumerate(batch.sampling):
        token = int(batch.logit_rows[index])
        if index in parents:
            parent = parents[index]
            on_path[index] = on_path[parent] and bool(drawn[parent] == batch.token_ids[token])
        if not row.simple:
            drawn[index] = draw(token, row) if on_path[index] else OFF_PATH


@dataclass(frozen=True)
class TreeBucket:
    """A captured step of trees."""

    tokens: int
    replay: Callable[[], None]
    replay_dense: Callable[[], None]
    """The same for steps none of whose nodes attends sparsely."""
    replay_sparse: Callable[[], None]
    """The same for steps all of whose nodes do."""


class TreeSteps:
    """The captured steps of one model's trees.

    Args:
        plan: The model's plan.
        buffers: Every buffer of the plan, by name.
        device: Captures and copies.
        kernels: Its operators.
        decoder: The forward.
        drawn: Host memory for the drawn tokens, a word a row.
    """

    def __init__(
        self,
        plan: ModelPlan,
        buffers: Mapping[str, torch.Tensor],
        device: Device,
        kernels: StepKernels,
        *,
        decoder: Decoder[torch.Tensor],
        drawn: Words,
    ) -> None:
        self._plan, self._buffers, self._device = plan, buffers, device
        self._kernels, self._decoder, self._drawn = kernels, decoder, drawn
        if tree_sizes(plan):
            split = plan.max_sequences * MAX_TREE
            self._paths = buffers["paths"][:split].view(plan.max_sequences, MAX_TREE)
            self._accepted = buffers["paths"][split:]
            self._chosen = device.host_words(split + plan.max_sequences)
        self.buckets: tuple[TreeBucket, ...] = ()
        """By rising size."""

    def capture(self, progress: Progress) -> None:
        """Capture every bucket, the largest first; the step that was staged last has no sequence.

        Raises:
            LedgerError: This device needs more scratch memory than was planned.
        """
        plan, capture = self._plan, self._device.capture
        sizes = tree_sizes(plan)
        buckets: list[TreeBucket] = []
        for index, tokens in enumerate(reversed(sizes)):
            progress("capturing graphs of trees", index, len(sizes))
            needed = attention_workspace(plan, tokens, self._device.multiprocessors, trees=True)
            if needed > len(self._buffers["attention_workspace"]):
                raise LedgerError(
                    f"a tree of {tokens} nodes needs more scratch memory on this device than was planned"
                )
            operators = self.operators(tokens)
            if not buckets:
                self._keep = capture(partial(self._commit, operators))
            replay = replay_dense = replay_sparse = capture(partial(self.run, operators))
            if has_dense_graph(plan, tokens):
                replay_dense = capture(partial(self.run, self.operators(tokens, dense=True)))
            if has_sparse_graph(plan):
                replay_sparse = capture(partial(self.run, self.operators(tokens, sparse=True)))
            buckets.append(TreeBucket(tokens, replay, replay_dense, replay_sparse))
        progress("capturing graphs of trees", len(sizes), len(sizes))
        self.buckets = tuple(reversed(buckets))

    def operators(self, tokens: int, *, dense: bool = False, sparse: bool = False) -> CudaOperators:
        """The forward's operators for a bucket."""
        return CudaOperators(
            self._plan, self._buffers, self._kernels, tokens, dense=dense, sparse=sparse, trees=True
        )

    def bucket_of(self, tokens: int) -> TreeBucket:
        """The smallest bucket that takes so many.

        Raises:
            InternalError: None does.
        """
        for bucket in self.buckets:
            if bucket.tokens >= tokens:
                return bucket
        raise InternalError(f"a step of {tokens} tokens with trees, and tree_size is {self._plan.tree_size}")

    def keep(self, paths: Mapping[int, Sequence[int]], sequences: int) -> None:
        """Enqueue that paths are kept which the host has chosen.

        Args:
            paths: Accepted nodes, root first, by the sequence; the other sequences are left alone.
            sequences: Those of the step.
        """
        chosen = self._chosen[: -self._plan.max_sequences].reshape(-1, MAX_TREE)
        accepted = self._chosen[-self._plan.max_sequences :]
        accepted[:] = 0
        for index in range(sequences):
            path = paths.get(index, ())
            chosen[index, : len(path)] = path
            accepted[index] = len(path)
        self._device.upload(self._buffers["paths"], self._chosen)
        self._keep()

    def run(self, operators: CudaOperators) -> None:
        """One step: the forward, a token after each node, the paths that they follow, and the tokens' way to the host."""
        operators.restart()
        logits = self._decoder.forward(operators)
        data, rows = operators.data, operators.rows
        drawn = self._buffers["drawn"][:rows]
        self._kernels.argmax(Argmax(_of(logits), _of(drawn)))
        self._kernels.sample(operators.sampling(drawn))
        self._kernels.verify(
            VerifyTree(
                batch=operators.batch,
                token_ids=_of(data.token_ids),
                targets=_of(drawn),
                paths=_of(self._paths),
                accepted=_of(self._accepted),
                given=_of(data.given),
            )
        )
        self._commit(operators)
        self._device.download(self._drawn[:rows], drawn)

    def _commit(self, operators: CudaOperators) -> None:
        self._kernels.commit(
            Commit(
                batch=operators.batch,
                arena=operators.arena,
                paths=_of(self._paths),
                accepted=_of(self._accepted),
            )
        )
