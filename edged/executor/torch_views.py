"""The executor's flat buffers, seen as the tensors of one step.

A view is made for a number of rows. Results of linears with up to :data:`FEATURE_MAJOR_ROWS` rows lie feature-major in
memory (row stride 1), because ``weight @ x.T`` is up to three times as fast for few rows on a CPU as ``x @ weight.T``;
their inputs lie row by row. The logical shape is ``[rows, width]`` either way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from edged.memory.buffers import NARROW_TOKENS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edged.models.architecture import Architecture

FEATURE_MAJOR_ROWS = 64
"""Most rows whose results lie feature-major; for more, what is gained is lost where layouts meet."""


def input_view(flat: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """The first ``rows * width`` elements of a flat buffer as ``[rows, width]``, row by row."""
    return flat[: rows * width].view(rows, width)


def unit_view(flat: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """The beginning of a flat fp32 buffer as bfloat16 ``[rows, width]``, row by row: what matrix units multiply."""
    return input_view(flat.view(torch.bfloat16), rows, width)


def feature_major_view(flat: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """The first ``rows * width`` elements of a flat buffer as ``[rows, width]``, feature by feature."""
    return flat[: rows * width].view(width, rows).t()


def output_view(flat: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """Feature by feature when rows are few, else row by row."""
    return (feature_major_view if rows <= FEATURE_MAJOR_ROWS else input_view)(flat, rows, width)


ROW_CLASSES = (1, 2, 4, 16, FEATURE_MAJOR_ROWS)
"""Most rows of the classes for which products are measured: those of one stream, of two, of a few, of small trees and of
large ones."""

MANY_ROWS = len(ROW_CLASSES)
"""The class of more rows: chunks of prompts."""

PIECE_ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 512)
"""Rows that oneDNN multiplies at a time. It compiles a product for each shape that it meets and keeps it (some 0.7 MB): a
number of rows of its own for every chunk and tree would fill the memory."""

_MOST_WASTE = 1 / 3
"""Of the rows of a piece of many, those that may be multiplied for nothing."""

MOST_CUT_ROWS = 16
"""Most rows for which products are cut into smaller ones, or turned over."""

_PIECE = 8
"""Most outputs of a piece into which a product of some rows is cut: with sixteen, MKL's fast products end."""
_LEAST_PIECE = 4


