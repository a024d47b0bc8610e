"""Products with 4-bit weights: the layout with its reference, the arguments, and how a product is cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from decode_cases import array, error
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_cases import W4A16Case

from plugins_trt.contract import LaunchError
from plugins_trt.packed.tiles import rows_of_tiles, tiles_of
from plugins_trt.w4a16_linear import layout
from plugins_trt.w4a16_linear.contract import FEW_ROWS, MAX_ROWS, LinearPlan, tiles_of_block
from plugins_trt.w4a16_linear.reference import w4a16_linear, widen

# ---------------------------------------------------------------- the layout and its reference


@settings(max_examples=30, deadline=None)
@given(
    tiles=st.integers(1, 5), rest=st.integers(0, 15), steps=st.integers(1, 5), group=st.sampled_from([64, 128]),
    gated=st.booleans(),
)  # fmt: skip
def test_the_layout_holds_every_weight_once(tiles, rest, steps, group, gated):
    outputs = 16 * tiles if gated else max(1, 16 * tiles - rest)
    case = W4A16Case(2, outputs, group * steps, group=group, gated=gated)
    rows = torch.from_numpy(rows_of_tiles(outputs, gated=gated))
    wide = widen(case.tiles, case.groups)
    assert torch.equal(wide[rows >= 0], case.weight[rows[rows >= 0]])
    assert not wide[rows < 0].any()
    assert sorted(rows[rows >= 0].tolist()) == list(range(outputs))
    result = w4a16_linear(
        case.x,
        case.tiles,
        case.groups,
        outputs=case.columns,
        bias=case.bias,
        residual=case.residual,
        gated=gated,
    )
    assert error(result, case.expected()) < 1e-5


def test_a_lanes_words_hold_pairs_where_a_register_has_them():
    """By the description: lane 4 g + t, inputs 8 j + 2 t and 8 j + 2 t + 1 of outputs g and g + 8, the even one below."""
    numbers = np.arange(16 * 64, dtype=np.uint32).reshape(16, 64) * 7 % 31 % 16
    packed = sum(numbers[:, place::8] << np.uint32(4 * place) for place in range(8)).astype(np.uint32)
    tile = layout.pack_tiles(packed)[0, 0]
    for g in range(8):
        for t in range(4):
            for word in range(4):
                output = g + 8 * (word // 2)
                for pair in range(4):
                    first = 32 * (word % 2) + 8 * pair + 2 * t
                    two = int(tile[4 * g + t, word]) >> 4 * pair & 0x000F000F
                    assert two & 15 == numbers[output, first]
                    assert two >> 16 == numbers[output, first + 1]


# ---------------------------------------------------------------- the contract


@pytest.mark.parametrize("gated", [False, True])
def test_launches_cover_every_row_once(gated):
    for rows in range(1, 71):
        case = W4A16Case(rows, 16, 64, gated=gated)
        out, row = case.poisoned(), 0
        for args in case.launches(out):
            assert 1 <= args.rows <= MAX_ROWS
            for held, whole in ((args.x, case.x), (args.out, out), (args.residual, case.residual)):
                assert (held is None) == (whole is None)
                assert held is None or held.pointer == whole[row:].data_ptr()
            row += args.rows
        assert row == rows


def test_arguments_are_refused_by_name():
    case = W4A16Case(20, 48, 256, group=128)
    args, _ = case.arguments()

    def refused(**changes):
        with pytest.raises(LaunchError) as caught:
            replace(args, **changes).plan(132)
        return str(caught.value)

    assert refused(x=array(case.x.float())).startswith("x: dtype float32")
    assert refused(x=array(torch.zeros(65, 256, dtype=torch.bfloat16))).startswith("x: shape (65, 256)")
    assert refused(x=array(torch.zeros(20, 128, dtype=torch.bfloat16))).startswith("x: shape")
    assert refused(tiles=array(case.tiles.float())).startswith("tiles: dtype")
    assert refused(groups=array(case.groups[:2].contiguous())).startswith("groups: shape")
    assert refused(groups=array(torch.zeros(3, 1, 8, 2, dtype=torch.int32))).startswith(
        "group: 256, must be one of"
    )
    assert refused(groups=array(torch.zeros(3, 3, 8, 2, dtype=torch.int32))).startswith(
        "groups: 3 groups of 256"
    )
    assert refused(out=array(torch.zeros(20, 20, dtype=torch.bfloat16)), residual=None, bias=None).startswith(
        "out: shape (20, 20), must be of 3 tiles"
    )
    assert refused(bias=array(case.bias[:5])).startswith("bias: shape")
    assert refused(residual=array(case.residual[:5])).startswith("residual: shape")
    gated = W4A16Case(2, 32, 128, gated=True)
    with pytest.raises(LaunchError, match=r"^residual: given, but gated"):
        replace(gated.arguments()[0], residual=array(torch.zeros(2, 16, dtype=torch.bfloat16)))
    for sizes, name in (
        ((16, 96, 64), "inputs: 96"),
        ((16, 64, 32), "group: 32"),
        ((0, 64, 64), "outputs: 0"),
    ):
        with pytest.raises(LaunchError, match=f"^{name}"):
            layout.check_sizes(*sizes)
    with pytest.raises(LaunchError, match=r"^outputs: 24, must be a multiple of 16"):
        layout.check_sizes(24, 64, 64, gated=True)
    large = W4A16Case(20, 48, 4096, extras=False)
    with pytest.raises(LaunchError, match=r"^workspace: missing, this product needs"):
        replace(large.arguments()[0], workspace=None).plan(132)


@given(
    rows=st.integers(1, 64), outputs=st.integers(1, 40000), steps=st.integers(1, 300),
    multiprocessors=st.sampled_from([14, 16, 82, 132, 170]),
)  # fmt: skip
def test_a_plan_leaves_no_multiprocessor_idle_that_it_could_use(rows, outputs, steps, multiprocessors):
    plan = LinearPlan.of(rows=rows, outputs=outputs, inputs=64 * steps, multiprocessors=multiprocessors)
    assert plan.splits in (1, 2, 4, 8)
    if rows <= FEW_ROWS:
        assert plan == LinearPlan(1, 0)
    else:
        blocks = -(-tiles_of(outputs) // tiles_of_block(rows)) * plan.splits
        assert blocks <= max(multiprocessors, blocks // plan.splits)
        assert plan.splits == 1 or steps // plan.splits >= 8
        if plan.splits < 8 and 2 * blocks <= multiprocessors:
            assert steps // (2 * plan.splits) < 8
    assert plan.splits == 1 or plan.workspace_bytes >= 4 * 16 * plan.splits * rows * -(-outputs // 16)
    larger = LinearPlan.of(rows=rows, outputs=outputs, inputs=64 * steps, multiprocessors=multiprocessors + 5)
    assert larger.workspace_bytes >= plan.workspace_bytes
