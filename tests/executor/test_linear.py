"""Every product the CPU chooses between, held to fp64."""

from __future__ import annotations

import pytest
import torch

from edged.executor import torch_linear
from edged.executor.torch_linear import CpuLinear, has_matrix_units
from edged.executor.torch_views import (
    ROW_CLASSES,
    LinearViews,
    feature_major_view,
    input_view,
    output_view,
    product_batches,
)
from edged.memory.buffers import NARROW_TOKENS
from edged.models.operators import Linear

ROWS = (1, 2, 3, 4, 8, 33, 64, 65, 200)


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def build(weight, bias, rows, *, tile=None, view_in=input_view, view_out=output_view):
    """The linear, its views, and its input filled with random numbers."""
    outputs, inputs = weight.shape
    half = weight.dtype in (torch.bfloat16, torch.float16)
    compute = torch.float32 if half else weight.dtype
    layer = Linear("layers.0.qkv", "qkv", weight, bias)
    buffers = {"weight_tile": torch.full((tile or 4 * inputs,), float("nan"))} if half else {}
    linear = CpuLinear([layer], buffers)
    narrow = {
        f"narrow_{end}": torch.full((NARROW_TOKENS * width,), float("nan"), dtype=weight.dtype)
        if half
        else None
        for end, width in (("in", inputs), ("out", outputs))
    }
    x = view_in(torch.empty(rows * inputs, dtype=compute), rows, inputs)
    x.copy_(torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)))
    out = view_out(torch.full((rows * outputs,), float("nan"), dtype=compute), rows, outputs)
    scratch = torch.full((rows * outputs,), float("nan"), dtype=compute)
    return linear, layer, LinearViews.of(x, out, **narrow, scratch=scratch)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("threads", "dtype"),
    [(1, torch.float64), (2, torch.float32), (2, torch.bfloat16), (1, torch.float16), (1, torch.float32)],
    indirect=["threads"],
)
@pytest.mark.parametrize("shape", [(96, 40), (37, 64)], ids=str)  # 37 outputs cut into no batches
@pytest.mark.parametrize(
    "layouts", [(input_view, output_view), (feature_major_view, input_view)], ids=["usual", "down"]
)
def test_products_are_those_of_fp64(rows, threads, dtype, shape, layouts):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    bias = torch.randn(shape[0], generator=torch.Generator().manual_seed(2))
    stored = bias.double() if dtype == torch.float64 else bias
    linear, layer, views = build(weight, stored, rows, view_in=layouts[0], view_out=layouts[1])
    expected = views.x.double() @ weight.double().t() + bias.double()
    out = linear(views, layer)
    narrow = dtype in (torch.bfloat16, torch.float16) and rows <= NARROW_TOKENS
    narrow = narrow or (dtype == torch.bfloat16 and has_matrix_units())
    bound = {torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype] if narrow else 1e-5
    assert out.shape == (rows, shape[0])
    assert (out.double() - expected).abs().max() / expected.abs().max() < bound


@pytest.mark.parametrize("rows", [row for row in ROWS if row > NARROW_TOKENS])
@pytest.mark.parametrize("layouts", [(input_view, output_view), (feature_major_view, input_view)])
def test_matrix_units_multiply_what_others_widen(rows, layouts, monkeypatch):
    monkeypatch.setattr(torch_linear, "has_matrix_units", lambda: True)
    weight = torch.randn(96, 40, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    linear, layer, views = build(weight, None, rows, view_in=layouts[0], view_out=layouts[1])
    expected = views.x.double() @ weight.double().t()
    for exactly, least, most in ((False, 1e-4, 2e-2), (True, 0, 1e-5)):
        views.out.fill_(float("nan"))
        error = (linear(views, layer, exactly=exactly).double() - expected).abs().max() / expected.abs().max()
        assert least <= error < most, "results are rounded to bfloat16 unless asked for exactly"


@pytest.mark.parametrize("rows", [0, 1, 2, 4, 9, 16, 17])
@pytest.mark.parametrize("way", ["usual", "cut", "by rows"])
def test_few_rows_are_the_same_however_they_are_multiplied(way, rows, monkeypatch, threads):
    monkeypatch.setattr(torch_linear, "fastest_product", lambda *_, **__: way)
    weight = torch.randn(96, 40, generator=torch.Generator().manual_seed(1))
    linear, layer, views = build(weight, None, rows, view_out=output_view)
    if 0 < rows <= ROW_CLASSES[-1]:
        assert (layer.name in linear._cut[views.row_class]) == (way == "cut")
        assert (layer.name in linear._by_rows[views.row_class]) == (way == "by rows")
        assert views.out_by_rows is not None
    else:
        assert (views.row_class, views.out_by_rows) == (-1, None)
    torch.testing.assert_close(linear(views, layer), views.x @ weight.t())


@pytest.mark.parametrize("slow", [{"bmm"}, {"mm", "mv"}])
def test_what_is_faster_is_measured(slow, monkeypatch, threads):
    """Weights of one shape are measured by turns, in each class of rows, and the clock alone decides."""
    now = 0.0

    def ticking(name):
        product = getattr(torch, name)

        def run(*arguments, **options):
            nonlocal now
            now += 2.0 if name in slow else 1.0
            return product(*arguments, **options)

        return run

    for name in ("bmm", "mm", "mv"):
        monkeypatch.setattr(torch, name, ticking(name))
    for clock in ("perf_counter", "thread_time"):
        monkeypatch.setattr(torch_linear.time, clock, lambda: now)
    linears = [Linear(f"layers.{index}.qkv", "qkv", torch.randn(512, 512), None) for index in range(3)]
    pays = "bmm" not in slow and torch.backends.mkl.is_available()
    linear = CpuLinear(linears, {})
    for cut in linear._cut:
        assert set(cut) == ({layer.name for layer in linears} if pays else set())
    assert not any(linear._by_rows), "it turns the result over besides"


@pytest.mark.parametrize("rows", [1, 2])
def test_the_best_logits_of_a_narrow_head_are_those_of_fp32(rows):
    generator = torch.Generator().manual_seed(4)
    weight = (torch.randn(5000, 64, generator=generator) + 0.5).to(torch.bfloat16)
    linear, layer, views = build(weight, None, rows, tile=64 * 64)
    views.x.add_(3.0)  # logits of about 100, which bfloat16 rounds to halves
    expected = views.x @ weight.float().t()
    ours = linear.logits(views, layer)
    assert ours.argmax(dim=1).tolist() == expected.argmax(dim=1).tolist()
    best = expected.topk(20, dim=1).indices
    torch.testing.assert_close(ours.gather(1, best), expected.gather(1, best), rtol=1e-5, atol=1e-4)


def test_batches_divide_the_outputs_and_give_every_thread_one():
    has_mkl = torch.backends.mkl.is_available()
    for outputs, threads in ((960, 1), (960, 2), (49152, 12), (576, 8), (73448, 3)):
        count = product_batches(outputs, threads, 1)
        assert outputs % count == 0
        if has_mkl:
            assert max(threads, 2) <= count <= 2 * max(threads, 2)
    assert product_batches(37, 4, 1) == 1


def test_pieces_for_some_rows_are_small_and_divide_the_outputs():
    pieces = {outputs: outputs // product_batches(outputs, 2, 4) for outputs in (960, 49152, 73448, 60, 37)}
    if torch.backends.mkl.is_available():
        assert pieces == {960: 8, 49152: 8, 73448: 8, 60: 6, 37: 37}
    else:
        assert all(outputs == piece for outputs, piece in pieces.items())
