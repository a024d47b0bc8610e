"""Products with 4-bit weights: the layout, the kernels run on the CPU, and on a GPU."""

from __future__ import annotations

import math
import random
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from decode_cases import array, error, gpu
from hypothesis import given, settings
from hypothesis import strategies as st
from on_the_cpu import PLUGINS, Kernels

from plugins_trt.contract import DeviceArray, LaunchError
from plugins_trt.packed import wide as packed_wide
from plugins_trt.registry import KernelsError
from plugins_trt.tensor_map import MAP_BYTES
from plugins_trt.w4a16_linear import layout
from plugins_trt.w4a16_linear.contract import FEW_ROWS, MAX_ROWS, LinearPlan, W4A16Linear, tiles_of_block
from plugins_trt.w4a16_linear.launch import _FORMAT, FEW, MANY, WIDE, W4A16Multiplier, pack
from plugins_trt.w4a16_linear.reference import w4a16_linear, widen

TOLERANCE = 5e-3


class Case:
    """A product of random numbers, and what it should give."""

    def __init__(
        self,
        rows,
        outputs,
        inputs,
        *,
        group=64,
        dtype="bfloat16",
        gated=False,
        extras=True,
        device="cpu",
        symmetric=False,
    ) -> None:
        rng = np.random.default_rng(rows * 1000 + outputs + inputs)
        generator = torch.Generator(device).manual_seed(rows)
        numbers = rng.integers(0, 16, (outputs, inputs), dtype=np.uint8)
        packed = np.zeros((outputs, inputs // 8), np.uint32)
        for place in range(8):
            packed |= numbers[:, place::8].astype(np.uint32) << np.uint32(4 * place)
        scales = (rng.random((outputs, inputs // group)) * 0.02 + 0.001).astype(np.float16)
        zeros = rng.integers(0, 16, (outputs, inputs // group), dtype=np.uint8)
        if symmetric:
            zeros[:] = 8
        self.symmetric = symmetric
        wide = numbers.reshape(outputs, -1, group).astype(np.float32) - zeros[..., None]
        self.weight = torch.from_numpy((wide * scales.astype(np.float32)[..., None]).reshape(outputs, inputs))
        tiles = layout.pack_tiles(packed, gated=gated).view(np.int32)
        groups = layout.pack_groups(scales, zeros, gated=gated).view(np.int32)
        self.tiles, self.groups = torch.from_numpy(tiles).to(device), torch.from_numpy(groups).to(device)
        kind = getattr(torch, dtype)

        def normal(*shape):
            return torch.randn(shape, generator=generator, device=device).to(kind)

        self.dtype, self.gated, self.columns = dtype, gated, outputs // 2 if gated else outputs
        self.x = normal(rows, inputs + 16)[:, :inputs]  # rows lie apart
        self.bias = normal(outputs) if extras else None
        self.residual = normal(rows, outputs) if extras and not gated else None
        self.keep: list[torch.Tensor] = []

    def poisoned(self):
        return torch.full((len(self.x), self.columns), float("nan"), dtype=self.x.dtype, device=self.x.device)

    def launches(self, out):
        """The arguments of each launch, as an executor cuts more rows than one takes."""
        for first in range(0, len(out), MAX_ROWS):
            yield self.arguments(out, slice(first, first + MAX_ROWS))[0]

    def arguments(self, out=None, rows=slice(None)):
        out = self.poisoned() if out is None else out
        # (Enough for as many shares of the inputs as there ever are.)
        sums = 8 * len(self.x[rows]) * self.tiles.shape[0] * 16
        workspace = torch.full((sums,), float("nan"), device=self.x.device)
        self.keep += [out, workspace]
        return W4A16Linear(
            x=array(self.x[rows]),
            tiles=array(self.tiles),
            groups=array(self.groups),
            out=array(out[rows]),
            bias=None if self.bias is None else array(self.bias),
            residual=None if self.residual is None else array(self.residual[rows]),
            workspace=array(workspace),
            gated=self.gated,
            symmetric=self.symmetric,
        ), out

    def expected(self):
        out = self.x.float() @ self.weight.to(self.x.device).t()
        if self.bias is not None:
            out = out + self.bias.float()
        if self.gated:
            return torch.nn.functional.silu(out[:, : self.columns]) * out[:, self.columns :]
        return out if self.residual is None else out + self.residual.float()


# ---------------------------------------------------------------- the layout and its reference


@settings(max_examples=30, deadline=None)
@given(
    tiles=st.integers(1, 5), rest=st.integers(0, 15), steps=st.integers(1, 5), group=st.sampled_from([64, 128]),
    gated=st.booleans(),
)  # fmt: skip
def test_the_layout_holds_every_weight_once(tiles, rest, steps, group, gated):
    outputs = 16 * tiles if gated else max(1, 16 * tiles - rest)
    case = Case(2, outputs, group * steps, group=group, gated=gated)
    rows = torch.from_numpy(layout.rows_of_tiles(outputs, gated=gated))
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
        case = Case(rows, 16, 64, gated=gated)
        out, row = case.poisoned(), 0
        for args in case.launches(out):
            assert 1 <= args.rows <= MAX_ROWS
            for held, whole in ((args.x, case.x), (args.out, out), (args.residual, case.residual)):
                assert (held is None) == (whole is None)
                assert held is None or held.pointer == whole[row:].data_ptr()
            row += args.rows
        assert row == rows


def test_arguments_are_refused_by_name():
    case = Case(20, 48, 256, group=128)
    args, _ = case.arguments()
    good = dict(vars(args))

    def refused(**changes):
        with pytest.raises(LaunchError) as caught:
            W4A16Linear(**{**good, **changes}).plan(132)
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
    gated = Case(2, 32, 128, gated=True)
    with pytest.raises(LaunchError, match=r"^residual: given, but gated"):
        W4A16Linear(
            **{**vars(gated.arguments()[0]), "residual": array(torch.zeros(2, 16, dtype=torch.bfloat16))}
        )
    for sizes, name in (
        ((16, 96, 64), "inputs: 96"),
        ((16, 64, 32), "group: 32"),
        ((0, 64, 64), "outputs: 0"),
    ):
        with pytest.raises(LaunchError, match=f"^{name}"):
            layout.check_sizes(*sizes)
    with pytest.raises(LaunchError, match=r"^outputs: 24, must be a multiple of 16"):
        layout.check_sizes(24, 64, 64, gated=True)
    large = Case(20, 48, 4096, extras=False)
    with pytest.raises(LaunchError, match=r"^workspace: missing, this product needs"):
        W4A16Linear(**{**vars(large.arguments()[0]), "workspace": None}).plan(132)


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
        blocks = -(-layout.tiles_of(outputs) // tiles_of_block(rows)) * plan.splits
        assert blocks <= max(multiprocessors, blocks // plan.splits)
        assert plan.splits == 1 or steps // plan.splits >= 8
        if plan.splits < 8 and 2 * blocks <= multiprocessors:
            assert steps // (2 * plan.splits) < 8
    assert plan.splits == 1 or plan.workspace_bytes >= 4 * 16 * plan.splits * rows * -(-outputs // 16)
    larger = LinearPlan.of(rows=rows, outputs=outputs, inputs=64 * steps, multiprocessors=multiprocessors + 5)
    assert larger.workspace_bytes >= plan.workspace_bytes


class Launches:
    """What a multiplier launched, on a device of a number of multiprocessors and so much shared memory."""

    def __init__(self, shared_bytes: int, multiprocessors: int, *, clusters: bool = False) -> None:
        self.launched: list[SimpleNamespace] = []
        self._clusters, self._shared_bytes, self._multiprocessors = clusters, shared_bytes, multiprocessors
        self.multiply = W4A16Multiplier(
            self.find, multiprocessors=multiprocessors, shared_bytes=shared_bytes, dtype="bfloat16"
        )

    def find(self, name: str, shared_bytes: int) -> SimpleNamespace:
        """As `registry.Kernels.operator` does."""
        has_warpgroups = self._clusters and self._shared_bytes > 200 << 10
        if (name == "w4a16_in_clusters" and not self._clusters) or ("_wide_" in name and not has_warpgroups):
            raise KernelsError(name)
        kernel = SimpleNamespace(overlaps=self._clusters)
        kernel.clusters_at_once = lambda _threads, _shared, size: (
            self._multiprocessors * 7 // 8 // size if size > 1 else self._multiprocessors
        )
        kernel.prepare = lambda layout, **_: kernel

        def launch(grid, block, stream, *arguments, shared_size=0, cluster=(1, 1, 1)):
            assert shared_size <= self._shared_bytes
            self.launched.append(
                SimpleNamespace(
                    name=name,
                    grid=grid,
                    threads=block[0],
                    arguments=arguments,
                    cluster=cluster,
                    shared=shared_size,
                )
            )

        kernel.prepared_async_call = launch
        return kernel


def encoded_boxes(patch):
    """The bytes of the boxes of every tensor map that is asked for, which must be such as the driver takes."""
    found = []

    def encode(pointer, dtype, shape, strides, box, *, swizzled=False):
        bytes_each = {"bfloat16": 2, "float16": 2, "int32": 4}[dtype]
        assert pointer % 16 == 0
        assert len(shape) == len(box) == len(strides) + 1
        assert all(stride % 16 == 0 and stride > 0 for stride in strides)
        assert all(1 <= size <= 256 for size in box)
        assert box[-1] * bytes_each % 16 == 0
        assert not swizzled or box[-1] * bytes_each == 128
        found.append(math.prod(box) * bytes_each)
        return bytes(MAP_BYTES)

    patch.setattr(packed_wide, "tensor_map", encode)
    return found


@given(
    rows=st.integers(1, 64), tiles=st.integers(1, 2500), steps=st.integers(1, 200), group=st.sampled_from([64, 128]),
    device=st.sampled_from([(101376, 128, False), (101376, 48, True), (166912, 16, False), (232448, 132, True)]),
)  # fmt: skip
@settings(deadline=None)
def test_every_product_finds_a_kernel_that_fits(rows, tiles, steps, group, device):
    steps *= group // 64
    shared_bytes, multiprocessors, clusters = device
    launches = Launches(shared_bytes, multiprocessors, clusters=clusters)

    def of(shape, dtype):
        return DeviceArray(pointer=4096, shape=shape, dtype=dtype, strides=None)

    plan = LinearPlan.of(rows=rows, outputs=16 * tiles, inputs=64 * steps, multiprocessors=multiprocessors)
    args = W4A16Linear(
        x=of((rows, 64 * steps), "bfloat16"),
        tiles=of((tiles, steps, 32, 4), "int32"),
        groups=of((tiles, 64 * steps // group, 8, 2), "int32"),
        out=of((rows, 16 * tiles), "bfloat16"),
        workspace=of((plan.workspace_bytes,), "uint8") if plan.workspace_bytes else None,
    )
    with pytest.MonkeyPatch.context() as patch:
        boxes = encoded_boxes(patch)
        launches.multiply(args)
    first = launches.launched[0]
    assert first.shared <= shared_bytes
    assert first.cluster in ((1, 1, 1), (1, first.grid[1], 1))
    assert first.cluster == (1, 1, 1) or clusters
    assert len(launches.launched) == (2 if first.grid[1] > first.cluster[1] else 1)
    if "_wide_" not in first.name:
        assert first.cluster == (1, first.grid[1] if clusters else 1, 1)
        assert first.grid[0] * first.grid[1] <= max(multiprocessors, first.grid[0])
    # No thread block has more tiles than its warps take.
    if "_many_" in first.name:
        assert first.grid[1] == plan.splits
        assert -(-tiles // first.grid[0]) <= tiles_of_block(rows)
    if "_wide_" in first.name:
        wide = next(kind for kind in WIDE if f"_{kind.name}_" in first.name)
        assert rows <= wide.rows
        assert -(-tiles // first.grid[0]) <= wide.tiles
        assert first.grid[1] <= min(8, -(-steps // 2))
        if len(launches.launched) == 2:
            assert 4 * 16 * first.grid[1] * rows * tiles <= plan.workspace_bytes
            assert first.grid[0] * first.grid[1] <= multiprocessors
        # What a round's copies bring finds room in a stage, and sums in the ring.
        assert 2 * boxes[0] + boxes[1] + boxes[2] <= first.shared // wide.stages
        assert wide.along_inputs * wide.rows * (16 * wide.tiles + 4) * 4 <= first.shared


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
        kernels.run(
            f"{prefix}_reduce_{suffix}", _FORMAT, values, (-(-case.columns // 256), len(case.x)), lazy=lazy
        )
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
    case, (blocks, unit) = Case(*sizes, **options), cut
    plan = LinearPlan(1, 0)
    run_on_the_cpu(kernels, f"few_{kind.name}", case, plan, (blocks, 1), threads=256, lazy=lazy, unit=unit)


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
    case, plan = Case(*sizes, **options), LinearPlan(grid[1], 0)
    run_on_the_cpu(kernels, f"many_n{kind.rows}", case, plan, grid, threads=kind.threads, lazy=lazy)


# ---------------------------------------------------------------- the kernels on a GPU


@lru_cache(maxsize=2)
def multiplier(dtype):
    rig = gpu()
    return W4A16Multiplier(
        rig.kernels.operator("w4a16_linear"),
        multiprocessors=rig.kernels.multiprocessors,
        shared_bytes=rig.kernels.shared_bytes,
        dtype=dtype,
    )


def run(case):
    out = case.poisoned()
    for args in case.launches(out):
        multiplier(case.dtype)(args, gpu().stream)
    gpu().stream.synchronize()
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("group", "gated"), [(64, False), (128, False), (128, True)])
def test_every_number_of_rows_equals_the_reference(dtype, group, gated):
    for rows in range(1, 71):
        case = Case(
            rows,
            16 * (rows % 13 + 1),
            128 * (rows % 9 + 1),
            group=group,
            dtype=dtype,
            gated=gated,
            device="cuda",
            symmetric=rows % 2 == 0,
        )
        assert error(run(case), case.expected()) < TOLERANCE, rows


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 16, 17, 32, 64])
@pytest.mark.parametrize(
    ("outputs", "inputs", "gated"),
    [
        (4608, 4096, False),
        (4096, 4096, False),
        (32768, 4096, True),
        (4096, 16384, False),
        (73448, 1024, False),
    ],
)
def test_the_layers_of_an_8b_model_equal_the_reference(rows, outputs, inputs, gated):
    for symmetric in (False, True):
        case = Case(rows, outputs, inputs, group=128, gated=gated, device="cuda", symmetric=symmetric)
        assert error(run(case), case.expected()) < TOLERANCE


@pytest.mark.gpu
def test_odd_sizes_equal_the_reference():
    rng = random.Random(0)
    for _ in range(60):
        case = Case(
            rng.randint(1, 64),
            rng.randint(1, 700),
            64 * rng.randint(1, 40),
            extras=rng.random() < 0.5,
            device="cuda",
        )
        assert error(run(case), case.expected()) < TOLERANCE, (case.x.shape, case.tiles.shape)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 40])
def test_the_same_input_gives_the_same_bits_and_the_residual_may_be_the_output(rows):
    case = Case(rows, 4096, 4096, group=128, device="cuda")
    first = run(case)
    assert torch.equal(first, run(case))
    args, _ = case.arguments()
    stream = case.residual.clone()
    in_place = W4A16Linear(**{**vars(args), "residual": array(stream), "out": array(stream)})
    multiplier(case.dtype)(in_place, gpu().stream)
    gpu().stream.synchronize()
    assert torch.equal(stream, first)
