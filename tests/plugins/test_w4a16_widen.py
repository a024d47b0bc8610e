"""4-bit weights into 16-bit ones: the contract, the kernel's text on the CPU, and on a GPU."""

from __future__ import annotations

import pytest
import torch
from decode_cases import array, gpu
from linear_cases import W4A16Case
from on_the_cpu import PLUGINS, Kernels

from plugins_trt.contract import LaunchError
from plugins_trt.w4a16_widen.contract import W4A16Widen
from plugins_trt.w4a16_widen.launch import _FORMAT, W4A16Widener, pack
from plugins_trt.w4a16_widen.reference import widen_rows


class Case(W4A16Case):
    """Random weights; what is written besides the rows asked for would overwrite NaN."""

    def __init__(self, outputs, inputs, **options):
        super().__init__(1, outputs, inputs, **options)
        self.outputs = outputs

    def widening(self, first, rows):
        whole = torch.full((rows + 9, self.weight.shape[1]), float("nan"), dtype=self.x.dtype)
        self.whole = whole.to(self.x.device)
        out = array(self.whole[:rows])
        return W4A16Widen(array(self.tiles), array(self.groups), out, self.outputs, first, gated=self.gated)

    def check(self, first, rows):
        assert torch.equal(self.whole[:rows], self.weight[first : first + rows].to(self.x))
        assert self.whole[rows:].isnan().all()


PARTS = [
    # outputs and inputs; options; first row and number of rows
    ((48, 64), {}, (0, 48)),
    ((48, 576), {"dtype": "float16"}, (8, 40)),
    ((21, 128), {"group": 128}, (16, 5)),  # the end of a last tile that is not full
    ((64, 640), {"gated": True, "group": 128}, (0, 64)),
    ((96, 64), {"gated": True, "dtype": "float16"}, (40, 24)),  # the end of gate, the beginning of up
]


@pytest.mark.parametrize(("sizes", "options", "part"), PARTS)
def test_the_reference_gives_the_files_rows(sizes, options, part):
    case, (first, rows) = Case(*sizes, **options), part
    found = widen_rows(
        case.tiles, case.groups, outputs=case.outputs, first=first, rows=rows, gated=case.gated
    )
    assert torch.equal(found, case.weight[first : first + rows])


def test_arguments_are_refused_by_name():
    case = Case(48, 128)
    good = vars(case.widening(8, 16))

    def refused(**changes):
        with pytest.raises(LaunchError) as caught:
            W4A16Widen(**{**good, **changes})
        return str(caught.value)

    assert refused(tiles=array(case.tiles.float())).startswith("tiles: dtype")
    assert refused(groups=array(case.groups[:1])).startswith("groups: shape")
    assert refused(outputs=64).startswith("outputs: 64, must be those of 3 tiles")
    assert refused(out=array(torch.zeros(16, 64, dtype=torch.float16))).startswith("out: shape")
    assert refused(out=array(torch.zeros(16, 128))).startswith("out: dtype float32")
    assert refused(first=4).startswith("first: 4, must be a multiple of 8")
    assert refused(first=48).startswith("first: 48")
    assert refused(first=40).startswith("out: 16 rows, must be at most 8")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> Kernels:
    return Kernels([PLUGINS / "w4a16_widen" / "w4a16_widen.cu"], tmp_path_factory.mktemp("on_the_cpu"))


@pytest.mark.parametrize(("sizes", "options", "part"), PARTS)
def test_the_kernels_text_widens(kernels, sizes, options, part):
    case = Case(*sizes, **options)
    args = case.widening(*part)
    suffix = "f16" if case.dtype == "float16" else "bf16"
    grid = (-(-sizes[1] // 512), -(-part[1] // 8))
    kernels.run(f"w4a16_widen_{suffix}", _FORMAT, pack(args), grid, lazy=False)
    case.check(*part)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("sizes", "options", "part"),
    [
        *PARTS,
        ((4608, 4096), {"group": 128}, (0, 4608)),
        ((32768, 4096), {"group": 128, "gated": True}, (8192, 8192)),
        ((4096, 16384), {}, (2048, 2048)),
    ],
)
def test_every_weight_on_a_gpu_is_the_references(sizes, options, part, dtype):
    rig = gpu()
    case = Case(*sizes, **{**options, "dtype": dtype}, device="cuda")
    args = case.widening(*part)
    W4A16Widener(rig.kernels.operator("w4a16_widen"), dtype=dtype)(args, rig.stream)
    rig.stream.synchronize()
    case.check(*part)
