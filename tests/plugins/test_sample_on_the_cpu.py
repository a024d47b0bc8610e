"""The drawing kernel's source, compiled for a CPU and held to the reference: the arithmetic and the meetings, not the GPU."""

import random

import numpy as np
import pytest
import torch
from on_the_cpu import PLUGINS, Kernels
from sample_cases import KINDS, check_logprobs, logits_of, random_terms

from plugins_trt.sample.contract import WORKSPACE
from plugins_trt.sample.reference import draw_with_terms
from plugins_trt.sample.rows import LOGPROB_WORDS, ROW_WORDS, RowWriter, Terms, mask_words

ENTRIES = 2000
HISTOGRAM = 1024 * 12


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return Kernels([PLUGINS / "sample" / "sample.cu"], tmp_path_factory.mktemp("on_the_cpu"))


class Rows:
    """One launch's memory."""

    def __init__(self, logits, settings, terms, workspace=None, *, largest_known=False):
        rows, self.vocabulary = logits.shape
        self.logits = logits.numpy().copy()
        temperatures, top_ks, top_ps, numbers = zip(*settings, strict=True)
        self.columns = (
            np.array(temperatures, np.float32), np.array(top_ks, np.int32), np.array(top_ps), np.array(numbers),
        )  # fmt: skip
        self.largest_known = largest_known
        self.ids = self.logits.argmax(1).astype(np.int32) if largest_known else np.full(rows, -7, np.int32)
        self.workspace = np.zeros(rows * WORKSPACE, np.uint8) if workspace is None else workspace
        self.options = np.full((rows, ROW_WORDS), -1, np.int32)
        self.entries = np.full((ENTRIES, 2), -1, np.int32)
        self.raw = np.full(ENTRIES, np.nan, np.float32)
        self.masks = np.full((rows, mask_words(self.vocabulary)), -1, np.int32)
        self.logprobs = np.full((rows, LOGPROB_WORDS), -1, np.int32)
        writer = RowWriter(self.options, self.entries, self.masks)
        writer.clear()
        for place, each in enumerate(terms):
            if each is not None:
                assert writer.room(each)
                writer.write(place, each)

    def run(self, kernels, blocks):
        pointers = (
            self.logits, *self.columns, self.ids, self.workspace, self.options, self.entries, self.raw, self.masks,
            self.logprobs,
        )  # fmt: skip
        sizes = (self.vocabulary, self.vocabulary, self.masks.shape[1], self.largest_known, 0)
        values = (*(each.ctypes.data for each in pointers), *sizes)
        kernels.run(
            "sample_f32",
            "PPPPPPPPPPPPqiiii",
            values,
            (blocks, len(self.ids)),
            lazy=False,
            threads=64,
            together=blocks,
        )
        return self.ids


def settings_of(rng):
    return (
        rng.choice([0.0, 0.01, 0.7, 1.0, 2.5, 50.0]),
        rng.choice([0, 0, 1, 7, 50, 700, 10**6]),
        rng.choice([1.0, 1.0, 0.95, 0.3, 1e-9]),
        rng.randrange(2**32) / 2**32,
    )


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_it_draws_what_the_reference_draws(kernels, kind, blocks):
    rng = random.Random(f"{kind} {blocks}")
    vocabulary = rng.choice([61, 1024, 3000])
    logits = logits_of(kind, 4, vocabulary, torch.Generator().manual_seed(vocabulary))
    settings = [settings_of(rng) for _ in logits]
    terms = [random_terms(vocabulary, rng) for _ in logits]
    rows = Rows(logits, settings, terms)
    found = rows.run(kernels, blocks).tolist()
    for row, (temperature, top_k, top_p, number) in enumerate(settings):
        drawn = draw_with_terms(
            logits[row], terms[row], temperature=temperature, top_k=top_k, top_p=top_p, number=number
        )
        assert found[row] == drawn.token_id, (row, settings[row], terms[row])
        if terms[row].logprobs >= 0 and drawn.token_id >= 0:
            check_logprobs(rows.logprobs[row], drawn, terms[row])
    check_left(rows.workspace)


def check_left(workspace):
    """What the next launch needs: nobody waits any more, and the first histogram is all zeros."""
    space = workspace.reshape(-1, WORKSPACE)
    assert not space[:, :4].any()
    assert not space[:, -3 * HISTOGRAM : -2 * HISTOGRAM].any()


@pytest.mark.parametrize("blocks", [1, 3])
def test_the_largest_logit_may_be_known_and_launches_follow_one_another(kernels, blocks):
    rng = random.Random(blocks)
    workspace = np.zeros(4 * WORKSPACE, np.uint8)
    for kind in KINDS:
        logits = logits_of(kind, 4, 700, torch.Generator().manual_seed(7))
        settings = [settings_of(rng) for _ in logits]
        terms = [random_terms(700, rng) if rng.random() < 0.3 else None for _ in logits]
        rows = Rows(logits, settings, terms, workspace, largest_known=True)
        found = rows.run(kernels, blocks).tolist()
        for row, (temperature, top_k, top_p, number) in enumerate(settings):
            drawn = draw_with_terms(
                logits[row],
                terms[row] or Terms(),
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                number=number,
            )
            assert found[row] == drawn.token_id, (kind, row, settings[row], terms[row])
        check_left(workspace)
