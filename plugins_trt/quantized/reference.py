"""Keys and values in eight bits, in plain torch: what the kernels and the executor on the CPU are held to.

A row (one token's key or value of one KV head) has one float16 scale, its largest absolute value over the format's
largest number. Its elements are divided by that scale and rounded to the nearest number of the format, ties to even.
int8 rows are held as `torch.int8` and float8_e4m3fn ones as their bytes, `torch.uint8`, which every device can index.
"""

from __future__ import annotations

import torch

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""The largest number of each format."""

STORAGE = {"int8": torch.int8, "float8_e4m3fn": torch.uint8}
"""What torch holds each format in."""

_MOST = 65504.0  # of float16


def quantize(x: torch.Tensor, kv_dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds rows; those that hold an infinity or NaN get a scale of NaN.

    Args:
        x: Float, `[.., D]`.
        kv_dtype: "int8" or "float8_e4m3fn".

    Returns:
        What is stored, `[.., D]` of `STORAGE[kv_dtype]`, and the scales, float16 `[..]`.
    """
    x = x.float()
    largest = LARGEST[kv_dtype]
    most = x.abs().amax(-1)
    scales = (most * torch.tensor(1.0 / largest, dtype=torch.float32)).clamp(max=_MOST).to(torch.float16)
    scales = torch.where(most.isfinite(), scales, torch.nan)
    # Multiplied with the inverse, as the kernels do: to divide may round to another neighbour.
    inverse = torch.where(scales > 0, scales.float().reciprocal(), 0.0)
    scaled = (x * inverse[..., None]).nan_to_num(0.0).clamp(-largest, largest)
    if kv_dtype == "int8":
        return scaled.round().to(torch.int8), scales
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales


def format_of(storage: torch.dtype) -> str:
    """Which format is held in this dtype."""
    return next(name for name, dtype in STORAGE.items() if dtype == storage)


def widen(stored: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """As `dequantize`, into `out`."""
    out.copy_(_numbers(stored)).mul_(scales[..., None])


def dequantize(stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The rows in float32, exactly: `stored` `[.., D]`, `scales` `[..]`."""
    return _numbers(stored).float() * scales.float()[..., None]


def _numbers(stored: torch.Tensor) -> torch.Tensor:
    return stored.view(torch.float8_e4m3fn) if stored.dtype == torch.uint8 else stored
