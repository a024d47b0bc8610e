from __future__ import annotations

import numpy as np
import pytest
import torch

from edged.executor.page_copies import PageCopies

LAYERS, HEADS, PAGES, WIDTH = 3, 2, 5, 8


def arena(dtype, layout):
    generator = torch.Generator().manual_seed(1)

    def make(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    compressed = {
        "fine": make(LAYERS, PAGES, HEADS, 4, WIDTH),
        "coarse": make(LAYERS, PAGES, HEADS, 1, WIDTH),
    }
    if layout == "cpu":
        return {"kv": make(LAYERS, 2 * HEADS, PAGES * 64, WIDTH), **compressed}
    return {
        "keys": make(LAYERS, PAGES, HEADS, 64, WIDTH),
        "values": make(LAYERS, PAGES, HEADS, 64, WIDTH),
        **compressed,
    }


def pages_of(buffers, page):
    if "kv" in buffers:
        first = buffers["kv"][:, :, 64 * page : 64 * page + 64]
    else:
        first = torch.cat((buffers["keys"][:, page], buffers["values"][:, page]), 1)
    return first, buffers["fine"][:, page], buffers["coarse"][:, page]


@pytest.mark.parametrize("layout", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_pages_and_their_compressed_keys_move_bit_by_bit(layout, dtype):
    buffers = arena(dtype, layout)
    copies = PageCopies(buffers)
    assert copies.page_bytes == sum(b.numel() * b.element_size() for b in buffers.values()) // PAGES
    before = {name: tensor.clone() for name, tensor in buffers.items()}
    host = np.zeros((2, copies.page_bytes), np.uint8)
    copies.read(np.array([4, 1], np.int32), host)
    for tensor in buffers.values():
        tensor.fill_(float("nan"))
    copies.write(np.array([0, 3], np.int32), host)
    for source, destination in ((4, 0), (1, 3)):
        for old, new in zip(pages_of(before, source), pages_of(buffers, destination), strict=True):
            assert torch.equal(old, new)
    assert all(torch.isnan(part).all() for page in (1, 2, 4) for part in pages_of(buffers, page))
