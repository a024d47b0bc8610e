"""How products are cut for the kernels of packed/wide.cuh."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plugins_trt.contract import ceil_div, round_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MAX_SHARES = 8
"""Of the inputs: thread blocks of a cluster, or what `reduce` adds up."""

MAX_ROWS = 64
"""Of x."""

_WIDEST = 16  # tiles of a thread block


@dataclass(frozen=True)
class Wide:
    """A kernel: what its thread blocks take, in its macro's order."""

    rows: int
    warpgroups: int
    stages: int

    @property
    def threads(self) -> int:
        """Threads of a thread block: warpgroups, and a warp that copies."""
        return 128 * self.warpgroups + 32

    @property
    def tiles(self) -> int:
        """Tiles of a thread block."""
        return 4 * self.warpgroups

    @property
    def name(self) -> str:
        """In the kernel's name."""
        return f"n{self.rows}_m{self.warpgroups}"

    def shared_bytes(self, inputs: int, units: int, scale_bytes: int) -> int:
        """Dynamic shared memory: the ring.

        Args:
            inputs: Of a round.
            units: Of a round, of 512 bytes of a tile.
            scale_bytes: Of a tile and a round, at most.
        """
        stage = 2 * inputs * self.rows + self.tiles * (512 * units + scale_bytes)
        return self.stages * round_up(stage, 1024)


@dataclass(frozen=True)
class Cut:
    """How a product is cut: the kernel, its thread blocks along the outputs, and the shares of the inputs."""

    kind: Wide
    blocks: int
    shares: int
    in_clusters: bool
    """Whether a cluster's thread blocks add the shares up; else another launch does, from the workspace."""

    @property
    def cluster(self) -> int:
        """Thread blocks of a cluster."""
        return self.shares if self.in_clusters else 1

    @property
    def is_added_up_after(self) -> bool:
        """Whether another launch adds the shares up."""
        return self.shares > self.cluster


_START = 5.3
_JOIN = 0.3
_REDUCE = 0.7
"""In rounds of 16 tiles and 64 rows, as measured on an H200: of a thread block; of each share of the inputs where a cluster
adds them up and where another launch does."""


def most_shares(tiles: int, rounds: int, multiprocessors: int) -> int:
    """Shares of the inputs that products of some rows are cut into at most, where another launch adds them up."""
    return max(1, min(MAX_SHARES, multiprocessors // ceil_div(tiles, _WIDEST), rounds // 2))


def cut_of(
    kinds: Iterable[Wide], tiles: int, rounds: int, multiprocessors: int, clusters: Callable[[Wide, int], int]
) -> Cut | None:
    """The cut that takes the least time, by the rounds of the thread blocks that run longest.

    Args:
        kinds: The kernels that take the product.
        tiles: Of the outputs.
        rounds: Of the inputs.
        multiprocessors: Of the device; a thread block takes one.
        clusters: How many clusters of so many thread blocks of a kind run at the same time.
    """

    def time(cut: Cut) -> float:
        at_once = multiprocessors // cut.shares
        if cut.in_clusters:
            at_once = max(1, min(at_once, clusters(cut.kind, cut.shares)))
        each = ceil_div(rounds, cut.shares) * cut.kind.tiles / _WIDEST
        end = 0.0 if cut.shares == 1 else (_JOIN if cut.in_clusters else _REDUCE) * cut.shares
        # Rounds of fewer rows take less time, the rest does not.
        longer = math.sqrt(MAX_ROWS / cut.kind.rows)
        return ceil_div(cut.blocks, at_once) * (_START * longer + each) + end * longer

    most = min(MAX_SHARES, rounds)
    cuts = []
    for kind in kinds:
        blocks = ceil_div(tiles, kind.tiles)
        for shares in range(1, most + 1):
            if shares == 1 or clusters(kind, shares) > 0:
                cuts.append(Cut(kind, blocks, shares, in_clusters=shares > 1))
            if 1 < shares <= min(most_shares(tiles, rounds, multiprocessors), multiprocessors // blocks):
                cuts.append(Cut(kind, blocks, shares, in_clusters=False))
    return min(cuts, key=time, default=None)


class Chooser:
    """The cuts of products of one dtype on one device, by the clusters that it runs at the same time."""

    def __init__(
        self, kinds: Iterable[Wide], multiprocessors: int, at_once: Callable[[Wide, int], int]
    ) -> None:
        """Keeps what it is told.

        Args:
            kinds: All kernels.
            multiprocessors: Of the device.
            at_once: Asks how many clusters of so many thread blocks of a kind run at the same time.
        """
        self._kinds = tuple(kinds)
        self._multiprocessors = multiprocessors
        self._ask = at_once
        self._at_once: dict[tuple[Wide, int], int] = {}
        self._cuts: dict[tuple[int, int, int], Cut | None] = {}

    def __call__(self, rows: int, tiles: int, rounds: int) -> Cut | None:
        """The cut of a product, None where no kernel takes it."""
        enough = [kind for kind in self._kinds if rows <= kind.rows]
        fitting = [kind for kind in enough if kind.rows == min(each.rows for each in enough)]
        if not fitting:
            return None
        key = fitting[0].rows, tiles, rounds
        if key not in self._cuts:
            self._cuts[key] = cut_of(fitting, tiles, rounds, self._multiprocessors, self._clusters)
        return self._cuts[key]

    def _clusters(self, kind: Wide, size: int) -> int:
        if (kind, size) not in self._at_once:
            self._at_once[kind, size] = self._ask(kind, size)
        return self._at_once[kind, size]
