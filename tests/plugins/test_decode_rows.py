"""The small operators of a step: norm, gate, embedding, greedy choice."""

import pytest
import torch
from decode_cases import TOLERANCE, array, error, gpu

from plugins_trt.argmax.contract import Argmax
from plugins_trt.argmax.launch import Argmaxer
from plugins_trt.argmax.reference import argmax
from plugins_trt.contract import LaunchError
from plugins_trt.embedding.contract import Embedding
from plugins_trt.embedding.launch import Embedder
from plugins_trt.embedding.reference import embedding
from plugins_trt.rms_norm.contract import RmsNorm
from plugins_trt.rms_norm.launch import RmsNormalizer
from plugins_trt.rms_norm.reference import rms_norm
from plugins_trt.silu_mul.contract import SiluMul
from plugins_trt.silu_mul.launch import SiluMultiplier
from plugins_trt.silu_mul.reference import silu_mul

BOTH = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("rows", [5, 65])
@pytest.mark.parametrize("hidden", [8, 576, 1024, 4096, 8200, 16384])
def test_rms_norm_equals_the_reference(dtype, hidden, rows):
    rig = gpu()
    x, y = (torch.randn(rows, hidden, device="cuda").to(getattr(torch, dtype)) for _ in range(2))
    weight = (1 + 0.1 * torch.randn(hidden, device="cuda")).to(x.dtype)
    launch = RmsNormalizer(rig.kernels.operator("rms_norm"), dtype=dtype)
    for branch in (None, y):
        residual, out = x.clone(), torch.full_like(x, float("nan"))
        expected = rms_norm(x, weight, branch, scale=0.2475, epsilon=1e-5)
        args = RmsNorm(
            array(residual),
            array(weight),
            array(out),
            None if branch is None else array(branch),
            scale=0.2475,
            epsilon=1e-5,
        )
        launch(args, rig.stream)
        rig.stream.synchronize()
        assert error(residual, expected[0]) < TOLERANCE[dtype]
        assert error(out, expected[1]) < TOLERANCE[dtype]


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("size", [8, 1536, 4096, 16384])
def test_silu_mul_takes_the_halves_of_a_projection(dtype, size):
    rig = gpu()
    both = (4 * torch.randn(7, 2 * size, device="cuda")).to(getattr(torch, dtype))
    gate, up = both.split(size, 1)
    out = torch.full((7, size), float("nan"), dtype=both.dtype, device="cuda")
    SiluMultiplier(rig.kernels.operator("silu_mul"), dtype=dtype)(
        SiluMul(array(gate), array(up), array(out)), rig.stream
    )
    rig.stream.synchronize()
    assert error(out, silu_mul(gate, up)) < TOLERANCE[dtype]


@pytest.mark.gpu
@BOTH
def test_embedding_scales_rows_and_zeroes_padding(dtype):
    rig = gpu()
    table = torch.randn(500, 576, device="cuda").to(getattr(torch, dtype))
    ids = torch.tensor([3, 499, -1, 0, 500], dtype=torch.int32, device="cuda")
    out = torch.full((5, 576), float("nan"), dtype=table.dtype, device="cuda")
    launch = Embedder(rig.kernels.operator("embedding"), dtype=dtype)
    launch(Embedding(array(ids), array(table), array(out), scale=12.0), rig.stream)
    rig.stream.synchronize()
    assert torch.equal(out, embedding(ids, table, 12.0))
    assert not out[2].any()
    assert not out[4].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("size", [1, 31, 1000, 73448])
def test_argmax_takes_the_smaller_of_equal_ids(dtype, size):
    rig = gpu()
    logits = torch.randn(9, size + 8, device="cuda").to(getattr(torch, dtype))[:, :size]
    logits[1] = logits[1].round()
    logits[2] = 0.0
    logits[3] = float("-inf")
    logits[4, size // 2] = float("nan")
    logits[5, size - 1] = float("inf")
    ids = torch.full((9,), -7, dtype=torch.int32, device="cuda")
    launch = Argmaxer(rig.kernels.operator("argmax"), dtype=dtype)
    launch(Argmax(array(logits), array(ids)), rig.stream)
    rig.stream.synchronize()
    assert torch.equal(ids, argmax(logits))


def test_references_hold_to_torch():
    x = torch.randn(3, 64)
    assert torch.allclose(
        rms_norm(x, torch.ones(64))[1], torch.nn.functional.rms_norm(x, (64,), eps=1e-6), atol=1e-6
    )
    assert torch.equal(
        argmax(torch.tensor([[1.0, 3.0, 3.0], [float("nan"), 0.0, -1.0]])), torch.tensor([1, 1])
    )
    ids = torch.tensor([1, -1])
    assert torch.equal(embedding(ids, x, 2.0), torch.stack([2 * x[1], 0 * x[1]]))
    assert torch.allclose(silu_mul(x, x), torch.nn.functional.silu(x) * x)


def test_arguments_are_refused_by_name():
    x = torch.zeros(2, 64, dtype=torch.float16)
    for make, name in (
        (lambda: RmsNorm(array(x), array(x[0].float()), array(x)), "weight"),
        (lambda: RmsNorm(array(x[:, :63].contiguous()), array(x[0]), array(x)), "residual"),
        (lambda: SiluMul(array(x), array(x.T), array(x)), "up"),
        (lambda: Embedding(array(torch.zeros(2)), array(x), array(x)), "ids"),
        (lambda: Argmax(array(x.T), array(torch.zeros(64, dtype=torch.int32))), "logits"),
    ):
        with pytest.raises(LaunchError, match=f"^{name}: "):
            make()
