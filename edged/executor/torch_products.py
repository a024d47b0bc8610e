"""The ways that torch has to multiply a few or many rows by a weight on the CPU.

Each takes the views of a linear and its weight ``[out, in]`` and writes the views' output. None is the fastest everywhere:
:mod:`edged.executor.torch_choice` measures them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from edged.executor.torch_views import PIECE_ROWS, product_batches
from edged.memory.buffers import SHARPENED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from edged.executor.torch_views import LinearViews

    Product = Callable[[LinearViews, torch.Tensor], None]

MOST_RESULTS = 1 << 20
"""Elements that oneDNN computes at a time into memory of its own (4 MiB), before they go to their places."""


def plain_product(views: LinearViews, weight: torch.Tensor) -> None:
    """One product, as the views lie."""
    if views.only_row is not None:
        x, out = views.only_row
        torch.mv(weight, x, out=out)
    elif views.is_feature_major:
        torch.mm(weight, views.x_transposed, out=views.out_transposed)
    else:
        torch.mm(views.x, weight.t(), out=views.out)


def cut_weight(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """A weight as :func:`cut_product` takes it for so many rows, ``[batches, out / batches, in]``."""
    outputs, inputs = weight.shape
    batches = product_batches(outputs, torch.get_num_threads(), rows)
    return weight.view(batches, outputs // batches, inputs)


def cut_product(views: LinearViews, cut: torch.Tensor) -> None:
    """A batch of smaller products: two to three times as fast as one on some CPUs, and as slow on others."""
    if views.x_batched is None:
        plain_product(views, cut.flatten(0, 1))
    else:
        torch.bmm(cut, views.x_batched, out=views.out_batched)


def turned_product(views: LinearViews, weight: torch.Tensor) -> None:
    """Row by row, and turned over then."""
    if views.out_by_rows is None:
        plain_product(views, weight)
    else:
        views.out.copy_(torch.mm(views.x, weight.t(), out=views.out_by_rows))


class OneDnnProduct:
    """oneDNN's product of fp32 as it lies, which torch has for its compiled graphs alone.

    Where MKL is not at home it takes less than half the time.

    Args:
        linear: torch's operator.
    """

    def __init__(self, linear: Callable[..., torch.Tensor]) -> None:
        self._linear = linear

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T``, fp32 ``[n, in]`` and ``[out, in]``, into torch's own memory."""
        return self._linear(x, weight, None, "none", [], "")

    @classmethod
    def find(cls) -> OneDnnProduct | None:
        """The operator, where this torch has it and it does what is expected of it."""
        try:
            linear = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001 - there is no other way to it
            x, weight = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
            found = linear(x, weight, None, "none", [], "")
        except (AttributeError, RuntimeError, TypeError, NotImplementedError):
            return None
        same = isinstance(found, torch.Tensor) and torch.equal(found, x @ weight.t())
        return cls(linear) if same else None

    def __call__(self, views: LinearViews, weight: torch.Tensor) -> None:
        """Some rows and outputs after others: results lie in torch's own memory first."""
        out = views.out
        for start, x in views.pieces:
            if x.shape[0] == out.shape[0] and out.numel() <= MOST_RESULTS:  # nothing to cut: as most steps
                out.copy_(self.multiply(x, weight))
                continue
            rows = out[start : start + x.shape[0]]
            for outputs in _runs(weight.shape[0], MOST_RESULTS // x.shape[0]):
                product = self.multiply(x, weight[outputs])
                rows[:, outputs].copy_(product[: rows.shape[0]])


class TileProducts:
    """Products of half-precision weights that need scratch.

    Args:
        tile: Flat, of the type that is computed in.
    """

    def __init__(self, tile: torch.Tensor) -> None:
        self._tile = tile

    def widened(self, views: LinearViews, weight: torch.Tensor) -> None:
        """Tile by tile: widen some rows of the weight, multiply, go on."""
        outputs, inputs = weight.shape
        rows = max(1, self._tile.numel() // inputs)
        feature_major = views.is_feature_major
        for start in range(0, outputs, rows):
            part = weight[start : start + rows]
            wide = self._tile[: part.numel()].view_as(part)
            wide.copy_(part)
            if feature_major:
                torch.mm(wide, views.x_transposed, out=views.out_transposed[start : start + rows])
            else:
                torch.mm(views.x, wide.t(), out=views.out[:, start : start + rows])

    def vectors(self, views: LinearViews, weight: torch.Tensor) -> None:
        """As they are, a vector for each row (accumulated in fp32 by torch's kernel)."""
        narrow = views.narrow
        if narrow is None:
            self.by_rows(views, weight)
            return
        narrow.x.copy_(views.pieces[0][1])
        for row, result in narrow.rows:
            torch.mv(weight, row, out=result)
        views.out.copy_(narrow.result)

    def by_rows(self, views: LinearViews, weight: torch.Tensor) -> None:
        """As they are, with results row by row."""
        out = views.out
        if (narrow := views.narrow) is not None:  # everything at once: most steps
            narrow.x.copy_(views.pieces[0][1])
            torch.mm(narrow.x, weight.t(), out=narrow.out)
            out.copy_(narrow.result)
            return
        for start, x, scratch in self._narrowed(views, weight.dtype):
            rows = out[start : start + x.shape[0]]
            for outputs in _runs(weight.shape[0], scratch.numel() // x.shape[0]):
                product = _multiply(x, weight[outputs], scratch)
                rows[:, outputs].copy_(product[: rows.shape[0]])

    def by_features(self, views: LinearViews, weight: torch.Tensor) -> None:
        """As they are, with results feature by feature.

        They lie in the scratch as in the views: an element that changes its type and its place at once takes several times
        as long as one that changes its type.
        """
        out = views.out
        if (narrow := views.narrow) is not None:
            narrow.x.copy_(views.pieces[0][1])
            torch.mm(weight, narrow.x.t(), out=narrow.out_transposed)
            out.copy_(narrow.result_transposed)
            return
        for start, x, scratch in self._narrowed(views, weight.dtype):
            rows = out[start : start + x.shape[0]]
            for outputs in _runs(weight.shape[0], scratch.numel() // x.shape[0]):
                part = weight[outputs]
                flat = scratch[: part.shape[0] * x.shape[0]].view(part.shape[0], x.shape[0])
                product = torch.mm(part, x.t(), out=flat).t()
                rows[:, outputs].copy_(product[: rows.shape[0]])

    def gated(self, views: LinearViews, weight: torch.Tensor, activated: torch.Tensor) -> None:
        """``silu(x @ gate.T) * (x @ up.T)``, rounded to half precision where torch's own layers round.

        Args:
            views: Input, ``[rows, in]``; the output is not written.
            weight: Gate and up, ``[2 I, in]``.
            activated: ``[rows, I]``, of the weight's type, where the result goes.
        """
        middle = weight.shape[0] // 2
        for start, x, scratch in self._narrowed(views, weight.dtype):
            rows = activated[start : start + x.shape[0]]
            half = scratch.numel() // 2
            for outputs in _runs(middle, half // x.shape[0]):
                up_outputs = slice(outputs.start + middle, outputs.stop + middle)
                gate = torch.nn.functional.silu(_multiply(x, weight[outputs], scratch[:half]), inplace=True)
                up = _multiply(x, weight[up_outputs], scratch[half:])
                torch.mul(gate[: rows.shape[0]], up[: rows.shape[0]], out=rows[:, outputs])

    def sharpened(self, product: Product, views: LinearViews, weight: torch.Tensor) -> None:
        """Logits whose largest are computed again in fp32.

        A product of half precision rounds to it, and the best logits are often equal then; those that may be drawn at all
        must not be.
        """
        product(views, weight)
        count = min(SHARPENED, weight.shape[0])
        wide = self._tile[: count * weight.shape[1]].view(count, -1)
        for x, logits in zip(views.x, views.out, strict=True):
            best = logits.topk(count).indices
            wide.copy_(weight.index_select(0, best))
            logits.index_copy_(0, best, torch.mv(wide, x))

    def _narrowed(
        self, views: LinearViews, dtype: torch.dtype
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """The rows in pieces of the weights' type: the first row of each, ``[n, in]``, and scratch that is left.

        Rows that are of this type already are taken where they are.
        """
        scratch = self._tile.view(dtype)
        count, inputs = views.x.shape
        # Half of the scratch for the rows, half for results of some outputs at least.
        widest = max(inputs, 2 * _RUN_UNIT)
        most = next((size for size in reversed(PIECE_ROWS) if size * widest <= scratch.numel() // 2), 1)
        for start, piece in views.pieces:
            for first, part in zip(range(start, count, most), piece.split(most), strict=False):
                if part.dtype == dtype:
                    yield first, part, scratch
                else:
                    narrow = scratch[: part.numel()].view(part.shape)
                    narrow.copy_(part)
                    yield first, narrow, scratch[part.numel() :]


def _multiply(x: torch.Tensor, weight: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` in scratch, ``[rows, out]``."""
    rows, outputs = x.shape[0], weight.shape[0]
    product: torch.Tensor = torch.mm(x, weight.t(), out=scratch[: rows * outputs].view(rows, outputs))
    return product


_RUN_UNIT = 64
"""Outputs of which each run of a longer row has a whole number, where there is room for so many."""


def _runs(outputs: int, most: int) -> Iterator[slice]:
    """All outputs in runs of one length."""
    count = -(-outputs // max(1, most))
    size = -(-outputs // count)
    if count > 1:
        larger = -(-size // _RUN_UNIT) * _RUN_UNIT
        size = larger if larger <= most else size // _RUN_UNIT * _RUN_UNIT or size
    return (slice(start, min(start + size, outputs)) for start in range(0, outputs, size))
