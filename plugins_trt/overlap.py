"""Programmatic dependent launch (compute capability 9.0 and later), which PyCUDA cannot ask for.

A kernel launched this way may start while the one before it on the stream still runs; it waits for that one's writes
itself (`wait_for_dependencies` in common.cuh), so that its launch and its set-up cost nothing. Between kernels of a few
microseconds that is a third of the time. The driver is called through ctypes, with a module of its own.
"""

from __future__ import annotations

import ctypes
import struct
from functools import lru_cache
from typing import Any

_CLUSTER_DIMENSION = 4
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_PREFERRED_SHARED_MEMORY_CARVEOUT = 9
_PARAM_END, _PARAM_BUFFER_POINTER, _PARAM_BUFFER_SIZE = 0, 1, 2


class DriverError(RuntimeError):
    """The CUDA driver refused a call."""


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_uint * 3),
        ("rest", ctypes.c_char * 52),
    )


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise DriverError(f"{what}: {(text.value or b'unknown').decode()} (error {status})")


class Module:
    """An image loaded into the current context, for as long as the process runs."""

    def __init__(self, image: bytes) -> None:
        """Loads a cubin or PTX.

        Raises:
            DriverError: The driver does not take it.
        """
        self._handle = ctypes.c_void_p()
        _check(_driver().cuModuleLoadData(ctypes.byref(self._handle), image), "loading kernels")

    def function(self, name: str, shared_bytes: int) -> ctypes.c_void_p:
        """A kernel that may ask for `shared_bytes` of dynamic shared memory.

        Raises:
            DriverError: There is no such kernel, or not that much memory.
        """
        handle = ctypes.c_void_p()
        _check(_driver().cuModuleGetFunction(ctypes.byref(handle), self._handle, name.encode()), name)
        if shared_bytes:
            status = _driver().cuFuncSetAttribute(handle, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
            _check(status, f"{name}: {shared_bytes} bytes of shared memory")
        return handle


def prefer_shared_memory(function: ctypes.c_void_p) -> None:
    """Has a multiprocessor divide its memory so that the thread blocks of another launch find room beside the kernel's own.

    Left to itself, the driver leaves to L1 what the kernel's own thread blocks do not take.

    Raises:
        DriverError: The driver refused.
    """
    status = _driver().cuFuncSetAttribute(function, _PREFERRED_SHARED_MEMORY_CARVEOUT, 100)
    _check(status, "preferring shared memory")


_OVERLAP = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=(1, 0, 0))


@lru_cache(maxsize=16)
def _attributes(cluster: tuple[int, int, int]) -> Any:  # noqa: ANN401 -- an array of ctypes
    if cluster == (1, 1, 1):
        return (_Attribute * 1)(_OVERLAP)
    return (_Attribute * 2)(_OVERLAP, _Attribute(id=_CLUSTER_DIMENSION, value=cluster))


def launch(
    function: ctypes.c_void_p,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    stream: Any,  # noqa: ANN401 -- PyCUDA is untyped
    *,
    arguments: bytes,
    shared_bytes: int,
    cluster: tuple[int, int, int] = (1, 1, 1),
    aligned: bool = False,
) -> None:
    """Enqueues a kernel that may start before the one before it has ended.

    Args:
        function: The kernel.
        grid: Thread blocks.
        block: Threads of a block.
        stream: A PyCUDA stream, or None for the default one.
        arguments: As `pack` gives them.
        shared_bytes: Dynamic shared memory.
        cluster: Thread blocks that run together and read each other's shared memory; they divide `grid`.
        aligned: The kernel takes one struct, which is aligned to more than 16 bytes: the driver knows where to put it.

    Raises:
        DriverError: The driver refused the launch.
    """
    handle = 0 if stream is None else int(stream.handle)
    attributes = _attributes(cluster)
    config = _Config(
        (ctypes.c_uint * 3)(*grid),
        (ctypes.c_uint * 3)(*block),
        shared_bytes,
        handle or None,
        attributes,
        len(attributes),
    )
    buffer = ctypes.create_string_buffer(arguments, len(arguments))
    if aligned:
        struct_at = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        _check(
            _driver().cuLaunchKernelEx(ctypes.byref(config), function, struct_at, None), "launching a kernel"
        )
        return
    size = ctypes.c_size_t(len(arguments))
    extra = (ctypes.c_void_p * 5)(
        _PARAM_BUFFER_POINTER,
        ctypes.addressof(buffer),
        _PARAM_BUFFER_SIZE,
        ctypes.addressof(size),
        _PARAM_END,
    )
    _check(_driver().cuLaunchKernelEx(ctypes.byref(config), function, None, extra), "launching a kernel")


def clusters_at_once(function: ctypes.c_void_p, block: int, shared_bytes: int, size: int) -> int:
    """Clusters of `size` thread blocks of `block` threads that the device can run at the same time.

    Raises:
        DriverError: The driver does not say.
    """
    attributes = (_Attribute * 1)(_Attribute(id=_CLUSTER_DIMENSION, value=(1, size, 1)))
    config = _Config(
        (ctypes.c_uint * 3)(1, size, 1), (ctypes.c_uint * 3)(block, 1, 1), shared_bytes, None, attributes, 1
    )
    count = ctypes.c_int()
    status = _driver().cuOccupancyMaxActiveClusters(ctypes.byref(count), function, ctypes.byref(config))
    _check(status, "counting clusters")
    return count.value


def pack(layout: str, values: tuple[float | bytes, ...]) -> bytes:
    """Kernel arguments as the device expects them."""
    return struct.pack(layout, *values)
