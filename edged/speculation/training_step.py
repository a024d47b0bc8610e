"""One step of a draft's training: on a GPU a recorded one, since its launches take longer than its work."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_WARM_UP = 3
"""Steps before one is recorded: libraries and the optimizer set themselves up in them."""
_MOST_NORM = 1.0


@dataclass(frozen=True)
class Batch:
    """What a step sees.

    Attributes:
        tokens: Token ids, int64 ``[B, L]``.
        hidden: The target's final norm's outputs, ``[B, L, H]``.
        rows: Which rows of ``B (L - 1)`` are trained, int64 ``[R]``: row i of a sequence foresees its token i + 2.
        shares: What each of them counts, fp32 ``[R]``; 0 fills the batch up.
    """

    tokens: torch.Tensor
    hidden: torch.Tensor
    rows: torch.Tensor
    shares: torch.Tensor


class TrainingStep:
    """Runs steps.

    Args:
        weights: What is trained.
        loss_of: The loss of a batch; on a GPU it must not look at numbers on the host.
        rate: The learning rate.
    """

    def __init__(
        self, weights: Mapping[str, torch.nn.Parameter], loss_of: Callable[[Batch], torch.Tensor], rate: float
    ) -> None:
        self._weights = list(weights.values())
        self._loss_of = loss_of
        self._recorded = self._weights[0].is_cuda
        self._rate: Any = torch.tensor(rate, device=self._weights[0].device) if self._recorded else rate
        self.optimizer = torch.optim.AdamW(
            self._weights,
            lr=self._rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=self._recorded,
            capturable=self._recorded,
        )
        self._done = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def restore(self, state: dict[str, Any]) -> None:
        """Take the optimizer's state of an earlier run."""
        self.optimizer.load_state_dict(state)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate

    def run(self, batch: Batch, rate: float) -> torch.Tensor:
        """Train on a batch; returns its loss, on a GPU in place."""
        if not self._recorded:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            return self._step(batch)
        self._rate.fill_(rate)
        if self._done < _WARM_UP:
            self._done += 1
            return self._beside(batch)
        if self._graph is None:
            self._record(batch)
        assert self._graph is not None  # noqa: S101
        for part in fields(Batch):
            getattr(self._batch, part.name).copy_(getattr(batch, part.name))
        self._graph.replay()
        return self._loss

    def _step(self, batch: Batch) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        return self._forward_and_back(batch)

    def _forward_and_back(self, batch: Batch) -> torch.Tensor:
        loss = self._loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._weights, _MOST_NORM)
        self.optimizer.step()
        return loss.detach()

    def _beside(self, batch: Batch) -> torch.Tensor:
        """A step on a stream of its own, as recording wants it before."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loss = self._step(batch)
        torch.cuda.current_stream().wait_stream(side)
        return loss

    def _record(self, batch: Batch) -> None:
        self._batch = Batch(*(getattr(batch, part.name).clone() for part in fields(Batch)))
        self.optimizer.zero_grad(set_to_none=True)  # the recorded backward makes them anew, in its own memory
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._loss = self._forward_and_back(self._batch)
