"""Ternary weights as 16-bit ones: the reference, the kernel run on the CPU, and on a GPU."""

from __future__ import annotations

import pytest
import torch
from decode_cases import array, gpu
from linear_cases import ROW, TernaryCase
from on_the_cpu import PLUGINS, Kernels

from plugins_trt.contract import LaunchError
from plugins_trt.ternary_linear.contract import TernaryWiden
from plugins_trt.ternary_linear.launch import _WIDEN_FORMAT, TernaryWidener, _pack_widen
from plugins_trt.ternary_linear.reference import widen_rows

PARTS = [  # outputs and inputs, options, the first row and how many
    ((48, 1280), {"group": 128}, (0, 48)),
    ((37, 160), {"group": 32, "dtype": "float16"}, (16, 21)),
    (
        (96, 64),
        {"group": 64, "gated": True, "dtype": "float16"},
        (40, 24),
    ),  # the end of gate, the beginning of up
    ((64, 256), {"group": ROW, "gated": True}, (0, 64)),
]


def arguments(case, first, rows):
    """Of rows of a case's weight, and where they go."""
    outputs, inputs = case.weight.shape
    out = torch.full((rows, inputs), float("nan"), dtype=case.x.dtype, device=case.x.device)
    return TernaryWiden(
        array(case.tiles), array(case.scales), array(out), outputs, first, gated=case.gated
    ), out


def expected(case, first, rows):
    """The same rows of the file's weight, rounded."""
    return case.weight[first : first + rows].to(case.x)


@pytest.mark.parametrize(("sizes", "options", "part"), PARTS)
def test_the_reference_gives_the_files_rows(sizes, options, part):
    case, (first, rows) = TernaryCase(1, *sizes, **options), part
    found = widen_rows(
        case.tiles,
        case.scales,
        outputs=sizes[0],
        inputs=sizes[1],
        first=first,
        rows=rows,
        gated=case.gated,
    )
    assert torch.equal(found, case.weight[first : first + rows])


def test_arguments_are_refused_by_name():
    case = TernaryCase(1, 48, 128)
    good = vars(arguments(case, 8, 16)[0])

    def refused(**changes):
        with pytest.raises(LaunchError) as caught:
            TernaryWiden(**{**good, **changes})
        return str(caught.value)

    assert refused(tiles=array(case.tiles.float())).startswith("tiles: dtype")
    assert refused(scales=array(case.scales[:1])).startswith("scales: shape")
    assert refused(outputs=64).startswith("outputs: 64, must be those of 3 tiles")
    assert refused(out=array(torch.zeros(16, 512, dtype=torch.float16))).startswith(
        "inputs: 512, must be at most 2"
    )
    assert refused(out=array(torch.zeros(16, 128))).startswith("out: dtype float32")
    assert refused(first=4).startswith("first: 4, must be a multiple of 8")
    assert refused(first=48).startswith("first: 48")
    assert refused(first=40).startswith("out: 16 rows, must be at most 8")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> Kernels:
    return Kernels([PLUGINS / "ternary_linear" / "widen.cu"], tmp_path_factory.mktemp("on_the_cpu"))


@pytest.mark.parametrize(("sizes", "options", "part"), PARTS)
def test_the_kernels_text_widens(kernels, sizes, options, part):
    case = TernaryCase(1, *sizes, **options)
    args, out = arguments(case, *part)
    suffix = "f16" if case.dtype == "float16" else "bf16"
    grid = (-(-sizes[1] // 1024), -(-part[1] // 8))
    kernels.run(f"ternary_widen_{suffix}", _WIDEN_FORMAT, _pack_widen(args), grid, lazy=False)
    assert torch.equal(out, expected(case, *part))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("sizes", "options", "part"),
    [
        *PARTS,
        ((4608, 4096), {}, (0, 4608)),
        ((32768, 4096), {"group": 32, "gated": True}, (8192, 8192)),
        ((4096, 16384), {"group": ROW}, (2048, 2048)),
    ],
)
def test_every_weight_on_a_gpu_is_the_files(sizes, options, part, dtype):
    case = TernaryCase(1, *sizes, **{**options, "dtype": dtype}, device="cuda")
    args, out = arguments(case, *part)
    TernaryWidener(gpu().kernels.operator("ternary_linear"), dtype=dtype)(args, gpu().stream)
    gpu().stream.synchronize()
    assert torch.equal(out, expected(case, *part))
