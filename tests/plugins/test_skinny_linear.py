"""`skinny_linear`: its refusals, how it is cut, and on a GPU its results with poisoned outputs."""

import pytest
import torch
from decode_cases import TOLERANCE, array, error, gpu

from plugins_trt.contract import LaunchError, ceil_div
from plugins_trt.skinny_linear.contract import TILE, SkinnyGated, SkinnyLinear, grid
from plugins_trt.skinny_linear.launch import SkinnyLinearMultiplier
from plugins_trt.skinny_linear.reference import skinny_gated, skinny_linear


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(16, 32), (1, 64), (49, 96), (576, 576), (4608, 4096), (4096, 16384), (73448, 256)],
)
@pytest.mark.parametrize("wide", [False, True])
def test_it_equals_the_reference(dtype, outputs, inputs, wide):
    rig = gpu()
    kind = getattr(torch, dtype)
    multiply = SkinnyLinearMultiplier(
        rig.kernels.operator("skinny_linear"),
        multiprocessors=rig.kernels.multiprocessors,
        shared_bytes=rig.kernels.shared_bytes,
        dtype=dtype,
    )
    generator = torch.Generator("cuda").manual_seed(outputs + inputs)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda").to(kind)

    weight, bias = normal(outputs, inputs), normal(outputs)
    for rows in (1, 2, 7, 8, 9, 16):
        x = normal(rows, 2 * inputs)[:, inputs:]  # rows that lie apart
        out = torch.full(
            (rows + 1, outputs), float("nan"), dtype=torch.float32 if wide else kind, device="cuda"
        )
        for scale, added in ((1.0, None), (0.25, bias)):
            out.fill_(float("nan"))
            args = SkinnyLinear(
                array(x), array(weight), array(out[:rows]), None if added is None else array(added), scale
            )
            multiply(args, rig.stream)
            rig.stream.synchronize()
            expected = skinny_linear(x, weight, added, scale=scale, dtype=torch.float32)
            assert error(out[:rows], expected) < (1e-5 if wide else TOLERANCE[dtype] / 2)
            assert out[rows].isnan().all()
            first = out[:rows].clone()
            multiply(args, rig.stream)
            rig.stream.synchronize()
            assert torch.equal(first, out[:rows])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("outputs", "inputs"), [(8, 32), (11, 96), (96, 64), (1536, 576), (16384, 4096)])
def test_gated_equals_the_reference(dtype, outputs, inputs):
    rig = gpu()
    kind = getattr(torch, dtype)
    multiply = SkinnyLinearMultiplier(
        rig.kernels.operator("skinny_linear"),
        multiprocessors=rig.kernels.multiprocessors,
        shared_bytes=rig.kernels.shared_bytes,
        dtype=dtype,
    )
    generator = torch.Generator("cuda").manual_seed(outputs + inputs)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda").to(kind)

    weight, bias = normal(2 * outputs, inputs), normal(2 * outputs)
    for rows in (1, 8, 16):
        x = normal(rows, inputs) * inputs**-0.5
        for added in (None, bias):
            out = torch.full((rows + 1, outputs), float("nan"), dtype=kind, device="cuda")
            args = SkinnyGated(
                array(x), array(weight), array(out[:rows]), None if added is None else array(added)
            )
            multiply.gated(args, rig.stream)
            rig.stream.synchronize()
            assert error(out[:rows], skinny_gated(x, weight, added)) < TOLERANCE[dtype] / 2
            assert out[rows].isnan().all()


def test_thread_blocks_take_equal_shares():
    for outputs in (1, 16, 17, 4096, 4608, 32768, 73448):
        for blocks in (1, 16, 264):
            tiles = ceil_div(outputs, TILE)
            count = grid(outputs, blocks)
            assert count <= blocks
            assert ceil_div(tiles, count) == ceil_div(tiles, blocks)


def test_bad_arguments_are_refused_by_name():
    x, weight = torch.zeros(2, 64).bfloat16(), torch.zeros(8, 64).bfloat16()
    out = torch.zeros(2, 8).bfloat16()
    good = {"x": array(x), "weight": array(weight), "out": array(out)}
    SkinnyLinear(**good)

    def refused(**changes):
        with pytest.raises(LaunchError) as caught:
            SkinnyLinear(**{**good, **changes})
        return str(caught.value)

    assert refused(x=array(torch.zeros(17, 64).bfloat16())).startswith("x: shape (17, 64)")
    assert refused(x=array(x.half())).startswith("x: dtype")
    assert refused(weight=array(torch.zeros(8, 40).bfloat16())).startswith("weight: rows of 40")
    assert refused(out=array(out.half())).startswith("out: dtype")
    assert refused(out=array(torch.zeros(2, 9).bfloat16())).startswith("out: shape")
    assert refused(bias=array(torch.zeros(9).bfloat16())).startswith("bias: shape")
    gated = {"x": array(x), "weight": array(weight), "out": array(torch.zeros(2, 4).bfloat16())}
    SkinnyGated(**gated)
    with pytest.raises(LaunchError, match="weight: 7 rows"):
        SkinnyGated(**{**gated, "weight": array(torch.zeros(7, 64).bfloat16())})
    with pytest.raises(LaunchError, match="out: shape"):
        SkinnyGated(**{**gated, "out": array(out)})
