"""Launches `w4a16_linear` on raw pointers: one kernel and, with shares of the inputs and no clusters, one to add them up."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from plugins_trt.contract import KERNEL_DTYPES, ceil_div
from plugins_trt.packed.cut import Chooser, Cut, Wide
from plugins_trt.packed.tiles import TILE
from plugins_trt.packed.wide import arguments_format, has_kernel, maps_of
from plugins_trt.w4a16_linear.contract import FEW_ROWS, LinearPlan, tiles_of_block
from plugins_trt.w4a16_linear.layout import GROUPS, STEP

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugins_trt.w4a16_linear.contract import W4A16Linear

_FORMAT = "PPPPPPPqiiiiiiii"
_WIDE_FORMAT = arguments_format(_FORMAT, struct.calcsize(_FORMAT))
_REDUCERS = 128
_OF_A_REDUCER = 4  # outputs
_FEW_WARPS = 8
_FEW_TILES = 4
"""Tiles of a multiprocessor: for more, thread blocks share x or, of one row, two of them are there at a time."""
_LONG_STEPS = 128
"""Steps of the inputs from which on a second thread block on a multiprocessor, by chance, costs more than an early start gains."""


@dataclass(frozen=True)
class Few:
    """A kernel of few.cu: what its warps take, in its macro's order."""

    rows: int
    tiles: int
    stages: int
    shares: int = 1  # of the inputs, which the thread blocks of a cluster take in a single turn

    @property
    def name(self) -> str:
        """The end of the kernel's name."""
        shares = f"_x{self.shares}" if self.shares > 1 else ""
        return f"n{self.rows}_t{self.tiles}_s{self.stages}{shares}"

    def shared_bytes(self, group: int) -> int:
        """Dynamic shared memory: rings and sums, of a single turn one after the other."""
        stage = self.tiles * 1024 + self.tiles * 64 * (128 // group) + self.rows * 256
        rings, sums = self.stages * stage, self.rows * (self.tiles * TILE + 4) * 4
        return _FEW_WARPS * (max(rings, sums) if self.shares > 1 else rings + sums)


@dataclass(frozen=True)
class Many:
    """A kernel of many.cu: what its warps take, in its macro's order."""

    rows: int
    along_outputs: int
    along_inputs: int
    steps: int
    stages: int

    @property
    def threads(self) -> int:
        """Threads of a thread block."""
        return 32 * self.along_outputs * self.along_inputs

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the ring."""
        inputs = STEP * self.steps * self.along_inputs
        words = self.along_outputs * self.along_inputs * 2 * self.steps * (512 + 64)
        return self.stages * (self.rows * inputs * 2 + words)


FEW = (
    Few(1, 2, 6),
    Few(1, 2, 5),
    Few(1, 3, 3),
    Few(1, 4, 3),
    Few(8, 2, 3),
    Few(8, 2, 2),
    Few(16, 3, 2),
    Few(16, 2, 2),
    Few(16, 1, 2),
)
FEW_IN_SHARES = Few(16, 4, 2, 2)
"""Of many inputs, where reading x costs more than the weights; for outputs that are not gated."""
MANY = (Many(8, 4, 2, 2, 4), Many(16, 4, 2, 2, 3), Many(32, 8, 1, 2, 3), Many(64, 8, 1, 2, 2))


WIDE = (
    Wide(16, 4, 6),
    Wide(16, 3, 7),
    Wide(16, 2, 9),
    Wide(32, 4, 6),
    Wide(32, 3, 5),
    Wide(32, 2, 7),
    Wide(64, 4, 5),
    Wide(64, 3, 4),
    Wide(64, 2, 5),
)
_WIDE_UNITS = 2  # of a round
_WIDE_ROWS, _WIDE_TILES = 9, 8
"""Warpgroups pay from so many rows on; of up to 16, for more tiles a multiprocessor than these."""


def wide_bytes(kind: Wide, group: int) -> int:
    """Shared memory of a kernel of packed/wide.cuh."""
    return kind.shared_bytes(_WIDE_UNITS * STEP, _WIDE_UNITS, _WIDE_UNITS * STEP // group * 64)


class W4A16Multiplier:
    """The kernels of one dtype on one device."""

    def __init__(
        self, function: Callable[[str, int], Any], *, multiprocessors: int, shared_bytes: int, dtype: str
    ) -> None:
        """Finds the kernels with `function` (see `registry.Kernels.operator`).

        Args:
            function: the finder.
            multiprocessors: of the device.
            shared_bytes: shared memory that one block may ask for, nearly all that a multiprocessor has.
            dtype: "float16" or "bfloat16".
        """
        self.multiprocessors = multiprocessors
        suffix = KERNEL_DTYPES[dtype]
        self._shared = shared_bytes

        def find(name: str, shared: int) -> Any:  # noqa: ANN401 -- a kernel
            return function(name, shared).prepare(_FORMAT, overlaps=True, beside_others=True)

        self._few: dict[tuple[Few, bool, int], Any] = {}
        self._many, self._wide, self._reduce = {}, {}, {}
        has_wide = has_kernel(function, f"w4a16_wide_{suffix}_{WIDE[0].name}_g128")
        for group in GROUPS:
            for gated in (False, True):
                name = "w4a16_gated" if gated else "w4a16"
                for few in FEW:
                    if few.shared_bytes(group) <= shared_bytes:
                        kernel = find(f"{name}_few_{suffix}_{few.name}_g{group}", few.shared_bytes(group))
                        self._few[few, gated, group] = kernel
                for many in MANY:
                    kernel = find(f"{name}_many_{suffix}_n{many.rows}_g{group}", many.shared_bytes)
                    self._many[many, gated, group] = kernel
            for wide in WIDE if has_wide else ():
                for at_once in (False, True):
                    # (Of float16 the exact kernels are as fast.)
                    end = "_at_once" if at_once and dtype == "bfloat16" else ""
                    kernel = function(
                        f"w4a16_wide_{suffix}_{wide.name}_g{group}{end}", wide_bytes(wide, group)
                    )
                    self._wide[wide, group, at_once] = kernel.prepare(
                        _WIDE_FORMAT, overlaps=True, beside_others=True, aligned=True
                    )
        for gated in (False, True):
            self._reduce[gated] = find(f"{'w4a16_gated' if gated else 'w4a16'}_reduce_{suffix}", 0)
        self._has_clusters = has_kernel(function, "w4a16_in_clusters") and self._reduce[False].overlaps
        self._few_clusters = self._find_few_in_shares(find, suffix) if self._has_clusters else {}
        self._cut = {
            group: Chooser(WIDE if has_wide else (), multiprocessors, partial(self._at_once, group))
            for group in GROUPS
        }

    def _find_few_in_shares(self, find: Callable[[str, int], Any], suffix: str) -> dict[int, int]:
        """Finds the kernels of clusters that share inputs out; how many clusters run at the same time, by the group."""
        kind, at_once = FEW_IN_SHARES, {}
        for group in GROUPS:
            shared = kind.shared_bytes(group)
            if shared <= self._shared:
                kernel = find(f"w4a16_few_{suffix}_{kind.name}_g{group}", shared)
                self._few[kind, False, group] = kernel
                at_once[group] = kernel.clusters_at_once(32 * _FEW_WARPS, shared, kind.shares)
        return at_once

    def __call__(self, args: W4A16Linear, stream: Any = None) -> None:  # noqa: ANN401 -- PyCUDA is untyped
        """Enqueues one product.

        Raises:
            LaunchError: naming the argument, before anything runs.
        """
        plan = args.plan(self.multiprocessors)
        gated, group = args.gated, args.group
        few = self.few_of(args)
        wide = self.wide_of(args) if few is None else None
        if few is not None:
            kind, blocks, unit = few
            grid, threads, shared = (blocks, kind.shares, 1), 32 * _FEW_WARPS, kind.shared_bytes(args.group)
            packed = pack(args, LinearPlan(kind.shares, 0), unit=unit, in_clusters=True)
            _launch(self._few[kind, gated, group], grid, threads, stream, packed, shared, kind.shares)
        elif wide is not None:
            self._launch_wide(args, wide, stream)
        else:
            many = next(each for each in MANY if args.rows <= each.rows)
            shares = plan.splits if self._has_clusters else 1
            packed = pack(args, plan, in_clusters=shares > 1)
            grid = (self.ranges_of(args, plan), plan.splits, 1)
            _launch(
                self._many[many, gated, group], grid, many.threads, stream, packed, many.shared_bytes, shares
            )
            if plan.splits > shares:
                self._add_up(args, packed, stream)

    def wide_of(self, args: W4A16Linear) -> Cut | None:
        """How a product is cut for the kernels of packed/wide.cuh, where they take it."""
        tiles = args.tiles.shape[0]
        if not self._wide or not self._has_clusters or args.rows < _WIDE_ROWS:
            return None
        if args.rows <= FEW_ROWS and tiles <= _WIDE_TILES * self.multiprocessors:
            return None
        rounds = ceil_div(args.inputs // STEP, _WIDE_UNITS)
        return self._cut[args.group](args.rows, tiles, rounds)

    def _at_once(self, group: int, kind: Wide, size: int) -> int:
        """Clusters of so many thread blocks that run at the same time."""
        found: int = self._wide[kind, group, False].clusters_at_once(
            kind.threads, wide_bytes(kind, group), size
        )
        return found

    def _launch_wide(self, args: W4A16Linear, cut: Cut, stream: Any) -> None:  # noqa: ANN401
        kind = cut.kind
        boxes = (_WIDE_UNITS, _WIDE_UNITS * STEP // args.group)
        maps = maps_of(kind, (args.x, args.row_stride), (args.tiles, args.groups), boxes)
        packed = pack(args, LinearPlan(cut.shares, 0), in_clusters=cut.in_clusters)
        _launch(
            self._wide[kind, args.group, args.symmetric],
            (cut.blocks, cut.shares, 1),
            kind.threads,
            stream,
            (*maps, *packed),
            wide_bytes(kind, args.group),
            cut.cluster,
        )
        if cut.is_added_up_after:
            self._add_up(args, packed, stream)

    def _add_up(self, args: W4A16Linear, packed: tuple[int, ...], stream: Any) -> None:  # noqa: ANN401
        """Enqueues the sum of the shares of the inputs that lie in the workspace."""
        grid = (ceil_div(args.out.shape[1], _OF_A_REDUCER * _REDUCERS), args.rows, 1)
        _launch(self._reduce[args.gated], grid, _REDUCERS, stream, packed, 0)

    def few_of(self, args: W4A16Linear) -> tuple[Few, int, int] | None:
        """The kernel of few.cu that takes a product, its thread blocks, and the tiles that one takes together."""
        tiles, rows = args.tiles.shape[0], args.rows
        each = ceil_div(tiles, self.multiprocessors)
        many = each > _FEW_TILES
        if rows > FEW_ROWS or (many and rows > 1):
            return None
        # One turn for all tiles; a ring of six stages leaves no room for a second thread block of its kind.
        stages = 6 if args.inputs // STEP >= _LONG_STEPS else 5
        wanted = (each, stages) if each <= 2 else (each, 3)
        fitting = [kind for kind in FEW if kind.rows >= rows and self._fits(kind, args)]
        fitting = [kind for kind in fitting if kind.rows == min(other.rows for other in fitting)]
        if not fitting or fitting[0].rows > FEW_ROWS:
            return None
        if fitting[0].rows == FEW_IN_SHARES.rows and self._shares_inputs(args):
            return FEW_IN_SHARES, ceil_div(tiles, FEW_IN_SHARES.tiles), FEW_IN_SHARES.tiles
        if many and self._fits(FEW[3], args):
            # Two thread blocks a multiprocessor leave no room for those of the next launch, and hide more.
            return FEW[3], min(2 * self.multiprocessors, ceil_div(tiles, FEW[3].tiles)), FEW[3].tiles
        kind = min(
            fitting, key=lambda kind: (abs(kind.tiles - max(2, wanted[0])), abs(kind.stages - wanted[1]))
        )
        return kind, min(tiles, self.multiprocessors), 1

    def ranges_of(self, args: W4A16Linear, plan: LinearPlan) -> int:
        """Thread blocks, or clusters of them, that share the tiles out: as many rounds of all multiprocessors as it takes."""
        tiles, most = args.tiles.shape[0], tiles_of_block(args.rows)
        if plan.splits > 1:
            return ceil_div(tiles, most)
        return min(ceil_div(tiles, most * self.multiprocessors) * self.multiprocessors, tiles)

    def _shares_inputs(self, args: W4A16Linear) -> bool:
        """Whether clusters that share inputs out take a product: of many, and few outputs but enough for the device."""
        tiles, kind = args.tiles.shape[0], FEW_IN_SHARES
        clusters = ceil_div(tiles, kind.tiles)
        if args.gated or args.inputs // STEP < _LONG_STEPS or tiles <= self.multiprocessors:
            return False
        return kind.shares * clusters <= self.multiprocessors and clusters <= self._few_clusters.get(
            args.group, 0
        )

    def _fits(self, kind: Few, args: W4A16Linear) -> bool:
        return kind.shared_bytes(args.group) <= self._shared


def _launch(  # noqa: PLR0917 -- as the launch has them
    kernel: Any,  # noqa: ANN401
    grid: tuple[int, int, int],
    threads: int,
    stream: Any,  # noqa: ANN401 -- PyCUDA is untyped
    packed: tuple[int | bytes, ...],
    shared_bytes: int,
    shares: int = 1,
) -> None:
    """Enqueues a kernel, the shares of the inputs in clusters."""
    kernel.prepared_async_call(
        grid, (threads, 1, 1), stream, *packed, shared_size=shared_bytes, cluster=(1, shares, 1)
    )


def pack(args: W4A16Linear, plan: LinearPlan, *, unit: int = 1, in_clusters: bool = False) -> tuple[int, ...]:
    """The kernels' `Linear` struct, in the order of `_FORMAT`; clusters that add up shares have no workspace."""
    return (
        *args.pointers(args.groups, in_clusters=in_clusters),
        args.row_stride,
        args.rows,
        args.inputs // STEP,
        args.tiles.shape[0],
        args.out.shape[1],
        (args.group // STEP).bit_length() - 1,
        plan.splits,
        unit,
        int(args.gated),
    )
