"""The drawing kernel, held to the reference row by row; its refusals."""

import pytest
import torch
from decode_cases import array, gpu

from plugins_trt.contract import LaunchError
from plugins_trt.sample.contract import Sample
from plugins_trt.sample.launch import Sampler
from plugins_trt.sample.reference import draw

SETTINGS = [
    (temperature, top_k, top_p)
    for temperature in (0.01, 0.7, 1.0, 2.5, 50.0)
    for top_k in (0, 1, 7, 50, 3000, 10**6)
    for top_p in (1.0, 0.95, 0.3, 1e-9)
]


def arguments(logits, rows, numbers):
    """Arguments of rows with these settings, and where their ids go."""

    def column(values, dtype):
        return torch.tensor(values, dtype=dtype, device=logits.device)

    temperatures, top_ks, top_ps = zip(*rows, strict=True)
    return {
        "temperatures": column(temperatures, torch.float32),
        "top_ks": column(top_ks, torch.int32),
        "top_ps": column(top_ps, torch.float64),
        "numbers": column(numbers, torch.float64),
        "ids": torch.full((len(rows),), -7, dtype=torch.int32, device=logits.device),
    }


def logits_of(kind, rows, vocabulary, generator):
    normal = torch.randn(rows, vocabulary, generator=generator, device="cuda")
    return {
        "spread": 3.0 * normal,
        "peaked": 10.0 * normal,
        "bfloat16": (2.0 * normal).bfloat16().float(),  # with many ties
        "coarse": (2.0 * normal).round(),
        "equal": torch.ones_like(normal),
        "forbidden": torch.where(normal > 0.5, normal, -torch.inf),
        "signed zeros": torch.where(normal > 0, 0.0, -0.0) + (normal > 2.5),
    }[kind]


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [61, 4096, 73448, 151936])
@pytest.mark.parametrize(
    "kind", ["spread", "peaked", "bfloat16", "coarse", "equal", "forbidden", "signed zeros"]
)
def test_it_draws_what_the_reference_draws(kind, vocabulary):
    rig = gpu()
    sampler = Sampler(rig.kernels.operator("sample"))
    generator = torch.Generator("cuda").manual_seed(vocabulary)
    logits = logits_of(kind, len(SETTINGS), vocabulary, generator)
    for _ in range(3):
        numbers = (
            torch.randint(0, 2**32, (len(SETTINGS),), generator=generator, device="cuda").double() / 2**32
        )
        tensors = arguments(logits, SETTINGS, numbers.tolist())
        args = Sample(logits=array(logits), **{name: array(tensor) for name, tensor in tensors.items()})
        torch.cuda.synchronize()
        sampler(args, rig.stream)
        rig.stream.synchronize()
        expected = draw(
            logits.cpu(),
            temperatures=tensors["temperatures"].cpu(),
            top_ks=tensors["top_ks"].long().cpu(),
            top_ps=tensors["top_ps"].cpu(),
            numbers=tensors["numbers"].cpu(),
        )
        # A number within rounding of a border may fall on either side of it: of so many tokens hardly ever.
        assert (tensors["ids"].cpu() != expected).sum() <= (1 if vocabulary > 5000 else 0)
        first = tensors["ids"].clone()
        sampler(args, rig.stream)
        rig.stream.synchronize()
        assert torch.equal(first, tensors["ids"])


@pytest.mark.gpu
def test_rows_without_a_temperature_are_left_alone():
    rig = gpu()
    sampler = Sampler(rig.kernels.operator("sample"))
    logits = torch.randn(3, 5000, device="cuda")
    tensors = arguments(logits, [(0.0, 0, 1.0), (1.0, 0, 1.0), (1e-39, 0, 1.0)], [0.5] * 3)
    sampler(Sample(logits=array(logits), **{n: array(t) for n, t in tensors.items()}), rig.stream)
    rig.stream.synchronize()
    ids = tensors["ids"].tolist()
    assert ids[0] == ids[2] == -7
    assert 0 <= ids[1] < 5000


def test_bad_arguments_are_refused_by_name():
    logits = torch.zeros(2, 9)
    good = {
        "logits": array(logits),
        **{n: array(t) for n, t in arguments(logits, [(1.0, 0, 1.0)] * 2, [0.0] * 2).items()},
    }
    Sample(**good)

    def refused(**changes):
        with pytest.raises(LaunchError) as caught:
            Sample(**{**good, **changes})
        return str(caught.value)

    assert refused(logits=array(logits.bfloat16())).startswith("logits: dtype")
    assert refused(top_ps=array(torch.zeros(2))).startswith("top_ps: dtype")
    assert refused(ids=array(torch.zeros(3, dtype=torch.int32))).startswith("ids: shape")
