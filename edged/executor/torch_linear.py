"""Linear layers on the CPU: the fastest product that torch has for each dtype and number of rows.

fp32 and fp64: up to 16 rows are multiplied in the way that is fastest here, measured when the model is loaded, for each
shape of the weights and each class of rows: as a batch of smaller products (two to three times as fast as one on some
CPUs, and as slow on others), as ``x @ weight.T`` whose result is turned over, or, as more rows always, as
``weight @ x.T``; many rows are ``x @ weight.T``. bfloat16 and float16: few
rows multiply as they are (torch has a fast matrix-vector product for them); for more, tiles of the weight are widened to
fp32, because CPUs without matrix units for these types multiply them many times slower; those with such units (AMX)
multiply them as they are, but for the LM head, whose rounding would show.
4-bit and ternary weights have products of their own (:mod:`edged.executor.torch_packed`,
:mod:`edged.executor.torch_ternary`), whatever the plan's dtype is.
"""

from __future__ import annotations

import time
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from edged.executor.torch_packed import PackedProduct, PackedWeight
from edged.executor.torch_ternary import TernaryProduct, TernaryWeight
from edged.executor.torch_views import ROW_CLASSES, product_batches
from edged.memory.buffers import SHARPENED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from edged.executor.torch_views import LinearViews
    from edged.models.operators import Linear


MEASURED_ELEMENTS = 1 << 18
"""Fewest elements of a weight whose products are worth timing."""

_TURNS = 7
_TURNS_OF_LARGE = 2
_LARGE_ELEMENTS = 1 << 23
_WITH_SCRATCH = ("qkv", "output", "down")
_MEASURED_ROWS = (1, 2, 4, 8)
"""How many rows stand for each of ``ROW_CLASSES``."""


