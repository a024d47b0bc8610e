"""What a draft is trained on: the target's distribution after each row.

The LM head is the target's and stays as it is, so the gradient of the cross entropy with respect to a draft's output is known
in closed form, ``(q - p) @ head``; it is computed with the loss, some rows at a time, and no more logits than theirs are ever
held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_LOGIT_BYTES = 1 << 30
_LOGIT_BYTES_CPU = 1 << 28
"""Of logits that are held at once; there are a few times as many bytes beside them."""
_MEASURED_ROWS = 256
"""Rows that the loss is told of; the gradient is that of all."""


class _Distributions(torch.autograd.Function):
    """Cross entropies of some levels' outputs with one target."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context
        head: torch.Tensor,
        wanted: torch.Tensor,
        weights: torch.Tensor,
        *outs: torch.Tensor,
    ) -> torch.Tensor:
        """``head`` [V, H]; ``wanted`` [R, H]; ``weights`` [levels, R]; ``outs`` [R, H] each: losses [levels]."""
        budget = _LOGIT_BYTES if head.is_cuda else _LOGIT_BYTES_CPU
        rows = max(1, budget // (head.element_size() * head.shape[0]))
        losses = torch.zeros(len(outs), device=head.device)
        measured = weights[:, :_MEASURED_ROWS]
        measured = measured / measured.sum(1, keepdim=True).clamp_min(1e-9)
        shares = weights / weights.sum(1, keepdim=True).clamp_min(1e-9)
        gradients = [torch.empty_like(out, dtype=torch.float32) for out in outs]
        for first in range(0, wanted.shape[0], rows):
            some = slice(first, first + rows)
            # Probabilities in the head's type: what passes over the vocabulary takes most of the time.
            likely = (wanted[some].to(head.dtype) @ head.t()).softmax(-1)  # [r, V]
            for level, out in enumerate(outs):
                logits = out[some].to(head.dtype) @ head.t()  # [r, V]
                if first < _MEASURED_ROWS:
                    few = slice(0, _MEASURED_ROWS - first)
                    guessed = logits[few].float().log_softmax(-1)
                    each = torch.linalg.vecdot(likely[few].float(), guessed)
                    losses[level] -= (each * measured[level, some][few]).sum()
                difference = logits.softmax(-1).sub_(likely)
                gradients[level][some] = (difference @ head).float() * shares[level, some, None]
        ctx.save_for_backward(*gradients)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """By each output."""
        scales = gradients[0]
        return None, None, None, *(each * scales[i] for i, each in enumerate(ctx.saved_tensors))


def distribution_loss(
    head: torch.Tensor, wanted: torch.Tensor, weights: torch.Tensor, outs: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Cross entropy of each level's distribution with the target's, a weighted mean over rows.

    Args:
        head: LM head with the model's divisor in it, ``[V, H]``; no gradient reaches it.
        wanted: The target's final norm's outputs, ``[R, H]``.
        weights: Of each level's rows, ``[levels, R]``.
        outs: The draft's outputs that stand for them, by level, ``[R, H]`` each.

    Returns:
        ``[levels]``: of the first rows; the gradient is that of all of them.
    """
    result: torch.Tensor = _Distributions.apply(  # type: ignore[no-untyped-call]
        head, wanted, weights, *outs
    )
    return result
