"""KV pages of the TensorRT executor on their way to and from host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.memory.buffers import step_buffers
from edged.memory.specs import COMPRESSED_KEYS, KV_PAGES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from edged.executor.base import ByteArray, Int32Array
    from edged.executor.tensorrt_device import Device
    from edged.memory.buffers import ModelPlan


class DevicePages:
    """Sees a model's buffers page by page.

    Args:
        plan: The model's plan.
        pointers: Addresses of its buffers, by name.
        device: Where they are.
    """

    def __init__(self, plan: ModelPlan, pointers: Mapping[str, int], device: Device) -> None:
        self._device = device
        self._layers, self._pages = plan.architecture.layers, plan.pages
        self._parts: list[tuple[int, int]] = []
        """Address of each buffer ``[layers, pages, ...]``, and bytes of a page of a layer in it."""
        for spec in step_buffers(plan):
            # Compressed keys that nobody reads share one place, which belongs to no page.
            if spec.row in (KV_PAGES, COMPRESSED_KEYS) and spec.shape[:2] == (self._layers, self._pages):
                self._parts.append((pointers[spec.name], spec.nbytes // (self._layers * self._pages)))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers and buffers."""
        return sum(size * self._layers for _, size in self._parts)

    def read(self, pages: Int32Array, out: ByteArray) -> None:
        """Copy ``pages`` to ``out``, uint8 [n, page_bytes]."""
        for row, page in zip(out, pages.tolist(), strict=True):
            for start, size, pointer in self._parts_of(page):
                self._device.fetch(row[start : start + size], pointer)

    def write(self, pages: Int32Array, data: ByteArray) -> None:
        """Copy ``data``, uint8 [n, page_bytes], into ``pages``."""
        for row, page in zip(data, pages.tolist(), strict=True):
            for start, size, pointer in self._parts_of(page):
                self._device.store(pointer, row[start : start + size])

    def _parts_of(self, page: int) -> Iterator[tuple[int, int, int]]:
        """Of one page: where each part lies in a row on the host, its bytes, and its address."""
        start = 0
        for first, size in self._parts:
            for layer in range(self._layers):
                yield start, size, first + (layer * self._pages + page) * size
                start += size