class CpuLinear:
    """Runs the linears of one model.

    Args:
        linears: Every linear of the model.
        buffers: The flat buffers; ``weight_tile`` is there when weights are half precision, ``packed_in``,
            ``packed_tile`` and ``packed_octets`` when some are in 4 bits.
        packed: The weights that are in 4 bits or ternary, by the linear's name.
    """

    def __init__(
        self,
        linears: Sequence[Linear[torch.Tensor]],
        buffers: Mapping[str, torch.Tensor],
        packed: Mapping[str, PackedWeight | TernaryWeight] | None = None,
    ) -> None:
        self._tile = buffers.get("weight_tile")
        self._packed = packed or {}
        wide = [layer for layer in linears if self._tile is None and layer.name not in self._packed]
        # For each class of rows the linears whose product is not the usual one.
        self._cut, self._by_rows = _choose_products(wide)
        self._has_matrix_units = self._tile is not None and has_matrix_units()
        narrow = [layer.weight.dtype == torch.bfloat16 for layer in linears if layer.name not in self._packed]
        self.wants_rows = self._has_matrix_units and not self._packed and all(narrow)
        """Whether results of many rows should lie row by row."""
        if self._packed:
            scratch = (buffers["packed_in"], buffers["packed_tile"], buffers["packed_octets"])
            self._packed_product = PackedProduct(*scratch)
            self._ternary_product = TernaryProduct(*scratch)

    def __call__(
        self, views: LinearViews, layer: Linear[torch.Tensor], *, exactly: bool = False
    ) -> torch.Tensor:
        """``x @ weight.T + bias`` of the views' input into their output: ``[rows, in]`` to ``[rows, out]``.

        Args:
            views: Input and output.
            layer: The linear.
            exactly: Many rows of half-precision weights are multiplied in fp32 on every CPU.
        """
        out = views.out
        packed = self._packed.get(layer.name)
        if isinstance(packed, TernaryWeight):
            self._ternary_product(views.x, packed, out)
        elif packed is not None:
            self._packed_product(views.x, packed, out)
        elif self._tile is not None:
            if views.x_narrow is not None and views.out_narrow is not None:
                _narrow_product(views.x_narrow, views.out_narrow, views, layer.weight)
            elif self._has_matrix_units and not exactly and layer.weight.dtype == torch.bfloat16:
                unit_product(views, layer.weight, self._tile)
            else:
                self._widened_product(views, layer.weight, self._tile)
        else:
            self._wide_product(views, layer)
        if layer.bias is not None:
            out.add_(layer.bias)
        return out

    def gated(self, views: LinearViews, layer: Linear[torch.Tensor], activated: torch.Tensor) -> None:
        """``silu(x @ gate.T) * (x @ up.T)`` in matrix units, rounded to bfloat16 where torch's own layers round.

        Args:
            views: Input, ``[rows, in]``; the output is not written.
            layer: Gate and up, ``[2 I, in]``, bfloat16 and without a bias.
            activated: ``[rows, I]``, bfloat16, where the result goes.
        """
        assert self._tile is not None, "matrix units multiply what has a tile"  # noqa: S101 - wants_rows says so
        middle = layer.weight.shape[0] // 2
        for rows, both in _unit_products(views.x, layer.weight, self._tile, by_rows=True):
            gate = torch.nn.functional.silu(both[:, :middle], inplace=True)
            torch.mul(gate, both[:, middle:], out=activated[rows])

    def logits(self, views: LinearViews, head: Linear[torch.Tensor]) -> torch.Tensor:
        """The LM head: ``[rows, H]`` to ``[rows, V]``.

        A narrow product rounds to half precision, in which the best logits are often equal; those that may be drawn at
        all are therefore computed again in fp32.
        """
        logits = self(views, head, exactly=True)
        if self._tile is not None and views.x_narrow is not None and head.name not in self._packed:
            count = min(SHARPENED, head.weight.shape[0])
            rows = self._tile[: count * head.weight.shape[1]].view(count, -1)
            for x, row in zip(views.x, logits, strict=True):
                best = row.topk(count).indices
                rows.copy_(head.weight.index_select(0, best))
                row.index_copy_(0, best, torch.mv(rows, x))
        return logits

    def _wide_product(self, views: LinearViews, layer: Linear[torch.Tensor]) -> None:
        """In the way that was chosen for so many rows."""
        if views.x_batched is not None and (cut := self._cut[views.row_class].get(layer.name)) is not None:
            torch.bmm(cut, views.x_batched, out=views.out_batched)
        elif views.out_by_rows is not None and layer.name in self._by_rows[views.row_class]:
            views.out.copy_(torch.mm(views.x, layer.weight.t(), out=views.out_by_rows))
        elif views.only_row is not None:
            x, out = views.only_row
            torch.mv(layer.weight, x, out=out)
        elif views.is_feature_major:
            torch.mm(layer.weight, views.x_transposed, out=views.out_transposed)
        else:
            torch.mm(views.x, layer.weight.t(), out=views.out)

    @staticmethod
    def _widened_product(views: LinearViews, weight: torch.Tensor, tile: torch.Tensor) -> None:
        """Tile by tile: widen some rows of the weight, multiply, go on."""
        outputs, inputs = weight.shape
        rows = max(1, tile.numel() // inputs)
        feature_major = views.is_feature_major
        for start in range(0, outputs, rows):
            part = weight[start : start + rows]
            wide = tile[: part.numel()].view_as(part)
            wide.copy_(part)
            if feature_major:
                torch.mm(wide, views.x_transposed, out=views.out_transposed[start : start + rows])
            else:
                torch.mm(views.x, wide.t(), out=views.out[:, start : start + rows])


def _narrow_product(x: torch.Tensor, out: torch.Tensor, views: LinearViews, weight: torch.Tensor) -> None:
    """Row by row in the weight's own type (accumulated in fp32 by torch's kernel)."""
    x.copy_(views.x)
    for row, result in views.narrow_rows:
        torch.mv(weight, row, out=result)
    views.out.copy_(out)


def unit_product(views: LinearViews, weight: torch.Tensor, tile: torch.Tensor) -> None:
    """All rows as bfloat16, widened into the views' output."""
    by_rows = views.out.stride(1) == 1
    for rows, product in _unit_products(views.x, weight, tile, by_rows=by_rows):
        views.out[rows].copy_(product)


def _unit_products(
    x: torch.Tensor, weight: torch.Tensor, tile: torch.Tensor, *, by_rows: bool
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Some rows after others as bfloat16, with the tile as scratch for them and their results.

    Both lie in the scratch as they do in the views: an element that changes its type and its place at once takes several
    times as long as one that changes its type. Rows that are bfloat16 are multiplied where they are.

    Args:
        x: ``[rows, in]``, fp32 or bfloat16.
        weight: ``[out, in]``.
        tile: Flat scratch.
        by_rows: Results lie row by row, else feature by feature.

    Yields:
        Which rows, and their products ``[n, out]``, which the next ones overwrite.
    """
    outputs, inputs = weight.shape
    scratch = tile.view(weight.dtype)
    most = max(1, scratch.numel() // (inputs + outputs))
    for start in range(0, x.shape[0], most):
        part = x[start : start + most]
        count = part.shape[0]
        flat, out = scratch[: count * inputs], scratch[count * inputs : count * (inputs + outputs)]
        narrow = part
        if part.dtype != weight.dtype:
            narrow = flat.view(count, inputs) if part.stride(1) == 1 else flat.view(inputs, count).t()
            narrow.copy_(part)
        if by_rows:
            product = torch.mm(narrow, weight.t(), out=out.view(count, outputs))
        else:
            product = torch.mm(weight, narrow.t(), out=out.view(outputs, count)).t()
        yield slice(start, start + count), product


def has_matrix_units() -> bool:
    """Whether this CPU has units for products of bfloat16 matrices that torch's libraries use (AMX)."""
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text("ascii", "replace")
    except OSError:
        return False


def _choose_products(
    linears: Sequence[Linear[torch.Tensor]],
) -> tuple[tuple[dict[str, torch.Tensor], ...], tuple[set[str], ...]]:
    """Which linears have another product than the usual one, by their names, for each class of rows.

    Weights of one shape are multiplied alike. One after the other is measured, so that they come from memory as in a step:
    out of a cache another way is the fastest.

    Returns:
        The weights that are cut, ``[batches, out / batches, in]``; those whose results come row by row.
    """
    by_shape: dict[tuple[int, int], list[Linear[torch.Tensor]]] = {}
    for layer in linears:
        by_shape.setdefault((layer.weight.shape[0], layer.weight.shape[1]), []).append(layer)
    cut: tuple[dict[str, torch.Tensor], ...] = tuple({} for _ in ROW_CLASSES)
    by_rows: tuple[set[str], ...] = tuple(set() for _ in ROW_CLASSES)
    for (outputs, inputs), alike in by_shape.items():
        way = "usual"
        has_scratch = all(layer.part in _WITH_SCRATCH for layer in alike)
        weights = cycle([layer.weight for layer in alike])
        for few, rows in enumerate(_MEASURED_ROWS):
            batches = product_batches(outputs, torch.get_num_threads(), rows)
            if outputs * inputs < _LARGE_ELEMENTS or rows < _MEASURED_ROWS[-1]:  # else as with fewer rows
                way = fastest_product(weights, batches, rows, has_scratch=has_scratch)
            if way == "cut":
                cut[few].update(
                    {layer.name: layer.weight.view(batches, outputs // batches, inputs) for layer in alike}
                )
            elif way == "by rows":
                by_rows[few].update(layer.name for layer in alike)
    return cut, by_rows


def fastest_product(weights: Iterator[torch.Tensor], batches: int, rows: int, *, has_scratch: bool) -> str:
    """What is fastest here: ``usual``, ``cut`` (a batch of smaller products) or ``by rows`` (and turned over then).

    Args:
        weights: Of one shape, ``[out, in]``, without end.
        batches: How many smaller ones.
        rows: Of the input.
        has_scratch: There is room for a result that is turned over.
    """
    first = next(weights)
    outputs, inputs = first.shape
    size = outputs * inputs
    if size < MEASURED_ELEMENTS:  # too small to tell, and to matter
        return "cut" if rows == 1 and batches > 1 else "usual"
    x = first.new_ones(rows, inputs)
    out, turned = first.new_empty(outputs, rows), first.new_empty(rows, outputs)
    x_batched = x.t().unsqueeze(0).expand(batches, inputs, rows)
    out_batched = out.view(batches, outputs // batches, rows)

    def run(way: str, weight: torch.Tensor) -> None:
        if way == "cut":
            torch.bmm(weight.view(batches, outputs // batches, inputs), x_batched, out=out_batched)
        elif way == "by rows":
            out.t().copy_(torch.mm(x, weight.t(), out=turned))
        elif rows == 1:
            torch.mv(weight, x[0], out=out.view(-1))
        else:
            torch.mm(weight, x.t(), out=out)

    ways = ["usual", *(["cut"] if batches > 1 else []), *(["by rows"] if has_scratch and rows > 1 else [])]
    best = dict.fromkeys(ways, float("inf"))
    # What others do on this machine does not count where one thread does all the work.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for _ in range(
        _TURNS if size < _LARGE_ELEMENTS else _TURNS_OF_LARGE
    ):  # by turns: all see the same machine
        for way in ways:
            weight = next(weights)
            begin = clock()
            run(way, weight)
            best[way] = min(best[way], clock() - begin)
    return min(ways, key=best.__getitem__)
