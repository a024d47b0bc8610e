"""Products with ternary weights: the layout, the kernels run on the CPU, and on a GPU."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from decode_cases import array, error
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_cases import EIGHT_B_LAYERS, ROW, TOLERANCE, TernaryCase
from on_the_cpu import PLUGINS, Kernels

from edged.checkpoint.ternary import pack_ternary_words
from plugins_trt.contract import LaunchError
from plugins_trt.packed.cut import most_shares
from plugins_trt.packed.tiles import rows_of_tiles
from plugins_trt.ternary_linear import layout
from plugins_trt.ternary_linear.contract import (
    BLOCK_TILES,
    FEW_BYTES,
    FEW_ROWS,
    MAX_SUM_BYTES,
    LinearPlan,
    sum_bytes,
)
from plugins_trt.ternary_linear.launch import _FORMAT, _REDUCERS, _pack
from plugins_trt.ternary_linear.reference import ternary_linear, widen

MANY = 0


# ---------------------------------------------------------------- the layout and its reference


@settings(max_examples=30, deadline=None)
@given(
    tiles=st.integers(1, 5), rest=st.integers(0, 15), steps=st.integers(1, 9),
    group=st.sampled_from([ROW, 32, 64, 128, 256]), gated=st.booleans(),
)  # fmt: skip
def test_the_layout_holds_every_weight_once(tiles, rest, steps, group, gated):
    outputs = 16 * tiles if gated else max(1, 16 * tiles - rest)
    case = TernaryCase(2, outputs, (group or 32) * steps, group=group, gated=gated)
    rows = torch.from_numpy(rows_of_tiles(outputs, gated=gated))
    inputs = case.x.shape[1]
    wide = widen(case.tiles, case.scales)
    assert torch.equal(wide[rows >= 0, :inputs], case.weight[rows[rows >= 0]])
    assert not wide[rows < 0].any()
    assert not wide[:, inputs:].any()
    assert sorted(rows[rows >= 0].tolist()) == list(range(outputs))
    assert tuple(case.scales.shape) == layout.scales_shape(outputs, inputs, group or inputs)
    result = ternary_linear(
        case.x,
        case.tiles,
        case.scales,
        outputs=case.columns,
        bias=case.bias,
        residual=case.residual,
        gated=gated,
    )
    assert error(result, case.expected()) < 1e-5


def test_a_lanes_words_hold_pairs_where_a_register_has_them():
    """By the description: lane 4 g + t, inputs 8 j + 2 t and the next of outputs g and g + 8, as halves of floats."""
    codes = (np.arange(16 * 128).reshape(16, 128) * 7 % 31 % 3).astype(np.uint8)
    tile = layout.pack_tiles(pack_ternary_words(codes))[0, 0]
    for g in range(8):
        for t in range(4):
            for word in range(4):
                for pair in range(8):
                    two = np.array([int(tile[4 * g + t, word]) << 2 * pair & 0xC000C000], np.uint64)
                    low, high = two.astype(np.uint32).view(np.float16)
                    first = 64 * (word % 2) + 8 * pair + 2 * t
                    output = g + 8 * (word // 2)
                    assert low == 2.0 * (int(codes[output, first]) - 1)
                    assert high == 2.0 * (int(codes[output, first + 1]) - 1)


# ---------------------------------------------------------------- the contract


def test_arguments_are_refused_by_name():
    case = TernaryCase(20, 48, 256, group=128)
    args, _ = case.arguments()

    def refused(**changes):
        with pytest.raises(LaunchError) as caught:
            replace(args, **changes).plan(132)
        return str(caught.value)

    def zeros(*shape, dtype=torch.int32):
        return array(torch.zeros(shape, dtype=dtype))

    assert refused(x=array(case.x.float())).startswith("x: dtype float32")
    assert refused(x=zeros(0, 256, dtype=torch.bfloat16)).startswith("x: shape (0, 256)")
    assert refused(x=zeros(256, dtype=torch.bfloat16)).startswith("x: shape (256,)")
    assert refused(x=zeros(20, 320, dtype=torch.bfloat16)).startswith("inputs: 320, must be at most 2")
    assert refused(x=zeros(20, 248, dtype=torch.bfloat16)).startswith("inputs: 248, must be a multiple of 32")
    assert refused(tiles=array(case.tiles.float())).startswith("tiles: dtype")
    assert refused(scales=zeros(2, 2, 8, 1)).startswith("scales: shape")
    assert refused(scales=zeros(3, 3, 8, 1)).startswith("scales: shape (3, 3, 8, 1), must have 2 blocks")
    assert refused(scales=zeros(3, 2, 8, 3)).startswith("scales: shape (3, 2, 8, 3)")
    assert refused(out=zeros(20, 20, dtype=torch.bfloat16), residual=None, bias=None).startswith(
        "out: shape (20, 20), must be of 3 tiles"
    )
    assert refused(bias=array(case.bias[:5])).startswith("bias: shape")
    assert refused(residual=array(case.residual[:5])).startswith("residual: shape")
    gated = TernaryCase(2, 32, 128, gated=True)
    with pytest.raises(LaunchError, match=r"^residual: given, but gated"):
        replace(gated.arguments()[0], residual=zeros(2, 16, dtype=torch.bfloat16))
    for sizes, name in (
        ((16, 40, 40), "inputs: 40"),
        ((16, 64, 48), "group: 48"),
        ((16, 384, 192), "group: 192"),
        ((16, 96, 64), "inputs: 96"),
        ((0, 64, 64), "outputs: 0"),
    ):
        with pytest.raises(LaunchError, match=f"^{name}"):
            layout.check_sizes(*sizes)
    with pytest.raises(LaunchError, match=r"^outputs: 24, must be a multiple of 16"):
        layout.check_sizes(24, 64, 64, gated=True)
    large = TernaryCase(20, 48, 4096, extras=False)
    with pytest.raises(LaunchError, match=r"^workspace: missing, this product needs"):
        replace(large.arguments()[0], workspace=None).plan(132)


@given(
    rows=st.integers(1, 2048), outputs=st.integers(1, 40000), blocks=st.integers(1, 300),
    multiprocessors=st.sampled_from([14, 16, 82, 132, 170]),
)  # fmt: skip
def test_a_plan_cuts_no_more_than_helps(rows, outputs, blocks, multiprocessors):
    plan = LinearPlan.of(rows=rows, outputs=outputs, inputs=128 * blocks, multiprocessors=multiprocessors)
    assert 1 <= plan.splits <= 8
    assert plan.splits == 1 or blocks // plan.splits >= 4
    if plan.splits > 1:
        assert plan.workspace_bytes >= 4 * 16 * plan.splits * rows * -(-outputs // 16)
    fewer = LinearPlan.of(
        rows=min(rows, 64), outputs=outputs, inputs=128 * blocks, multiprocessors=multiprocessors
    )
    shares = most_shares(-(-outputs // 16), blocks, multiprocessors)
    if rows > FEW_ROWS and shares > 1:  # enough for the warpgroups' shares, of fewer rows too
        assert min(plan.workspace_bytes, fewer.workspace_bytes) >= 4 * 16 * shares * min(rows, 64) * -(
            -outputs // 16
        )
    tiles, few = -(-outputs // 16), plan.few
    if few is not None:
        assert few.splits in (1, 2, 4, 8, 16)
        assert rows <= 2
        assert rows * 256 * blocks <= FEW_BYTES
        assert sum_bytes(-(-tiles // few.thread_blocks), few.splits, rows) <= MAX_SUM_BYTES
        assert few.thread_blocks in (tiles, *range(multiprocessors, tiles, multiprocessors))


# ---------------------------------------------------------------- the kernels on the CPU


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> Kernels:
    sources = [PLUGINS / "ternary_linear" / name for name in ("few.cu", "many.cu")]
    return Kernels(sources, tmp_path_factory.mktemp("on_the_cpu"))


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(
    ("sizes", "options", "cut"),
    [
        # Whole x: shares of the inputs, and thread blocks. More pairs of blocks than stages, and a part of one:
        ((1, 48, 4128), {"group": 32}, (2, 2)),
        ((2, 16, 128), {"group": 64, "dtype": "float16"}, (16, 1)),  # most warps take none
        ((2, 320, 512), {"group": 128, "gated": True}, (2, 2)),  # several tiles a warp, not all as many
        ((1, 80, 1024), {"group": ROW, "dtype": "float16"}, (4, 2)),
        ((1, 32, 512), {"group": 128}, (8, 1)),
        # x is streamed. Tiles behind the first thread block, a part of a round:
        ((7, 144, 608), {"group": 32, "extras": False}, (1, MANY)),
        ((13, 32, 1024), {"group": 64, "gated": True, "dtype": "float16"}, (2, MANY)),
        ((14, 48, 2304), {"group": 128}, (2, MANY)),
        ((5, 48, 1280), {"group": ROW}, (3, MANY)),
        ((30, 48, 640), {"group": 128, "gated": True, "dtype": "float16"}, (2, MANY)),
        ((40, 160, 256), {"group": 128}, (1, MANY)),  # two slabs of rows, two thread blocks of tiles
    ],
)
def test_the_kernels_text_computes_the_product(kernels, sizes, options, cut, lazy):
    case, rows, (splits, thread_blocks) = TernaryCase(*sizes, **options), sizes[0], cut
    args, out = case.arguments()
    values = _pack(args, splits)
    suffix = "f16" if case.dtype == "float16" else "bf16"
    tiles = case.tiles.shape[0]
    if thread_blocks:
        grid, name = (thread_blocks, 1), f"ternary_few_{suffix}_s{args.scale_count}_n{rows}"
        values = _pack(args, splits.bit_length() - 1)
        kernels.run(name, _FORMAT, values, grid, lazy=lazy, threads=512)
    else:
        width = next((width for width in (8, 16, 32) if rows <= width), 32)
        grid = (-(-tiles // BLOCK_TILES) * -(-rows // width), splits)
        name = f"ternary_many_{suffix}_n{width}{'_fine' if args.scale_count > 1 else ''}"
        kernels.run(name, _FORMAT, values, grid, lazy=lazy)
        if splits > 1:
            name, grid = f"ternary_reduce_{suffix}", (1, rows)
            kernels.run(name, _FORMAT, values, grid, lazy=lazy, threads=_REDUCERS)
    assert error(out, case.expected()) < TOLERANCE


# ---------------------------------------------------------------- the kernels on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("group", "gated"), [(ROW, False), (32, False), (64, True), (128, False), (128, True)]
)
def test_every_number_of_rows_equals_the_reference(dtype, group, gated):
    for rows in range(1, 71):
        TernaryCase(
            rows,
            16 * (rows % 13 + 1),
            128 * (rows % 9 + 1),
            group=group,
            dtype=dtype,
            gated=gated,
            device="cuda",
        ).check_on_the_gpu()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 17, 32, 64, 500])
@pytest.mark.parametrize(("outputs", "inputs", "gated"), EIGHT_B_LAYERS)
def test_the_layers_of_an_8b_model_equal_the_reference(rows, outputs, inputs, gated):
    TernaryCase(rows, outputs, inputs, gated=gated, device="cuda").check_on_the_gpu()


@pytest.mark.gpu
def test_odd_sizes_equal_the_reference():
    rng = random.Random(0)
    for _ in range(80):
        group = rng.choice([ROW, 32, 64, 128, 256])
        TernaryCase(
            rng.randint(1, 200),
            rng.randint(1, 700),
            (group or 32) * rng.randint(1, 30),
            group=group,
            extras=rng.random() < 0.5,
            device="cuda",
        ).check_on_the_gpu()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 16, 40])
def test_the_same_input_gives_the_same_bits_and_the_residual_may_be_the_output(rows):
    TernaryCase(rows, 4096, 4096, device="cuda").check_the_bits_and_the_residual_as_output()
