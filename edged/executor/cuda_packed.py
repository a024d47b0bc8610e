"""Packed weights on a GPU: from a checkpoint's one form into the layouts that the kernels read, some megabytes at a time.

A piece goes through page-locked memory to the device, which turns it over and puts each word into its final place. So no
weight is held twice, neither here nor there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from edged.models.cuda_weights import GROUPS, cuda_packed
from edged.models.quantization import TERNARY_WORD_WEIGHTS, WORD_WEIGHTS
from plugins_trt.ternary_linear.layout import blocks_of
from plugins_trt.w4a16_linear.layout import STEP

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from edged.checkpoint.packed import PackedModule
    from edged.executor.cuda_device import Device, Words
    from edged.memory.buffers import ModelPlan
    from edged.models.checkpoint import PackedLinear
    from edged.models.cuda_weights import CudaPacked

_STAGED = 1 << 20
"""Words of a piece that page-locked memory is made for."""
_WIDENED = 1 << 17
"""Words that are widened at a time."""
_TILE_WORDS, _LANE_WORDS = 128, 4
_SYMMETRIC = 8
"""Zero point of numbers of four bits that reach as far below 0 as above."""


@dataclass
class PackedTensors:
    """A weight as the kernels read it.

    Attributes:
        symmetric: Whether every zero point of a 4-bit weight is 8, as far as it has been loaded.
    """

    form: CudaPacked
    tiles: torch.Tensor  # int32 [tiles, K / 64, 32, 4], ternary [tiles, blocks, 32, 4]
    groups: torch.Tensor  # int32 [tiles, K / G, 8, 2], ternary [tiles, blocks, 8, 128 / G]
    symmetric: bool | None = None


def packed_tensors(plan: ModelPlan, buffers: Mapping[str, torch.Tensor]) -> dict[str, PackedTensors]:
    """Every packed weight of a model, by name."""
    return tensors_of(cuda_packed(plan.architecture), buffers)


def tensors_of(forms: Iterable[CudaPacked], buffers: Mapping[str, torch.Tensor]) -> dict[str, PackedTensors]:
    """Packed weights in their buffers, by name."""
    return {form.name: PackedTensors(form, buffers[form.name], buffers[form.name + GROUPS]) for form in forms}


class PackedLoader:
    """Puts the packed modules of a checkpoint into the device's buffers.

    Args:
        packed: The weights that stay packed, by name.
        buffers: The buffers of all weights.
        device: Where they are.
    """

    def __init__(
        self, packed: Mapping[str, PackedTensors], buffers: Mapping[str, torch.Tensor], device: Device
    ) -> None:
        self._packed = packed
        self._buffers = buffers
        self._device = device
        self._staging: Words = device.host_words(_STAGED if self._packed else 0)

    def __call__(self, linear: PackedLinear, module: PackedModule) -> None:
        """Read a module to its end; the device may still be busy with it then."""
        weight = self._packed.get(linear.weight)
        if weight is None:
            self._widen(linear, module, self._buffers[linear.weight])
            return
        rows = _Rows(weight.form, linear.start, self._device.torch_device)
        if weight.form.ternary:
            _store_scales(weight.groups, rows, module)
        else:
            assert module.zeros is not None  # noqa: S101 - 4-bit modules have them
            weight.symmetric = weight.symmetric is not False and bool((module.zeros == _SYMMETRIC).all())
            _store_groups(weight.groups, rows, module)
        for output, word, tile in module.tiles:
            places = rows.places(
                output, len(tile), weight.tiles[0].numel(), lane=4 * _LANE_WORDS, half=_LANE_WORDS // 2
            )
            if weight.form.ternary:
                assert word == 0, "ternary outputs come whole"  # noqa: S101
                words = ternary_words(self._bring(tile))
                columns = _ternary_columns(weight.tiles.shape[1], words.device)
            else:
                assert word % 4 == tile.shape[1] % 4 == 0, "a lane's pairs come together"  # noqa: S101
                words = lane_words(self._bring(tile))
                columns = _columns(word, tile.shape[1], words.device)
            _scatter(weight.tiles, places, columns, words)

    def _widen(self, linear: PackedLinear, module: PackedModule, target: torch.Tensor) -> None:
        """A module whose weight is not packed here: ``scale * (q - zero)``, rounded once."""
        device = target.device
        scales = torch.from_numpy(module.scales).to(device).float()  # [N, K/G]
        zeros = None if module.zeros is None else torch.from_numpy(module.zeros).to(device).float()
        of_word = TERNARY_WORD_WEIGHTS if zeros is None else WORD_WEIGHTS
        bits = 32 // of_word
        shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=device)
        for output, word, tile in module.tiles:
            columns = slice(of_word * word, of_word * (word + tile.shape[1]))
            groups = torch.arange(columns.start, columns.stop, device=device) // linear.shape.group
            step = max(1, _WIDENED // tile.shape[1])
            for start in range(0, len(tile), step):
                piece = self._bring(tile[start : start + step])  # [n, words]
                wide = ((piece[..., None] >> shifts) & ((1 << bits) - 1)).flatten(1).float()  # [n, columns]
                here = slice(output + start, output + start + len(piece))
                wide -= 1.0 if zeros is None else zeros[here][:, groups]
                wide *= scales[here][:, groups]
                target[linear.start + here.start : linear.start + here.stop, columns].copy_(wide)

    def _bring(self, words: np.ndarray) -> torch.Tensor:
        """A piece on the device, int32 of the same shape."""
        if len(self._staging) < words.size:
            self._staging = self._device.host_words(words.size)
        # While a piece is read from the file, the device is busy with the one before; by now that has arrived.
        self._device.synchronize()
        staged = self._staging[: words.size]
        staged.reshape(words.shape)[:] = words.view(np.int32)
        target = torch.empty(words.shape, dtype=torch.int32, device=self._device.torch_device)
        self._device.upload(target.view(-1), staged)
        return target


class _Rows:
    """Where the outputs of a module lie in the tiles of its weight."""

    def __init__(self, form: CudaPacked, start: int, device: torch.device) -> None:
        self._form, self._start, self._device = form, start, device

    def places(self, first: int, count: int, tile: int, *, lane: int, half: int) -> torch.Tensor:
        """The first place of each of ``count`` outputs, int64 ``[count]``.

        Args:
            first: The first one in the module.
            count: How many.
            tile: Places from a tile to the next.
            lane: Places from an output of a half of a tile to the next.
            half: Places from a half to the other.
        """
        start = self._start + first
        rows = torch.arange(start, start + count, device=self._device)
        if self._form.gated:
            outputs = self._form.outputs // 2
            upper = rows // outputs
            rows = rows % outputs
            tiles = rows // 8
        else:
            upper = rows // 8 % 2
            tiles = rows // 16
        return tiles * tile + rows % 8 * lane + upper * half


def lane_words(words: torch.Tensor) -> torch.Tensor:
    """Rows of words of eight numbers in order, int32 ``[n, m]``, as tiles have them: of four words, four with a lane's pairs.

    Lane t has numbers 2 t and 2 t + 1 of each of the four words, the even ones in its lower half.
    """
    four = words.view(len(words), -1, 4)
    turned = torch.zeros_like(four)
    for lane in range(4):
        for pair in range(4):
            numbers = four[..., pair] >> (8 * lane)
            turned[..., lane] |= ((numbers & 15) << (4 * pair)) | (((numbers >> 4) & 15) << (4 * pair + 16))
    return turned.view_as(words)


def ternary_words(words: torch.Tensor) -> torch.Tensor:
    """Rows of words of sixteen codes in order, int32 ``[n, K / 16]``, as tiles have them: ``[n, 8 blocks]``.

    Of a block of 128 inputs, by halves q and lanes t: codes 2 t and 2 t + 1 of each eight, the first eight's highest.
    """
    blocks = blocks_of(words.shape[1] * TERNARY_WORD_WEIGHTS)
    # A code's bits are turned from 0, 1, 2 for -1, 0, +1 into 3, 0, 1: sign, and whether it is not 0.
    low, high = words & 0x55555555, (words >> 1) & 0x55555555
    turned = (low ^ 0x55555555) | (((low | high) ^ 0x55555555) << 1)
    whole = torch.zeros((len(words), 8 * blocks), dtype=torch.int32, device=words.device)
    whole[:, : words.shape[1]] = turned
    four = whole.view(len(words), -1, 4)  # [n, 2 blocks, 4]: eight eights each
    result = torch.zeros_like(four)
    for lane in range(4):
        for eight in range(8):
            two = four[..., eight // 2] >> (16 * (eight % 2) + 4 * lane)
            result[..., lane] |= ((two & 3) << (14 - 2 * eight)) | (((two >> 2) & 3) << (30 - 2 * eight))
    return result.view(len(words), -1)


def _columns(word: int, count: int, device: torch.device) -> torch.Tensor:
    """Where the words of a lane lie in an output's part of a tile, from ``word`` on: int64 ``[count]``."""
    words = torch.arange(word, word + count, device=device)
    step = STEP // WORD_WEIGHTS
    return words // step * _TILE_WORDS + words % 4 * _LANE_WORDS + words % step // 4


