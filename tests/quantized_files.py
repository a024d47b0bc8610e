"""Writes 4-bit linears into the published file formats, and widens them again by each format's definition.

Nothing here shares code with the product: files are made element by element from the definitions, and references are
computed from what stands in the files.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray[Any, Any]]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Integers:
    """A random 4-bit linear: ``q`` ``[K, N]``, ``zeros`` and ``scales`` ``[K/G, N]``, ``g_idx`` ``[K]``."""

    def __init__(
        self,
        random: np.random.Generator,
        outputs: int,
        inputs: int,
        group: int,
        *,
        symmetric: bool = False,
        act_order: bool = False,
        scale: float = 0.02,
    ) -> None:
        groups = inputs // group
        self.q = random.integers(0, 16, (inputs, outputs), np.uint32)
        self.zeros = random.integers(0, 16, (groups, outputs), np.uint32)
        if symmetric:
            self.zeros[:] = 8
        self.scales = (scale * (0.5 + random.random((groups, outputs)))).astype(np.float16)
        self.g_idx = (np.arange(inputs) // group).astype(np.int32)
        if act_order:
            self.g_idx = random.permutation(self.g_idx)

    def weight(self) -> np.ndarray[Any, Any]:
        """float64 ``[N, K]``."""
        zeros = self.zeros[self.g_idx].astype(np.float64)
        widened: np.ndarray[Any, Any] = (
            self.scales[self.g_idx].astype(np.float64) * (self.q.astype(np.float64) - zeros)
        ).T
        return widened


def pack(
    numbers: np.ndarray[Any, Any], axis: int, order: tuple[int, ...] = tuple(range(8))
) -> np.ndarray[Any, Any]:
    """Eight numbers along ``axis`` a word; bits 4j to 4j+3 hold number ``order[j]`` of the eight."""
    moved = np.moveaxis(numbers.astype(np.uint32), axis, -1)
    words = np.zeros((*moved.shape[:-1], moved.shape[-1] // 8), np.uint32)
    for j in range(8):
        words |= moved[..., order[j] :: 8] << np.uint32(4 * j)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32)


def gptq_tensors(module: str, linear: Integers, *, version: int = 1) -> Tensors:
    """AutoGPTQ's tensors; version 1 stores each zero point less one."""
    zeros = (linear.zeros - 1) & 15 if version == 1 else linear.zeros
    return {
        f"{module}.qweight": pack(linear.q, 0),
        f"{module}.qzeros": pack(zeros, 1),
        f"{module}.scales": linear.scales,
        f"{module}.g_idx": linear.g_idx,
    }


def awq_tensors(module: str, linear: Integers) -> Tensors:
    """AutoAWQ's tensors, layout gemm."""
    return {
        f"{module}.qweight": pack(linear.q, 1, AWQ_ORDER),
        f"{module}.qzeros": pack(linear.zeros, 1, AWQ_ORDER),
        f"{module}.scales": linear.scales,
    }


def marlin_tensors(module: str, linear: Integers) -> Tensors:
    """Marlin's tensors, number by number as the kernel's threads hold them."""
    inputs, outputs = linear.q.shape
    permutation = []
    for thread in range(32):
        rows = (2 * (thread % 4), 2 * (thread % 4) + 1, 2 * (thread % 4 + 4), 2 * (thread % 4 + 4) + 1)
        first = [16 * row + thread // 4 + 8 * block for block in (0, 1) for row in rows]
        for tile in range(4):
            permutation.extend(place + 256 * tile for place in first)
    permuted = np.array(permutation).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].ravel()
    tiles = linear.q.reshape(inputs // 16, 16, outputs // 16, 16).transpose(0, 2, 1, 3)
    numbers = tiles.reshape(-1, 1024)[:, permuted].reshape(inputs // 16, outputs * 16)
    groups = len(linear.scales)
    if groups == 1:
        run = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    else:
        run = [i + 8 * j for i in range(8) for j in range(8)]
    scales = linear.scales.reshape(-1, len(run))[:, run].reshape(linear.scales.shape)
    return {f"{module}.qweight": pack(numbers, 1), f"{module}.scales": np.ascontiguousarray(scales)}


def gptq_weight(tensors: Tensors, module: str, *, version: int = 1) -> np.ndarray[Any, Any]:
    """The definition: float64 ``[N, K]`` of what stands in the file."""
    qweight, qzeros = (tensors[f"{module}.{part}"].view(np.uint32) for part in ("qweight", "qzeros"))
    scales, g_idx = tensors[f"{module}.scales"].astype(np.float64), tensors[f"{module}.g_idx"]
    inputs, outputs = 8 * qweight.shape[0], qweight.shape[1]
    weight = np.empty((outputs, inputs))
    n = np.arange(outputs)
    for k in range(inputs):
        q = (qweight[k // 8] >> np.uint32(4 * (k % 8))) & 15
        zero = (qzeros[g_idx[k], n // 8] >> (4 * (n % 8)).astype(np.uint32)) & 15
        if version == 1:
            zero = (zero + 1) & 15
        weight[:, k] = scales[g_idx[k]] * (q.astype(np.float64) - zero.astype(np.float64))
    return weight


def awq_weight(tensors: Tensors, module: str) -> np.ndarray[Any, Any]:
    """The definition: float64 ``[N, K]`` of what stands in the file."""
    qweight, qzeros = (tensors[f"{module}.{part}"].view(np.uint32) for part in ("qweight", "qzeros"))
    scales = tensors[f"{module}.scales"].astype(np.float64)
    inputs, outputs = qweight.shape[0], 8 * qweight.shape[1]
    group = inputs // len(scales)
    weight = np.empty((outputs, inputs))
    for n in range(outputs):
        shift = np.uint32(4 * AWQ_ORDER.index(n % 8))
        q = ((qweight[:, n // 8] >> shift) & 15).astype(np.float64)
        zero = ((qzeros[:, n // 8] >> shift) & 15).astype(np.float64)
        g = np.arange(inputs) // group
        weight[n] = scales[g, n] * (q - zero[g])
    return weight
