"""Products with 4-bit weights: the kernels run on the CPU, and on a GPU."""

from __future__ import annotations

import random

import pytest
from decode_cases import error
from linear_cases import EIGHT_B_LAYERS, TOLERANCE, W4A16Case
from on_the_cpu import PLUGINS, Kernels

from plugins_trt.w4a16_linear.contract import LinearPlan
from plugins_trt.w4a16_linear.launch import _FORMAT, _REDUCERS, FEW, FEW_IN_SHARES, MANY, pack

# ---------------------------------------------------------------- the kernels on the CPU


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> Kernels:
    sources = [PLUGINS / "w4a16_linear" / name for name in ("few.cu", "many.cu")]
    return Kernels(sources, tmp_path_factory.mktemp("on_the_cpu"))


def run_on_the_cpu(kernels, name, case, plan, grid, *, threads, lazy, unit=1):
    args, out = case.arguments()
    prefix = "w4a16_gated" if args.gated else "w4a16"
    suffix = "f16" if case.dtype == "float16" else "bf16"
    values = pack(args, plan, unit=unit)
    family, _, form = name.partition("_")
    kernels.run(
        f"{prefix}_{family}_{suffix}_{form}_g{args.group}", _FORMAT, values, grid, lazy=lazy, threads=threads
    )
    if plan.splits > 1:
        grid = (-(-case.columns // (4 * _REDUCERS)), len(case.x))
        kernels.run(f"{prefix}_reduce_{suffix}", _FORMAT, values, grid, lazy=lazy, threads=_REDUCERS)
    assert error(out, case.expected()) < TOLERANCE


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(
    ("kind", "sizes", "options", "cut"),
    [
        (FEW[0], (1, 107, 1152), {"group": 128}, (3, 1)),  # a warp takes one round or two; turns that overlap
        (FEW[1], (1, 16, 576), {"group": 64}, (1, 1)),  # an odd number of steps, fewer tiles than a turn takes
        (FEW[2], (1, 140, 640), {"group": 64, "dtype": "float16"}, (3, 1)),
        (FEW[3], (1, 160, 512), {"group": 128, "gated": True, "dtype": "float16"}, (2, 4)),  # warps without a share
        (FEW[4], (8, 48, 576), {"group": 64, "gated": True}, (2, 1)),
        (FEW[5], (5, 80, 1024), {"group": 128, "extras": False}, (2, 2)),
        (FEW[6], (10, 112, 640), {"group": 64}, (2, 1)),
        (FEW[7], (16, 48, 1152), {"group": 128, "dtype": "float16"}, (2, 1)),
        (FEW[8], (11, 30, 640), {"group": 64, "extras": False}, (2, 1)),
    ],
)  # fmt: skip
def test_the_text_of_the_kernels_of_few_rows_computes_the_product(
    kernels, kind, *, sizes, options, cut, lazy
):
    case, (blocks, unit) = W4A16Case(*sizes, **options), cut
    plan = LinearPlan(1, 0)
    run_on_the_cpu(kernels, f"few_{kind.name}", case, plan, (blocks, 1), threads=256, lazy=lazy, unit=unit)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((16, 128, 2304), {"group": 128}),  # a warp takes one round or two
        ((11, 107, 1088), {"group": 64, "extras": False}),  # an odd number of steps, warps without a share, a part of a tile
        ((9, 84, 640), {"group": 128, "dtype": "float16"}),  # tiles behind the last
    ],
)  # fmt: skip
def test_the_text_of_the_kernels_that_share_inputs_out_computes_the_product(kernels, sizes, options, lazy):
    # (There are no clusters here: the shares are added up as those of other kernels are.)
    case, kind = W4A16Case(*sizes, **options), FEW_IN_SHARES
    grid = (-(-case.tiles.shape[0] // kind.tiles), kind.shares)
    plan, form = LinearPlan(kind.shares, 0), f"few_{kind.name}"
    run_on_the_cpu(kernels, form, case, plan, grid, threads=256, lazy=lazy, unit=kind.tiles)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(
    ("kind", "sizes", "options", "grid"),
    [
        (MANY[0], (7, 144, 576), {"group": 64}, (2, 1)),  # an odd number of steps
        (MANY[1], (13, 208, 1024), {"group": 128, "gated": True, "dtype": "float16"}, (2, 1)),
        (MANY[2], (29, 300, 640), {"group": 128}, (2, 2)),
        (MANY[3], (60, 48, 576), {"group": 64, "gated": True}, (1, 2)),
        (MANY[3], (41, 144, 256), {"group": 128, "extras": False, "dtype": "float16"}, (1, 1)),
    ],
)  # fmt: skip
def test_the_text_of_the_kernels_of_many_rows_computes_the_product(
    kernels, kind, *, sizes, options, grid, lazy
):
    case, plan = W4A16Case(*sizes, **options), LinearPlan(grid[1], 0)
    run_on_the_cpu(kernels, f"many_n{kind.rows}", case, plan, grid, threads=kind.threads, lazy=lazy)


# ---------------------------------------------------------------- the kernels on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("group", "gated"), [(64, False), (128, False), (128, True)])
def test_every_number_of_rows_equals_the_reference(dtype, group, gated):
    for rows in range(1, 71):
        W4A16Case(
            rows,
            16 * (rows % 13 + 1),
            128 * (rows % 9 + 1),
            group=group,
            dtype=dtype,
            gated=gated,
            device="cuda",
            symmetric=rows % 2 == 0,
        ).check_on_the_gpu()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 16, 17, 32, 64])
@pytest.mark.parametrize(("outputs", "inputs", "gated"), EIGHT_B_LAYERS)
def test_the_layers_of_an_8b_model_equal_the_reference(rows, outputs, inputs, gated):
    for symmetric in (False, True):
        case = W4A16Case(rows, outputs, inputs, group=128, gated=gated, device="cuda", symmetric=symmetric)
        case.check_on_the_gpu()


@pytest.mark.gpu
def test_odd_sizes_equal_the_reference():
    rng = random.Random(0)
    for _ in range(60):
        W4A16Case(
            rng.randint(1, 64),
            rng.randint(1, 700),
            64 * rng.randint(1, 40),
            extras=rng.random() < 0.5,
            device="cuda",
        ).check_on_the_gpu()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 40])
def test_the_same_input_gives_the_same_bits_and_the_residual_may_be_the_output(rows):
    W4A16Case(rows, 4096, 4096, group=128, device="cuda").check_the_bits_and_the_residual_as_output()
