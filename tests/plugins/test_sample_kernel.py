"""The drawing kernel, held to the reference row by row; its refusals."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from decode_cases import array, gpu
from sample_cases import KINDS, check_logprobs, logits_of, random_terms

from plugins_trt.contract import LaunchError
from plugins_trt.sample.contract import WORKSPACE, Options, Sample
from plugins_trt.sample.launch import Sampler, row_blocks
from plugins_trt.sample.reference import draw, draw_with_terms
from plugins_trt.sample.rows import LOGPROB_WORDS, ROW_WORDS, RowWriter, mask_words

SETTINGS = [
    (temperature, top_k, top_p)
    for temperature in (0.01, 0.7, 1.0, 2.5, 50.0)
    for top_k in (0, 1, 7, 50, 3000, 10**6)
    for top_p in (1.0, 0.95, 0.3, 1e-9)
]
ENTRIES = 30000


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
        "workspace": torch.zeros(len(rows) * WORKSPACE, dtype=torch.uint8, device=logits.device),
    }


def options_of(terms, vocabulary):
    """The memory of the options of rows with these terms, on the device; poisoned where nothing is written."""
    rows = np.full((len(terms), ROW_WORDS), -1, np.int32)
    entries = np.full((ENTRIES, 2), -1, np.int32)
    masks = np.full((len(terms), mask_words(vocabulary)), -1, np.int32)
    writer = RowWriter(rows, entries, masks)
    writer.clear()
    for place, each in enumerate(terms):
        if each is not None:
            assert writer.room(each)
            writer.write(place, each)
    return {
        "rows": torch.from_numpy(rows).cuda(),
        "entries": torch.from_numpy(entries).cuda(),
        "raw": torch.full((ENTRIES,), torch.nan, device="cuda"),
        "masks": torch.from_numpy(masks).cuda(),
        "logprobs": torch.full((len(terms), LOGPROB_WORDS), -1, dtype=torch.int32, device="cuda"),
    }


def sampler_of(rig):
    kernels = rig.kernels
    return Sampler(
        kernels.operator("sample"), multiprocessors=kernels.multiprocessors, capability=kernels.capability
    )


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [61, 4096, 73448, 151936])
@pytest.mark.parametrize("kind", KINDS)
def test_it_draws_what_the_reference_draws(kind, vocabulary):
    rig = gpu()
    sampler = sampler_of(rig)
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
            logits,
            temperatures=tensors["temperatures"],
            top_ks=tensors["top_ks"].long(),
            top_ps=tensors["top_ps"],
            numbers=tensors["numbers"],
        )
        # A number within rounding of a border may fall on either side of it: of so many tokens hardly ever.
        assert (tensors["ids"] != expected).sum() <= (1 if vocabulary > 5000 else 0)
        first = tensors["ids"].clone()
        tensors["ids"].copy_(logits.argmax(dim=1))
        torch.cuda.synchronize()
        sampler(replace(args, largest_known=True), rig.stream)
        rig.stream.synchronize()
        assert torch.equal(first, tensors["ids"])


@pytest.mark.gpu
@pytest.mark.parametrize(("vocabulary", "rows"), [(61, 7), (61, 64), (4096, 2), (4096, 24), (73448, 3)])
def test_rows_with_terms_are_drawn_as_the_reference_draws_them(vocabulary, rows):
    rig, rng = gpu(), random.Random(f"{vocabulary} {rows}")
    sampler = sampler_of(rig)
    generator = torch.Generator("cuda").manual_seed(vocabulary + rows)
    wrong = []
    workspace = torch.zeros(rows * WORKSPACE, dtype=torch.uint8, device="cuda")
    for kind in KINDS:
        logits = logits_of(kind, rows, vocabulary, generator)
        raw = logits.cpu()
        settings = [rng.choice([(0.0, 0, 1.0), *SETTINGS]) for _ in range(rows)]
        numbers = [rng.randrange(2**32) / 2**32 for _ in range(rows)]
        terms = [random_terms(vocabulary, rng) if rng.random() < 0.9 else None for _ in range(rows)]
        tensors = {**arguments(logits, settings, numbers), "workspace": workspace}
        options = options_of(terms, vocabulary)
        args = Sample(
            logits=array(logits),
            **{name: array(tensor) for name, tensor in tensors.items()},
            options=Options(**{name: array(tensor) for name, tensor in options.items()}),
        )
        torch.cuda.synchronize()
        sampler(args, rig.stream)
        rig.stream.synchronize()
        ids = tensors["ids"].tolist()
        for row, (temperature, top_k, top_p) in enumerate(settings):
            if terms[row] is None:
                assert (ids[row] == -7) == (temperature == 0)
                continue
            drawn = draw_with_terms(
                raw[row], terms[row], temperature=temperature, top_k=top_k, top_p=top_p, number=numbers[row]
            )
            if ids[row] != drawn.token_id:
                wrong.append((kind, row, settings[row], terms[row], ids[row], drawn.token_id))
            elif terms[row].logprobs >= 0 and drawn.token_id >= 0:
                check_logprobs(options["logprobs"][row].cpu().numpy(), drawn, terms[row])
    assert len(wrong) <= (1 if vocabulary * rows > 10**6 else 0), wrong


@pytest.mark.gpu
def test_rows_without_a_temperature_are_left_alone():
    rig = gpu()
    sampler = sampler_of(rig)
    logits = torch.randn(3, 5000, device="cuda")
    tensors = arguments(logits, [(0.0, 0, 1.0), (1.0, 0, 1.0), (1e-39, 0, 1.0)], [0.5] * 3)
    sampler(Sample(logits=array(logits), **{n: array(t) for n, t in tensors.items()}), rig.stream)
    rig.stream.synchronize()
    ids = tensors["ids"].tolist()
    assert ids[0] == ids[2] == -7
    assert 0 <= ids[1] < 5000


@pytest.mark.parametrize("resident", [2, 16, 32, 396])
@pytest.mark.parametrize("rows", [1, 2, 3, 64, 500])
def test_blocks_that_wait_for_each_other_are_resident_together(rows, resident):
    for vocabulary in (1, 5000, 73448, 262144):
        blocks = row_blocks(rows, vocabulary, resident)
        assert blocks == 1 or blocks * rows <= resident
        assert 1 <= blocks <= 32


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
    assert refused(workspace=array(torch.zeros(WORKSPACE, dtype=torch.uint8))).startswith(
        f"workspace: {WORKSPACE} bytes, 2 rows"
    )
    words = {"rows": (2, ROW_WORDS), "entries": (5, 2), "masks": (1, 1), "logprobs": (2, LOGPROB_WORDS)}
    options = {name: array(torch.zeros(shape, dtype=torch.int32)) for name, shape in words.items()}
    options["raw"] = array(torch.zeros(5))
    Sample(**good, options=Options(**options))
    for name in options:
        bad = {**options, name: array(torch.zeros(3, 3))}
        assert refused(options=Options(**bad)).startswith(f"options.{name}: ")
