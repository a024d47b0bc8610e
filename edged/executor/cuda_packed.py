"""4-bit weights on a GPU: from a checkpoint's one form into the layout that the kernels read, some megabytes at a time.

A piece goes through page-locked memory to the device, which turns it over and puts each word into its final place. So no
weight is held twice, neither here nor there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from edged.memory.cuda_weights import GROUPS, cuda_packed
from edged.models.quantization import WORD_WEIGHTS
from plugins_trt.w4a16_linear.layout import STEP

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edged.checkpoint.packed import PackedModule
    from edged.executor.cuda_device import Device, Words
    from edged.memory.buffers import ModelPlan
    from edged.memory.cuda_weights import CudaPacked
    from edged.models.checkpoint import PackedLinear

_STAGED = 1 << 20
"""Words of a piece that page-locked memory is made for."""
_WIDENED = 1 << 17
"""Words that are widened at a time."""
_TILE_WORDS = 128
_LANE_WORDS = 4


@dataclass(frozen=True)
class PackedTensors:
    """A weight as the kernels read it (:mod:`plugins_trt.w4a16_linear.layout`)."""

    form: CudaPacked
    tiles: torch.Tensor  # int32 [tiles, K / 64, 32, 4]
    groups: torch.Tensor  # int32 [tiles, K / G, 8, 2]


def packed_tensors(plan: ModelPlan, buffers: Mapping[str, torch.Tensor]) -> dict[str, PackedTensors]:
    """Every packed weight of a model, by name."""
    return {
        form.name: PackedTensors(form, buffers[form.name], buffers[form.name + GROUPS])
        for form in cuda_packed(plan.architecture)
    }


class PackedLoader:
    """Puts the 4-bit modules of a checkpoint into the device's buffers.

    Args:
        plan: The model's plan.
        buffers: The buffers of its weights.
        device: Where they are.
    """

    def __init__(self, plan: ModelPlan, buffers: Mapping[str, torch.Tensor], device: Device) -> None:
        self._packed = packed_tensors(plan, buffers)
        self._buffers = buffers
        self._device = device
        self._staging: Words = device.host_words(_STAGED)

    def __call__(self, linear: PackedLinear, module: PackedModule) -> None:
        """Read a module to its end; the device may still be busy with it then."""
        weight = self._packed.get(linear.weight)
        if weight is None:
            self._widen(linear, module, self._buffers[linear.weight])
            return
        groups, tiles = weight.groups, weight.tiles
        rows = _Rows(weight.form, linear.start, self._device.torch_device)
        words = _group_words(module, groups.shape[1])
        for first in range(0, len(words), _rows_of_a_piece(words.shape[1])):
            piece = words[first : first + _rows_of_a_piece(words.shape[1])]
            columns = torch.arange(piece.shape[1], device=groups.device) * (8 * 2)
            places = rows.places(first, len(piece), groups.shape[1] * 8 * 2, lane=2, half=1)
            _scatter(groups, places, columns, self._bring(piece))
        for output, word, tile in module.tiles:
            places = rows.places(
                output, len(tile), tiles.shape[1] * _TILE_WORDS, lane=4 * _LANE_WORDS, half=_LANE_WORDS // 2
            )
            columns = _columns(word, tile.shape[1], tiles.device)
            _scatter(tiles, places, columns, even_below_odd(self._bring(tile)))

    def _widen(self, linear: PackedLinear, module: PackedModule, target: torch.Tensor) -> None:
        """A module whose weight is not packed here: ``scale * (q - zero)``, rounded once."""
        scales = torch.from_numpy(module.scales).to(target.device).float()  # [N, K/G]
        assert module.zeros is not None  # noqa: S101 - ternary ones are refused before
        zeros = torch.from_numpy(module.zeros).to(target.device).float()
        shifts = torch.arange(0, 4 * WORD_WEIGHTS, 4, dtype=torch.int32, device=target.device)
        for output, word, tile in module.tiles:
            columns = slice(WORD_WEIGHTS * word, WORD_WEIGHTS * (word + tile.shape[1]))
            groups = torch.arange(columns.start, columns.stop, device=target.device) // linear.shape.group
            step = max(1, _WIDENED // tile.shape[1])
            for start in range(0, len(tile), step):
                piece = self._bring(tile[start : start + step])  # [n, words]
                numbers = ((piece[..., None] >> shifts) & 15).flatten(1).float()  # [n, 8 words]
                here = slice(output + start, output + start + len(piece))
                wide = (numbers - zeros[here][:, groups]) * scales[here][:, groups]
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

    def places(self, first: int, count: int, tile_words: int, *, lane: int, half: int) -> torch.Tensor:
        """The first word of each of ``count`` outputs, int64 ``[count]``.

        Args:
            first: The first one in the module.
            count: How many.
            tile_words: Words from a tile to the next.
            lane: Words from an output of a half of a tile to the next.
            half: Words from a half to the other.
        """
        start = self._start + first
        rows = torch.arange(start, start + count, device=self._device)
        if self._form.gated:
            outputs = self._form.outputs // 2
            upper = rows // outputs
            rows = rows % outputs
            tile = rows // 8
        else:
            upper = rows // 8 % 2
            tile = rows // 16
        return tile * tile_words + rows % 8 * lane + upper * half


def even_below_odd(words: torch.Tensor) -> torch.Tensor:
    """The numbers 0 2 4 6 1 3 5 7 of each word of eight in order, from the lowest bits on, int32."""
    return _halves(words).bitwise_or_(_halves(words >> 4) << 16)


def _halves(words: torch.Tensor) -> torch.Tensor:
    """The numbers 0 2 4 6 of each word, in its lower half."""
    octets = words & 0x0F0F0F0F
    octets |= octets >> 4
    octets &= 0x00FF00FF
    octets |= octets >> 8
    return octets.bitwise_and_(0x0000FFFF)


def _columns(word: int, count: int, device: torch.device) -> torch.Tensor:
    """Where the words of eight inputs lie in an output's part of a tile, from ``word`` on: int64 ``[count]``."""
    words = torch.arange(word, word + count, device=device)
    step = STEP // WORD_WEIGHTS
    return words // step * _TILE_WORDS + words % step // 2 * _LANE_WORDS + words % 2


def _scatter(target: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, words: torch.Tensor) -> None:
    """Put ``words`` ``[n, m]`` where ``rows[i] + columns[j]`` says."""
    target.view(-1)[rows[:, None] + columns[None, :]] = words


def _group_words(module: PackedModule, groups: int) -> np.ndarray:
    """Scale and zero point of each output and group of the kernels in a word: uint32 ``[N, groups]``."""
    assert module.zeros is not None  # noqa: S101 - ternary ones are refused before
    words = module.scales.view(np.uint16).astype(np.uint32)
    words |= module.zeros.astype(np.uint32) << np.uint32(16)
    return np.repeat(words, groups // words.shape[1], axis=1)


def _rows_of_a_piece(columns: int) -> int:
    return max(1, _STAGED // columns)
