"""Launches of products with 4-bit weights: the kernel that is chosen fits the device and the product."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins_trt.contract import DeviceArray
from plugins_trt.packed import wide as packed_wide
from plugins_trt.registry import KernelsError
from plugins_trt.tensor_map import MAP_BYTES
from plugins_trt.w4a16_linear.contract import LinearPlan, W4A16Linear, tiles_of_block
from plugins_trt.w4a16_linear.launch import WIDE, W4A16Multiplier


class Launches:
    """What a multiplier launched, on a device of a number of multiprocessors and so much shared memory."""

    def __init__(self, shared_bytes: int, multiprocessors: int, *, clusters: bool = False) -> None:
        self.launched: list[SimpleNamespace] = []
        self._clusters, self._shared_bytes, self._multiprocessors = clusters, shared_bytes, multiprocessors
        self.multiply = W4A16Multiplier(
            self.find, multiprocessors=multiprocessors, shared_bytes=shared_bytes, dtype="bfloat16"
        )

    def find(self, name: str, shared_bytes: int) -> SimpleNamespace:
        """As `registry.Kernels.operator` does."""
        has_warpgroups = self._clusters and self._shared_bytes > 200 << 10
        if (name == "w4a16_in_clusters" and not self._clusters) or ("_wide_" in name and not has_warpgroups):
            raise KernelsError(name)
        kernel = SimpleNamespace(overlaps=self._clusters)
        kernel.clusters_at_once = lambda _threads, _shared, size: (
            self._multiprocessors * 7 // 8 // size if size > 1 else self._multiprocessors
        )
        kernel.prepare = lambda layout, **_: kernel

        def launch(grid, block, stream, *arguments, shared_size=0, cluster=(1, 1, 1)):
            assert shared_size <= self._shared_bytes
            self.launched.append(
                SimpleNamespace(
                    name=name,
                    grid=grid,
                    threads=block[0],
                    arguments=arguments,
                    cluster=cluster,
                    shared=shared_size,
                )
            )

        kernel.prepared_async_call = launch
        return kernel


def encoded_boxes(patch):
    """The bytes of the boxes of every tensor map that is asked for, which must be such as the driver takes."""
    found = []

    def encode(pointer, dtype, shape, strides, box, *, swizzled=False):
        bytes_each = {"bfloat16": 2, "float16": 2, "int32": 4}[dtype]
        assert pointer % 16 == 0
        assert len(shape) == len(box) == len(strides) + 1
        assert all(stride % 16 == 0 and stride > 0 for stride in strides)
        assert all(1 <= size <= 256 for size in box)
        assert box[-1] * bytes_each % 16 == 0
        assert not swizzled or box[-1] * bytes_each == 128
        found.append(math.prod(box) * bytes_each)
        return bytes(MAP_BYTES)

    patch.setattr(packed_wide, "tensor_map", encode)
    return found


@given(
    rows=st.integers(1, 64), tiles=st.integers(1, 2500), steps=st.integers(1, 200), group=st.sampled_from([64, 128]),
    device=st.sampled_from([(101376, 128, False), (101376, 48, True), (166912, 16, False), (232448, 132, True)]),
)  # fmt: skip
@settings(deadline=None)
def test_every_product_finds_a_kernel_that_fits(rows, tiles, steps, group, device):
    steps *= group // 64
    shared_bytes, multiprocessors, clusters = device
    launches = Launches(shared_bytes, multiprocessors, clusters=clusters)

    def of(shape, dtype):
        return DeviceArray(pointer=4096, shape=shape, dtype=dtype, strides=None)

    plan = LinearPlan.of(rows=rows, outputs=16 * tiles, inputs=64 * steps, multiprocessors=multiprocessors)
    args = W4A16Linear(
        x=of((rows, 64 * steps), "bfloat16"),
        tiles=of((tiles, steps, 32, 4), "int32"),
        groups=of((tiles, 64 * steps // group, 8, 2), "int32"),
        out=of((rows, 16 * tiles), "bfloat16"),
        workspace=of((plan.workspace_bytes,), "uint8") if plan.workspace_bytes else None,
    )
    with pytest.MonkeyPatch.context() as patch:
        boxes = encoded_boxes(patch)
        launches.multiply(args)
    first = launches.launched[0]
    assert first.shared <= shared_bytes
    assert first.cluster in ((1, 1, 1), (1, first.grid[1], 1))
    assert first.cluster == (1, 1, 1) or clusters
    assert len(launches.launched) == (2 if first.grid[1] > first.cluster[1] else 1)
    if "_wide_" not in first.name:
        assert first.cluster == (1, first.grid[1] if clusters else 1, 1)
        assert first.grid[0] * first.grid[1] <= max(multiprocessors, first.grid[0])
    # No thread block has more tiles than its warps take.
    if "_many_" in first.name:
        assert first.grid[1] == plan.splits
        assert -(-tiles // first.grid[0]) <= tiles_of_block(rows)
    if "_wide_" in first.name:
        wide = next(kind for kind in WIDE if f"_{kind.name}_" in first.name)
        assert rows <= wide.rows
        assert -(-tiles // first.grid[0]) <= wide.tiles
        assert first.grid[1] <= min(8, -(-steps // 2))
        if len(launches.launched) == 2:
            assert 4 * 16 * first.grid[1] * rows * tiles <= plan.workspace_bytes
            assert first.grid[0] * first.grid[1] <= multiprocessors
        # What a round's copies bring finds room in a stage, and sums in the ring.
        assert 2 * boxes[0] + boxes[1] + boxes[2] <= first.shared // wide.stages
        assert wide.rows * (16 * wide.tiles + 4) * 4 <= first.shared
