"""Which product each linear on the CPU takes, by measurement when the model is loaded.

For each shape of the weights and each class of rows (:data:`edged.executor.torch_views.ROW_CLASSES`, and more) the ways
that torch has here are timed by turns, on the model's own weights, one after the other, so that they come from memory as in
a step: out of a cache another way is the fastest. What is too small to tell takes the usual way. One thread is timed, by
the time that it runs: threads that wait for each other on a busy machine would measure what else it does.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

import torch

from edged.executor.torch_products import (
    OneDnnProduct,
    TileProducts,
    cut_product,
    cut_weight,
    plain_product,
    turned_product,
)
from edged.executor.torch_views import (
    FEATURE_MAJOR_ROWS,
    MOST_CUT_ROWS,
    LinearViews,
    output_view,
    product_batches,
)
from edged.memory.buffers import NARROW_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from edged.executor.torch_products import Product
    from edged.models.operators import Linear

HEAD = "head"
"""The part of a model whose results are logits."""

MEASURED_ROWS = (1, 2, 4, 8, 32, 256)
"""How many rows stand for each class."""

MEASURED_ELEMENTS = 1 << 18
"""Fewest elements of a weight whose products are worth timing."""

_MOST_ELEMENTS = 1 << 22
"""Elements of the part of a larger weight that stands for it."""

_TURNS = 7
_LEAST_TURNS = 2
_SECONDS = 0.01
"""After so long, the least turns must do."""

_HOPELESS = 4.0
"""A way that takes so many times as long as the best is not timed again."""

_FIRST_SECONDS = 0.02
"""What a first turn may take longer, because the product is compiled then."""

_TELLING_ROWS = 4
"""From so many rows on a type that the CPU has no instructions for is hopeless for more rows, too."""

_SHARED_TILE = 1.25
"""How much worse widening shares its work among threads, which meet twice a tile and move it through a common cache: a row by
3072 x 576 in 266 us and as it is in 219 on one thread of an AMD EPYC, in 194 and 129 on two."""

_WITH_SCRATCH = ("qkv", "output", "down")
"""Parts of a layer whose results have room to be turned over."""

USUAL = "usual"
CUT = "cut"
TURNED = "turned"
ONEDNN = "onednn"
VECTORS = "vectors"
WIDENED = "widened"
BY_ROWS = "by rows"
BY_FEATURES = "by features"


@dataclass(frozen=True)
class Chosen:
    """The product of one linear for one class of rows."""

    way: str
    product: Product
    weight: torch.Tensor  # as the product takes it


class Choice:
    """The products of one model's linears that are not packed.

    Args:
        linears: Of one type.
        tile: Scratch, where weights are half precision.
    """

    def __init__(self, linears: Sequence[Linear[torch.Tensor]], tile: torch.Tensor | None) -> None:
        self._tile = tile
        self._products: dict[str, Product] = {USUAL: plain_product, CUT: cut_product, TURNED: turned_product}
        self._usual_many = USUAL
        if tile is not None:
            self.tiles = TileProducts(tile)
            self._products = {
                VECTORS: self.tiles.vectors,
                WIDENED: self.tiles.widened,
                BY_ROWS: self.tiles.by_rows,
                BY_FEATURES: self.tiles.by_features,
            }
            self._usual_many = WIDENED
        elif (onednn := OneDnnProduct.find()) is not None:
            self._products[ONEDNN] = onednn
        by_shape: dict[tuple[tuple[int, ...], bool], list[Linear[torch.Tensor]]] = defaultdict(list)
        for layer in linears:
            by_shape[tuple(layer.weight.shape), layer.part == HEAD].append(layer)
        ways: dict[str, list[str]] = {}
        of_many: dict[str, float] = defaultdict(float)
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for alike in by_shape.values():
                found, many = self._ways_of(alike)
                ways.update({layer.name: found for layer in alike})
                for way, seconds in many.items():
                    of_many[way] += seconds * len(alike)
        finally:
            torch.set_num_threads(self._threads)
        self.many = min(of_many, key=of_many.__getitem__) if of_many else self._usual_many
        """The way of many rows, one for all linears: the layout of everything between them depends on it."""
        self.chosen = {
            layer.name: tuple(
                self._chosen(layer, way, rows)
                for way, rows in zip((*ways[layer.name], self.many), MEASURED_ROWS, strict=True)
            )
            for layer in linears
        }
        """For each linear the products of each class of rows."""

    def _chosen(self, layer: Linear[torch.Tensor], way: str, rows: int) -> Chosen:
        return Chosen(way, self._product(layer, way), _as_taken(layer.weight, way, rows))

    def _product(self, layer: Linear[torch.Tensor], way: str) -> Product:
        product = self._products[way]
        rounds = self._tile is not None and way != WIDENED
        return partial(self.tiles.sharpened, product) if rounds and layer.part == HEAD else product

    def _ways_of(self, alike: Sequence[Linear[torch.Tensor]]) -> tuple[list[str], dict[str, float]]:
        """The ways of weights of one shape for all classes but the last, and the seconds of those of the last."""
        weights = _parts([layer.weight for layer in alike])
        first = alike[0].weight
        found: list[str] = []
        hopeless: set[str] = set()
        seconds: dict[str, float] = {}
        for rows in MEASURED_ROWS:
            ways = [way for way in self._possible(alike, rows) if way not in hopeless]
            is_many = rows == MEASURED_ROWS[-1]
            if first.numel() < MEASURED_ELEMENTS or (is_many and alike[0].part == HEAD):
                seconds = {} if is_many else {ways[0]: 0.0}
            else:
                products = {way: self._product(alike[0], way) for way in ways}
                measured = seconds_of(products, weights, rows, self._tile)
                if rows == 1 and USUAL in measured:
                    measured[USUAL] *= self._threads  # MKL multiplies a vector on one of them
                if self._threads > 1 and WIDENED in measured:
                    measured[WIDENED] *= _SHARED_TILE
                seconds = {way: measured.get(way, math.inf) for way in ways}
            if not is_many:
                found.append(min(seconds, key=seconds.__getitem__))
            if rows >= _TELLING_ROWS and seconds.get(WIDENED, math.inf) < math.inf:
                hopeless.update(way for way in seconds if seconds[way] == math.inf)
        return found, seconds

    def _possible(self, alike: Sequence[Linear[torch.Tensor]], rows: int) -> list[str]:
        """The ways that there are; the first is that of what is too small to tell."""
        weight = alike[0].weight
        few = rows <= MOST_CUT_ROWS
        if self._tile is None:
            cuts = few and product_batches(weight.shape[0], torch.get_num_threads(), rows) > 1
            turns = few and rows > 1 and all(layer.part in _WITH_SCRATCH for layer in alike)
            usual = [CUT, USUAL] if cuts and rows == 1 else [USUAL, *([CUT] if cuts else [])]
            has_onednn = ONEDNN in self._products and weight.dtype == torch.float32
            return [*usual, *([TURNED] if turns else []), *([ONEDNN] if has_onednn else [])]
        usual = [VECTORS, WIDENED] if rows <= NARROW_TOKENS else [WIDENED]
        if weight.dtype != torch.bfloat16:
            return usual
        return [*usual, BY_ROWS, *([BY_FEATURES] if 1 < rows <= FEATURE_MAJOR_ROWS else [])]


def seconds_of(
    products: Mapping[str, Product], weights: Iterator[torch.Tensor], rows: int, tile: torch.Tensor | None
) -> dict[str, float]:
    """How long each way takes here, at best; of those that take many times as long as another, nothing.

    Args:
        products: By their ways.
        weights: Of one shape, ``[out, in]``, without end.
        rows: Of the input.
        tile: Scratch, where weights are half precision.
    """
    weight = next(weights)
    outputs, inputs = weight.shape
    compute = weight.dtype if tile is None else tile.dtype
    views = LinearViews.of(
        weight.new_ones(rows, inputs, dtype=compute),
        output_view(weight.new_empty(rows * outputs, dtype=compute), rows, outputs),
        tile=None if tile is None else tile.view(weight.dtype),
        scratch=weight.new_empty(rows * outputs, dtype=compute),
    )
    best = dict.fromkeys(products, math.inf)
    spent = 0.0
    for turn in range(1 + _TURNS):  # by turns: all see the same machine
        for way in best:
            taken = _as_taken(next(weights), way, rows)
            begin = time.thread_time()
            products[way](views, taken)
            seconds = time.thread_time() - begin
            spent += seconds
            best[way] = min(best[way], seconds)
        limit = _HOPELESS * min(best.values()) + (_FIRST_SECONDS if turn == 0 else 0.0)
        # The first turn compiles what it runs, and touches new memory: it counts for nothing else.
        best = {way: seconds if turn else math.inf for way, seconds in best.items() if seconds <= limit}
        if turn >= _LEAST_TURNS and spent > _SECONDS:
            break
    return best


def _as_taken(weight: torch.Tensor, way: str, rows: int) -> torch.Tensor:
    return cut_weight(weight, rows) if way == CUT else weight


def _parts(weights: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The weights without end; of larger ones parts, one after the other."""
    outputs, inputs = weights[0].shape
    part = max(1, _MOST_ELEMENTS // inputs // 64) * 64
    if outputs <= part:
        return cycle(weights)
    starts = range(0, outputs - part + 1, part)
    return cycle([weight[start : start + part] for start in starts for weight in weights])