def product_batches(outputs: int, threads: int, rows: int) -> int:
    """How many smaller ones a product of few rows is cut into; 1: it is not.

    MKL runs one matrix-vector product on one thread, and a batch of them on all; on one thread, too, a batch can be
    twice as fast. For some rows it has fast products of a few outputs, on some CPUs. Other libraries do not.
    """
    if not torch.backends.mkl.is_available():
        return 1
    if rows == 1:
        return next((count for count in range(2 * max(threads, 2), 1, -1) if outputs % count == 0), 1)
    return next((outputs // size for size in range(_PIECE, _LEAST_PIECE - 1, -1) if outputs % size == 0), 1)


def row_class(rows: int) -> int:
    """Which of :data:`ROW_CLASSES` so many rows belong to, or :data:`MANY_ROWS`."""
    return next((index for index, most in enumerate(ROW_CLASSES) if rows <= most), MANY_ROWS)


def piece_places(rows: int, room: int) -> list[tuple[int, int]]:
    """Where pieces of :data:`PIECE_ROWS` begin that cover so many rows, and how long they are.

    The last piece may end behind the rows, or begin before the end of the one before it: a few rows more cost less than
    another product.

    Args:
        rows: To cover.
        room: Rows that there are, whatever those behind the first ``rows`` hold.
    """
    places: list[tuple[int, int]] = []
    start = 0
    while (rest := rows - start) > 0:
        least = next((size for size in PIECE_ROWS if size >= rest), 0)
        if least and (least <= FEATURE_MAJOR_ROWS or least - rest <= least * _MOST_WASTE):
            if start + least <= room:
                return [*places, (start, least)]
            if least <= rows:
                return [*places, (rows - least, least)]
        size = next(size for size in reversed(PIECE_ROWS) if size <= rest)
        places.append((start, size))
        start += size
    return places


def _pieces_of(x: torch.Tensor) -> tuple[tuple[int, torch.Tensor], ...]:
    """The rows of ``x``, ``[rows, in]``, in pieces with the first row of each."""
    rows, inputs = x.shape
    stride, feature = x.stride()
    offset = x.storage_offset()
    if feature != 1:  # rows behind these do not follow them
        return tuple((start, x[start : start + size]) for start, size in piece_places(rows, rows))
    room = (x.untyped_storage().nbytes() // x.element_size() - offset) // max(1, stride)
    return tuple(
        (start, x.as_strided((size, inputs), (stride, 1), offset + start * stride))
        for start, size in piece_places(rows, room)
    )


@dataclass(frozen=True)
class NarrowViews:
    """Input and output of one linear as scratch of the weights' half-precision type, where all rows are one piece."""

    x: torch.Tensor  # [n, in]
    out: torch.Tensor  # [n, out]
    out_transposed: torch.Tensor  # [out, n], the same memory in another order
    result: torch.Tensor  # [rows, out] of out
    result_transposed: torch.Tensor  # [rows, out] of out_transposed
    rows: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # each row, [in] and [out]

    @classmethod
    def of(
        cls, scratch: torch.Tensor, rows: int, piece: int, inputs: int, outputs: int
    ) -> NarrowViews | None:
        """Cut the scratch; None where it is too small."""
        if piece * (inputs + outputs) > scratch.numel():
            return None
        x = scratch[: piece * inputs].view(piece, inputs)
        flat = scratch[piece * inputs : piece * (inputs + outputs)]
        out, out_transposed = flat.view(piece, outputs), flat.view(outputs, piece)
        each = tuple(zip(x[:rows], out[:rows], strict=True)) if rows <= NARROW_TOKENS else ()
        return cls(x, out, out_transposed, out[:rows], out_transposed.t()[:rows], each)


@dataclass(frozen=True)
class LinearViews:
    """Input and output of one linear, in every form that a product wants."""

    x: torch.Tensor  # [rows, in]
    out: torch.Tensor  # [rows, out]
    x_transposed: torch.Tensor  # [in, rows]
    out_transposed: torch.Tensor  # [out, rows]
    only_row: tuple[torch.Tensor, torch.Tensor] | None = None  # [in] and [out], where there is one row
    row_class: int = MANY_ROWS
    pieces: tuple[
        tuple[int, torch.Tensor], ...
    ] = ()  # first row, and [n, in] of the rows from there on, n in PIECE_ROWS
    x_batched: torch.Tensor | None = None  # [batches, in, rows]
    out_batched: torch.Tensor | None = None  # [batches, out / batches, rows]
    out_by_rows: torch.Tensor | None = None  # [rows, out], scratch
    narrow: NarrowViews | None = None

    @property
    def is_feature_major(self) -> bool:
        """Whether the output lies feature by feature."""
        return self.out_transposed.is_contiguous()

    @classmethod
    def of(
        cls,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        tile: torch.Tensor | None = None,
        scratch: torch.Tensor | None = None,
    ) -> LinearViews:
        """Derive the forms from the logical views.

        Args:
            x: ``[rows, in]``.
            out: ``[rows, out]``.
            tile: Flat scratch of the weights' half-precision type; None where they are not.
            scratch: Flat, of the output's type, and free while the product is made; None: nothing is.
        """
        rows, inputs = x.shape
        outputs = out.shape[1]
        x_batched = out_batched = out_by_rows = narrow = None
        if 0 < rows <= MOST_CUT_ROWS and out.t().is_contiguous():
            batches = product_batches(outputs, torch.get_num_threads(), rows)
            # The strides say that x are rows that were transposed, for which MKL has a fast product; a column is slow.
            x_batched = x.t().unsqueeze(0).expand(batches, inputs, rows)
            out_batched = out.t().view(batches, outputs // batches, rows)
            if scratch is not None and scratch.numel() >= rows * outputs:
                out_by_rows = scratch[: rows * outputs].view(rows, outputs)
        pieces = _pieces_of(x)
        if tile is not None and len(pieces) == 1:
            narrow = NarrowViews.of(tile, rows, pieces[0][1].shape[0], inputs, outputs)
        return cls(
            x,
            out,
            x.t(),
            out.t(),
            (x[0], out[0]) if rows == 1 else None,
            row_class(rows),
            pieces,
            x_batched,
            out_batched,
            out_by_rows,
            narrow,
        )


class StepViews:
    """The activations of a step of ``rows`` tokens (or of its needed rows).

    Args:
        buffers: The flat buffers, by name.
        architecture: The model's sizes.
        rows: Tokens.
        prefix: ``needed_`` for the tensors of the needed rows, which must not overwrite what they are taken from.
        by_rows: Everything of many rows lies row by row.
        narrow: And what only a product reads is bfloat16 already.
    """

    def __init__(
        self,
        buffers: Mapping[str, torch.Tensor],
        architecture: Architecture,
        rows: int,
        prefix: str = "",
        *,
        by_rows: bool = False,
        narrow: bool = False,
    ) -> None:
        a = architecture
        few = rows <= FEATURE_MAJOR_ROWS
        by_rows = by_rows and not few
        self.narrow = narrow and by_rows

        def inputs(name: str, width: int) -> torch.Tensor:
            return input_view(buffers[name], rows, width)

        def outputs(name: str, width: int) -> torch.Tensor:
            return output_view(buffers[name], rows, width)

        self.rows = rows
        self.hidden = inputs(prefix + "hidden", a.hidden)
        self.normed = inputs("normed", a.hidden)
        self.qkv = outputs("qkv", a.qkv_width)
        attended_view = unit_view if self.narrow else input_view
        self.attended = attended_view(buffers[prefix + "attended"], rows, a.q_width)
        self.branch = outputs("branch", a.hidden)
        # Between these two lies nothing but elementwise work, so the layout may be the products' choice for any rows.
        gate_up_view = input_view if by_rows else feature_major_view
        self.gate_up = gate_up_view(buffers["gate_up"], rows, 2 * a.intermediate)
        self.gate = self.gate_up[:, : a.intermediate]
        self.up = self.gate_up[:, a.intermediate :]
        activated_view = unit_view if self.narrow else input_view if few or by_rows else feature_major_view
        self.activated = activated_view(buffers["activated"], rows, a.intermediate)
        self.norm_scale = buffers["norm_scale"][:rows].view(rows, 1)
        self.linears = {
            part: LinearViews.of(
                x,
                out,
                tile=_narrow_tile(buffers),
                # Between down and gate_up nobody reads this one.
                scratch=None if part == "gate_up" else buffers["gate_up"],
            )
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
        input_view(buffers["branch"], rows, architecture.hidden),
        output_view(buffers["logits"], rows, architecture.vocabulary),
        tile=_narrow_tile(buffers),
    )


def _narrow_tile(buffers: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The scratch of products in half precision, in the type of the weights, which embeddings have, too."""
    tile = buffers.get("weight_tile")
    return None if tile is None else tile.view(buffers["embedded"].dtype)