def _ternary_columns(blocks: int, device: torch.device) -> torch.Tensor:
    """The same of :func:`ternary_words`: by block, q and t."""
    words = torch.arange(8 * blocks, device=device)
    return words // 8 * _TILE_WORDS + words % 4 * _LANE_WORDS + words % 8 // 4


def _store_groups(target: torch.Tensor, rows: _Rows, module: PackedModule) -> None:
    """Scale and zero point of each output and group in a word; a group of the file may be several of the kernels'."""
    assert module.zeros is not None  # noqa: S101 - 4-bit modules have them
    words = module.scales.view(np.uint16).astype(np.uint32)
    words |= module.zeros.astype(np.uint32) << np.uint32(16)
    groups = target.shape[1]
    words = np.repeat(words, groups // words.shape[1], axis=1).view(np.int32)  # [N, groups]
    columns = torch.arange(groups, device=target.device) * (8 * 2)
    _store_rows(target, rows, words, columns, lane=2, half=1)


def _store_scales(target: torch.Tensor, rows: _Rows, module: PackedModule) -> None:
    """The scales of a ternary module: 16 bits each, of outputs g and g + 8 in one word."""
    _, blocks, _, count = target.shape
    words = module.scales.view(np.int16)
    if words.shape[1] > 1:
        # A group of several blocks has its scale in each; what fills the last block up stays 0.
        words = np.repeat(words, max(1, blocks * count // words.shape[1]), axis=1)
    places = torch.arange(words.shape[1], device=target.device)
    columns = places // count * (8 * count * 2) + places % count * 2
    _store_rows(target.view(torch.int16), rows, words, columns, lane=2 * count, half=1)


def _store_rows(
    target: torch.Tensor, rows: _Rows, words: np.ndarray, columns: torch.Tensor, *, lane: int, half: int
) -> None:
    """Put ``words`` ``[N, m]``, of all outputs of a module, into their places, some of them at a time."""
    step = max(1, _STAGED // words.shape[1])
    for first in range(0, len(words), step):
        piece = torch.from_numpy(words[first : first + step]).to(target.device)
        places = rows.places(first, len(piece), target[0].numel(), lane=lane, half=half)
        _scatter(target, places, columns, piece)


def _scatter(target: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, words: torch.Tensor) -> None:
    """Put ``words`` ``[n, m]`` where ``rows[i] + columns[j]`` says."""
    target.view(-1)[rows[:, None] + columns[None, :]] = words
