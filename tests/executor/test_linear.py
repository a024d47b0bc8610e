"""Every product the CPU chooses between, held to fp64."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from edged.executor import torch_choice, torch_products
from edged.executor.torch_choice import BY_FEATURES, BY_ROWS, CUT, ONEDNN, TURNED, USUAL, VECTORS, WIDENED
from edged.executor.torch_linear import CpuLinear
from edged.executor.torch_products import OneDnnProduct
from edged.executor.torch_views import (
    FEATURE_MAJOR_ROWS,
    MANY_ROWS,
    MOST_CUT_ROWS,
    PIECE_ROWS,
    LinearViews,
    feature_major_view,
    input_view,
    output_view,
    piece_places,
    product_batches,
    row_class,
)
from edged.memory.buffers import NARROW_TOKENS
from edged.models.operators import Linear

ROWS = (0, 1, 2, 3, 4, 8, 9, 33, 64, 65, 200)
HAS_ONEDNN = OneDnnProduct.find() is not None
WAYS = {
    torch.float64: (USUAL, CUT, TURNED),
    torch.float32: (USUAL, CUT, TURNED, *([ONEDNN] if HAS_ONEDNN else [])),
    torch.bfloat16: (VECTORS, WIDENED, BY_ROWS, BY_FEATURES),
    torch.float16: (VECTORS, WIDENED),
}
ROUNDED = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


def prefer(monkeypatch, way):
    """Let every weight be measured, and this way be the fastest wherever it can be taken."""

    def seconds_of(products, *_):
        return {each: 1.0 + (each != way) for each in products}

    monkeypatch.setattr(torch_choice, "MEASURED_ELEMENTS", 0)
    monkeypatch.setattr(torch_choice, "seconds_of", seconds_of)


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def build(
    weight, bias, rows, *, elements=None, view_in=input_view, view_out=output_view, part="qkv", spare=0
):
    """The linear, its views, and its input filled with random numbers; rows behind these hold nothing usable."""
    outputs, inputs = weight.shape
    half = weight.dtype in (torch.bfloat16, torch.float16)
    compute = torch.float32 if half else weight.dtype
    layer = Linear(f"layers.0.{part}", part, weight, bias)
    buffers = {"weight_tile": torch.full((elements or 4 * inputs,), float("nan"))} if half else {}
    linear = CpuLinear([layer], buffers)
    tile = buffers["weight_tile"].view(weight.dtype) if half else None
    x = view_in(torch.full(((rows + spare) * inputs,), float("nan"), dtype=compute), rows, inputs)
    x.copy_(torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)))
    out = view_out(torch.full((rows * outputs,), float("nan"), dtype=compute), rows, outputs)
    scratch = torch.full((rows * outputs,), float("nan"), dtype=compute)
    return linear, layer, LinearViews.of(x, out, tile=tile, scratch=scratch)


@pytest.mark.parametrize(("spare", "elements"), [(0, 300), (600, 2800), (600, 1 << 18)])
@pytest.mark.parametrize(
    ("threads", "dtype", "way"),
    [(1 + (way in (CUT, WIDENED, ONEDNN)), dtype, way) for dtype, ways in WAYS.items() for way in ways],
    indirect=["threads"],
)
@pytest.mark.parametrize("shape", [(96, 40), (37, 64)], ids=str)  # 37 outputs cut into no batches
def test_products_are_those_of_fp64(  # noqa: PLR0917 - each is varied for itself
    spare, elements, threads, dtype, way, shape, monkeypatch
):
    prefer(monkeypatch, way)
    monkeypatch.setattr(torch_products, "MOST_RESULTS", 1000)  # cuts the outputs, too
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    bias = torch.randn(shape[0], generator=torch.Generator().manual_seed(2))
    stored = bias.double() if dtype == torch.float64 else bias
    layouts = ((input_view, output_view), (feature_major_view, input_view), (input_view, input_view))
    for rows, (view_in, view_out) in product(ROWS, layouts):
        linear, layer, views = build(
            weight, stored, rows, view_in=view_in, view_out=view_out, spare=spare, elements=elements
        )
        expected = views.x.double() @ weight.double().t() + bias.double()
        out = linear(views, layer)
        taken = linear.ways(layer)[row_class(rows)]
        assert (taken == way) == can_be_taken(way, rows, shape[0])
        assert out.shape == (rows, shape[0])
        if rows:
            error = (out.double() - expected).abs().max() / expected.abs().max()
            rounds = taken in (VECTORS, BY_ROWS, BY_FEATURES)
            assert error < (ROUNDED[dtype] if rounds else 1e-5), (rows, view_in, view_out)
            assert error > 1e-4 or not rounds, "it was widened"


def can_be_taken(way, rows, outputs):
    """Whether a way is one for so many rows."""
    least = 2 if way in (TURNED, BY_FEATURES) else 0
    most = {
        CUT: MOST_CUT_ROWS,
        TURNED: MOST_CUT_ROWS,
        VECTORS: NARROW_TOKENS,
        BY_FEATURES: FEATURE_MAJOR_ROWS,
    }
    if way == CUT and product_batches(outputs, 1, rows) == 1:
        return False
    return least <= rows <= most.get(way, rows)


@pytest.mark.skipif(not HAS_ONEDNN, reason="this torch has no such operator")
def test_rows_of_a_number_are_the_same_each_time(monkeypatch):
    """What lies behind the rows, which pieces may reach, changes nothing."""
    prefer(monkeypatch, ONEDNN)
    weight = torch.randn(96, 40, generator=torch.Generator().manual_seed(1))
    for rows in ROWS:
        results = []
        for behind in (float("nan"), 0.0):
            linear, layer, views = build(weight, None, rows, spare=PIECE_ROWS[-1])
            views.x.as_strided((PIECE_ROWS[-1], 40), (40, 1), rows * 40).fill_(behind)
            results.append(linear(views, layer).clone())
        assert torch.equal(*results)


@pytest.mark.parametrize("room", [0, 1, 30, 1000])
def test_pieces_cover_the_rows_and_are_of_few_sizes(room):
    for rows in range(1400):
        places = piece_places(rows, rows + room)
        covered = set()
        for start, size in places:
            assert size in PIECE_ROWS
            assert 0 <= start < rows
            assert start + size <= rows + room
            covered.update(range(start, start + size))
        assert covered.issuperset(range(rows))
        multiplied = sum(size for _, size in places)
        assert multiplied < 2 * rows or not rows
        assert multiplied <= rows * 3 / 2 or rows <= FEATURE_MAJOR_ROWS
    assert piece_places(0, 100) == []
    assert piece_places(5, 7) == [(0, 4), (4, 1)]
    assert piece_places(5, 8) == [(0, 8)]
    assert piece_places(488, 488) == [(0, 256), (232, 256)]
    assert piece_places(488, 513) == [(0, 512)]
    assert piece_places(513, 513) == [(0, 512), (512, 1)]


@pytest.mark.parametrize("slow", [{"bmm"}, {"mm", "mv"}])
def test_what_is_faster_is_measured(slow, monkeypatch, threads):
    """Weights of one shape are measured by turns, in each class of rows, and the clock alone decides."""
    now = 0.0

    def ticking(name):
        multiply = getattr(torch, name)

        def run(*arguments, **options):
            nonlocal now
            now += 2.0 if name in slow else 1.0
            return multiply(*arguments, **options)

        return run

    for name in ("bmm", "mm", "mv"):
        monkeypatch.setattr(torch, name, ticking(name))
    monkeypatch.setattr(torch_choice.time, "thread_time", lambda: now)
    monkeypatch.setattr(OneDnnProduct, "find", lambda: None)
    linears = [
        Linear(f"layers.{index}.gate_up", "gate_up", torch.randn(512, 512), None) for index in range(3)
    ]
    pays = "bmm" not in slow and torch.backends.mkl.is_available()
    linear = CpuLinear(linears, {})
    for layer in linears:
        for rows, way in zip(torch_choice.MEASURED_ROWS, linear.ways(layer), strict=True):
            # On two threads a product of one vector takes one of them.
            is_cut = rows <= MOST_CUT_ROWS and (pays or (rows == 1 and threads == 2))
            assert way == (CUT if is_cut and torch.backends.mkl.is_available() else USUAL)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("threads", [1], indirect=True)
def test_many_rows_take_one_way_in_the_whole_model(monkeypatch, threads):
    """What lies between two products has one layout, so the sum of their times decides."""
    seconds = {(USUAL, 512): 1.0, (BY_ROWS, 512): 3.0, (USUAL, 640): 4.0, (BY_ROWS, 640): 1.0}

    def seconds_of(products, weights, rows, tile):
        return {way: seconds[USUAL if way == WIDENED else way, next(weights).shape[0]] for way in products}

    monkeypatch.setattr(
        torch_choice,
        "seconds_of",
        lambda products, *others: seconds_of(
            {way: each for way, each in products.items() if way in (WIDENED, BY_ROWS)}, *others
        ),
    )
    small = Linear("layers.0.output", "output", torch.zeros(8, 8, dtype=torch.bfloat16))
    ones = [
        Linear(f"layers.{index}.qkv", "qkv", torch.zeros(512, 512, dtype=torch.bfloat16))
        for index in range(2)
    ]
    other = Linear("layers.0.down", "down", torch.zeros(640, 512, dtype=torch.bfloat16))
    for linears, way in (([small, *ones, other], WIDENED), ([small, *ones[:1], other], BY_ROWS)):
        linear = CpuLinear(linears, {"weight_tile": torch.zeros(1 << 16)})
        assert {linear.ways(layer)[MANY_ROWS] for layer in linears} == {way}
        assert linear.wants_rows == linear.wants_narrow == (way == BY_ROWS)
        assert linear.ways(other)[0] == BY_ROWS
        assert linear.ways(ones[0])[1] == WIDENED


def test_what_threads_share_worse_must_be_faster_by_more(monkeypatch, threads):
    """One thread is timed: widening, and MKL's product of one vector, gain less by more of them."""
    seconds = {WIDENED: 1.0, BY_ROWS: 1.1, USUAL: 1.0, CUT: 1.1}
    monkeypatch.setattr(
        torch_choice, "seconds_of", lambda products, *_: {way: seconds.get(way, 9.0) for way in products}
    )
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    half, wide = (
        Linear("layers.0.qkv", "qkv", torch.zeros(512, 512, dtype=dtype))
        for dtype in (torch.bfloat16, torch.float32)
    )
    ways = CpuLinear([half], {"weight_tile": torch.zeros(1 << 16)}).ways(half)
    assert set(ways) == {WIDENED if threads == 1 else BY_ROWS}
    ways = CpuLinear([wide], {}).ways(wide)
    assert ways[:2] == (USUAL if threads == 1 else CUT, USUAL)


