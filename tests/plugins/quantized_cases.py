"""The same steps over keys and values in eight bits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from decode_cases import error

from plugins_trt.append.reference import Pages, QuantizedPages
from plugins_trt.quantized.reference import dequantize, quantize

if TYPE_CHECKING:
    from decode_cases import Case

KV_DTYPES = ["int8", "float8_e4m3fn"]


def quantized_pages(pages: Pages, kv_dtype: str) -> QuantizedPages:
    """The same pages in eight bits; where nothing was written the bytes are of the largest size and the scales NaN."""
    pools = {}
    for kind in ("keys", "values"):
        exact = getattr(pages, kind)
        unwritten = exact.isnan().any(-1)
        stored, scales = quantize(exact.nan_to_num(), kv_dtype)
        pools[kind] = stored.masked_fill_(unwritten[..., None], 127)
        pools[f"{kind[:-1]}_scales"] = scales.masked_fill_(unwritten, float("nan"))
    return QuantizedPages(
        **{kind: pools[kind].contiguous() for kind in pools}, fine=pages.fine, coarse=pages.coarse
    )


def quantized_case(case: Case, kv_dtype: str) -> Case:
    """The same step over quantized pages (compressed keys stay as they are)."""
    return replace(case, pages=quantized_pages(case.pages, kv_dtype))


def assert_quantized_pages_agree(got: QuantizedPages, expected: QuantizedPages):
    """Values to the bit; of keys, which were rotated before, a few may be rounded the other way."""
    assert torch.equal(got.values, expected.values)
    assert torch.equal(got.value_scales.nan_to_num(7.0), expected.value_scales.nan_to_num(7.0))
    assert float((got.keys != expected.keys).float().mean()) < 1e-3
    for name in ("key_scales", "fine", "coarse"):
        mine, theirs = getattr(got, name), getattr(expected, name)
        assert torch.equal(mine.isnan(), theirs.isnan()), name
        assert error(mine.nan_to_num(), theirs.nan_to_num()) < 2e-3, name
    written = expected.key_scales.isfinite()
    rows = [dequantize(pages.keys[written], pages.key_scales[written]) for pages in (got, expected)]
    assert error(*rows) < 1e-3
