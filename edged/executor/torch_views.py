"""The executor's flat buffers, seen as the tensors of one step.

A view is made for a number of rows. Up to :data:`FEATURE_MAJOR_ROWS` rows lie feature-major in memory (row stride 1):
``weight @ x.T`` then reads the weight in its own order, which on CPUs is two to three times as fast for few rows as
``x @ weight.T``. The logical shape is ``[rows, width]`` either way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edged.memory.buffers import NARROW_TOKENS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from edged.models.architecture import Architecture

FEATURE_MAJOR_ROWS = 32
"""Most rows that lie feature-major."""

BATCHES = 4
"""A matrix-vector product runs as a batch of this many smaller ones, which MKL spreads over the threads."""


def row_view(flat: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """The first ``rows * width`` elements of a flat buffer as ``[rows, width]``."""
    part = flat[: rows * width]
    return part.view(width, rows).t() if rows <= FEATURE_MAJOR_ROWS else part.view(rows, width)


@dataclass(frozen=True)
class LinearViews:
    """Input and output of one linear, in every form that a product wants."""

    x: torch.Tensor  # [rows, in]
    out: torch.Tensor  # [rows, out]
    x_features: torch.Tensor  # [in, rows]
    out_features: torch.Tensor  # [out, rows]
    x_batched: torch.Tensor | None = None  # [BATCHES, in, 1]
    out_batched: torch.Tensor | None = None  # [BATCHES, out / BATCHES, 1]
    x_narrow: torch.Tensor | None = None  # [rows, in], in the weights' half-precision type
    out_narrow: torch.Tensor | None = None  # [rows, out]

    @classmethod
    def of(
        cls,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        narrow_in: torch.Tensor | None = None,
        narrow_out: torch.Tensor | None = None,
    ) -> LinearViews:
        """Derive the forms from the logical views.

        Args:
            x: ``[rows, in]``.
            out: ``[rows, out]``.
            narrow_in: Flat half-precision scratch for the input; None where weights are not half precision.
            narrow_out: The same for the output.
        """
        rows, inputs = x.shape
        outputs = out.shape[1]
        x_batched = out_batched = x_narrow = out_narrow = None
        if rows == 1 and outputs % BATCHES == 0:
            x_batched = x.view(1, inputs, 1).expand(BATCHES, inputs, 1)
            out_batched = out.view(BATCHES, outputs // BATCHES, 1)
        if narrow_in is not None and narrow_out is not None and rows <= NARROW_TOKENS:
            x_narrow = narrow_in[: rows * inputs].view(rows, inputs)
            out_narrow = narrow_out[: rows * outputs].view(rows, outputs)
        return cls(x, out, x.t(), out.t(), x_batched, out_batched, x_narrow, out_narrow)


class StepViews:
    """The activations of a step of ``rows`` tokens (or of its needed rows).

    Args:
        buffers: The flat buffers, by name.
        architecture: The model's sizes.
        rows: Tokens.
        prefix: ``needed_`` for the tensors of the needed rows, which must not overwrite what they are taken from.
    """

    def __init__(
        self, buffers: Mapping[str, torch.Tensor], architecture: Architecture, rows: int, prefix: str = ""
    ) -> None:
        a = architecture

        def view(name: str, width: int) -> torch.Tensor:
            return row_view(buffers[name], rows, width)

        self.rows = rows
        self.hidden = view(prefix + "hidden", a.hidden)
        self.normed = view("normed", a.hidden)
        self.qkv = view("qkv", a.qkv_width)
        self.attended = view(prefix + "attended", a.q_width)
        self.branch = view("branch", a.hidden)
        self.gate_up = view("gate_up", 2 * a.intermediate)
        self.gate = self.gate_up[:, : a.intermediate]
        self.up = self.gate_up[:, a.intermediate :]
        self.activated = view("activated", a.intermediate)
        self.norm_scale = buffers["norm_scale"][:rows].view(rows, 1)
        narrow_in, narrow_out = buffers.get("narrow_in"), buffers.get("narrow_out")
        self.linears = {
            part: LinearViews.of(x, out, narrow_in=narrow_in, narrow_out=narrow_out)
            for part, x, out in (
                ("qkv", self.normed, self.qkv),
                ("output", self.attended, self.branch),
                ("gate_up", self.normed, self.gate_up),
                ("down", self.activated, self.branch),
            )
        }


def head_views(buffers: Mapping[str, torch.Tensor], architecture: Architecture, rows: int) -> LinearViews:
    """Input (in ``branch``, which is free by then) and output of the LM head for ``rows`` rows."""
    return LinearViews.of(
        row_view(buffers["branch"], rows, architecture.hidden),
        row_view(buffers["logits"], rows, architecture.vocabulary),
        narrow_in=buffers.get("narrow_in"),
        narrow_out=buffers.get("narrow_out"),
    )