def test_without_the_operator_or_where_it_errs_it_is_not_taken(monkeypatch):
    class Operator:
        def __init__(self, answer):
            self.default = answer

    def failing(*_):
        raise RuntimeError("could not create a primitive")

    for operator in (
        None,
        Operator(failing),
        Operator(lambda *_: None),
        Operator(lambda x, w, *_: x @ w.t() + 1),
    ):
        space = type("Space", (), {} if operator is None else {"_linear_pointwise": operator})()
        monkeypatch.setattr(torch.ops, "mkldnn", space)
        assert OneDnnProduct.find() is None
        linear = CpuLinear([Linear("layers.0.qkv", "qkv", torch.zeros(512, 512))], {})
        assert not linear.wants_rows


@pytest.mark.parametrize("rows", [1, 2, 16, 64])
@pytest.mark.parametrize("way", WAYS[torch.bfloat16])
def test_the_best_logits_are_those_of_fp32(rows, way, monkeypatch):
    prefer(monkeypatch, way)
    generator = torch.Generator().manual_seed(4)
    weight = (torch.randn(5000, 64, generator=generator) + 0.5).to(torch.bfloat16)
    linear, layer, views = build(weight, None, rows, elements=1 << 16, part="head")
    views.x.add_(3.0)  # logits of about 100, which bfloat16 rounds to halves
    expected = views.x @ weight.float().t()
    ours = linear(views, layer)
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
