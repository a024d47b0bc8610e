"""Products of random numbers by packed weights: what goes in, and what should come out."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from decode_cases import array, error, gpu

from edged.checkpoint.ternary import pack_ternary_words
from plugins_trt.ternary_linear import layout as ternary_layout
from plugins_trt.ternary_linear.contract import TernaryLinear
from plugins_trt.ternary_linear.launch import TernaryMultiplier
from plugins_trt.w4a16_linear import layout as w4a16_layout
from plugins_trt.w4a16_linear.contract import MAX_ROWS, W4A16Linear
from plugins_trt.w4a16_linear.launch import W4A16Multiplier

if TYPE_CHECKING:
    from plugins_trt.contract import DeviceArray

TOLERANCE = 5e-3
ROW = 0
"""As the group of ternary weights: one a row."""
EIGHT_B_LAYERS = [
    # outputs, inputs, gated
    (4608, 4096, False),
    (4096, 4096, False),
    (32768, 4096, True),
    (4096, 16384, False),
    (73448, 1024, False),
]


class LinearCase:
    """A product of random numbers, and what it should give."""

    shares: int
    """The most shares that the inputs are ever cut into."""

    def __init__(
        self,
        weight: torch.Tensor,  # [N, K]
        tiles: torch.Tensor,
        rows: int,
        *,
        dtype: str,
        gated: bool,
        extras: bool,
        device: str,
    ) -> None:
        generator = torch.Generator(device).manual_seed(rows)
        outputs, inputs = weight.shape
        self.weight, self.tiles = weight, tiles.to(device)
        kind = getattr(torch, dtype)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device).to(kind)

        self.dtype, self.gated, self.columns = dtype, gated, outputs // 2 if gated else outputs
        self.x = normal(rows, inputs + 16)[:, :inputs]  # rows lie apart
        self.bias = normal(outputs) if extras else None
        self.residual = normal(rows, outputs) if extras and not gated else None
        self.keep: list[torch.Tensor] = []

    def poisoned(self) -> torch.Tensor:
        return torch.full((len(self.x), self.columns), float("nan"), dtype=self.x.dtype, device=self.x.device)

    def operands(self, out: torch.Tensor, rows: slice) -> dict[str, DeviceArray | None]:
        """What both products are given beside their weights, of some of the rows."""
        sums = self.shares * len(self.x[rows]) * self.tiles.shape[0] * 16
        workspace = torch.full((sums,), float("nan"), device=self.x.device)
        self.keep += [out, workspace]
        return {
            "x": array(self.x[rows]),
            "tiles": array(self.tiles),
            "out": array(out[rows]),
            "bias": None if self.bias is None else array(self.bias),
            "residual": None if self.residual is None else array(self.residual[rows]),
            "workspace": array(workspace),
        }

    def arguments(
        self, out: torch.Tensor | None = None, rows: slice = slice(None)
    ) -> tuple[Any, torch.Tensor]:
        """The arguments of one launch of these rows, and where it writes: poisoned, where none is given."""
        raise NotImplementedError

    def launches(self, out: torch.Tensor) -> list[Any]:
        """The arguments of each launch of the whole product."""
        return [self.arguments(out)[0]]

    def multiply(self, args: Any) -> None:
        """Launches one on the GPU."""
        raise NotImplementedError

    def run(self) -> torch.Tensor:
        """The product by the GPU."""
        out = self.poisoned()
        for args in self.launches(out):
            self.multiply(args)
        gpu().stream.synchronize()
        return out

    def expected(self) -> torch.Tensor:
        out = self.x.float() @ self.weight.to(self.x.device).t()
        if self.bias is not None:
            out = out + self.bias.float()
        if self.gated:
            return torch.nn.functional.silu(out[:, : self.columns]) * out[:, self.columns :]
        return out if self.residual is None else out + self.residual.float()

    def check_on_the_gpu(self) -> None:
        assert error(self.run(), self.expected()) < TOLERANCE, (self.x.shape, self.tiles.shape)

    def check_the_bits_and_the_residual_as_output(self) -> None:
        first = self.run()
        assert torch.equal(first, self.run())
        stream = self.residual.clone()
        args, _ = self.arguments()
        self.multiply(replace(args, residual=array(stream), out=array(stream)))
        gpu().stream.synchronize()
        assert torch.equal(stream, first)


class W4A16Case(LinearCase):
    """With 4-bit weights."""

    shares = 8

    def __init__(
        self,
        rows: int,
        outputs: int,
        inputs: int,
        *,
        group: int = 64,
        dtype: str = "bfloat16",
        gated: bool = False,
        extras: bool = True,
        device: str = "cpu",
        symmetric: bool = False,
    ) -> None:
        rng = np.random.default_rng(rows * 1000 + outputs + inputs)
        numbers = rng.integers(0, 16, (outputs, inputs), dtype=np.uint8)
        packed = np.zeros((outputs, inputs // 8), np.uint32)
        for place in range(8):
            packed |= numbers[:, place::8].astype(np.uint32) << np.uint32(4 * place)
        scales = (rng.random((outputs, inputs // group)) * 0.02 + 0.001).astype(np.float16)
        zeros = rng.integers(0, 16, (outputs, inputs // group), dtype=np.uint8)
        if symmetric:
            zeros[:] = 8
        wide = numbers.reshape(outputs, -1, group).astype(np.float32) - zeros[..., None]
        wide *= scales.astype(np.float32)[..., None]
        tiles = w4a16_layout.pack_tiles(packed, gated=gated).view(np.int32)
        groups = w4a16_layout.pack_groups(scales, zeros, gated=gated).view(np.int32)
        super().__init__(
            torch.from_numpy(wide.reshape(outputs, inputs)),
            torch.from_numpy(tiles),
            rows,
            dtype=dtype,
            gated=gated,
            extras=extras,
            device=device,
        )
        self.groups, self.symmetric = torch.from_numpy(groups).to(device), symmetric

    def arguments(self, out=None, rows=slice(None)):
        out = self.poisoned() if out is None else out
        operands = self.operands(out, rows)
        return W4A16Linear(
            **operands, groups=array(self.groups), gated=self.gated, symmetric=self.symmetric
        ), out

    def launches(self, out):
        """As an executor cuts more rows than one takes."""
        starts = range(0, len(out), MAX_ROWS)
        return [self.arguments(out, slice(first, first + MAX_ROWS))[0] for first in starts]

    def multiply(self, args):
        _w4a16(self.dtype)(args, gpu().stream)


class TernaryCase(LinearCase):
    """With ternary weights."""

    shares = 16

    def __init__(
        self,
        rows: int,
        outputs: int,
        inputs: int,
        *,
        group: int = 128,
        dtype: str = "bfloat16",
        gated: bool = False,
        extras: bool = True,
        device: str = "cpu",
    ) -> None:
        weight, tiles, scales = _ternary_weights(outputs, inputs, group or inputs, gated)
        super().__init__(weight, tiles, rows, dtype=dtype, gated=gated, extras=extras, device=device)
        self.scales = scales.to(device)

    def arguments(self, out=None, rows=slice(None)):
        out = self.poisoned() if out is None else out
        return TernaryLinear(**self.operands(out, rows), scales=array(self.scales), gated=self.gated), out

    def multiply(self, args):
        _ternary(self.dtype)(args, gpu().stream)


@lru_cache(maxsize=4)
def _ternary_weights(outputs, inputs, group, gated):
    """Random ones, float32 `[N, K]`, and their layout."""
    rng = np.random.default_rng(outputs + inputs)
    codes = rng.integers(0, 3, (outputs, inputs), dtype=np.uint8)
    scales = (rng.random((outputs, inputs // group)) * 0.02 + 0.001).astype(np.float16)
    wide = codes.reshape(outputs, -1, group).astype(np.float32) - 1
    wide *= scales.astype(np.float32)[..., None]
    tiles = ternary_layout.pack_tiles(pack_ternary_words(codes), gated=gated).view(np.int32)
    of_groups = ternary_layout.pack_scales(scales, inputs, gated=gated).view(np.int32)
    return (
        torch.from_numpy(wide.reshape(outputs, inputs)),
        torch.from_numpy(tiles),
        torch.from_numpy(of_groups),
    )


@lru_cache(maxsize=2)
def _w4a16(dtype):
    kernels = gpu().kernels
    return W4A16Multiplier(
        kernels.operator("w4a16_linear"),
        multiprocessors=kernels.multiprocessors,
        shared_bytes=kernels.shared_bytes,
        dtype=dtype,
    )


@lru_cache(maxsize=2)
def _ternary(dtype):
    kernels = gpu().kernels
    return TernaryMultiplier(
        kernels.operator("ternary_linear"), multiprocessors=kernels.multiprocessors, dtype=dtype
    )
