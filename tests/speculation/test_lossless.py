"""The answer is the same with and without drafts: every way to draw, every constraint, any tree, any company."""

from __future__ import annotations

import json
import random
from functools import partial

import numpy as np
import pytest
from fixtures.small_models import model_files
from forced_drafts import GuessingDraft, forced
from requests_with_drafts import Job, answer_all

from edged.checkpoint.tokenizer import Tokenizer
from edged.config import AttentionConfig, ModelConfig
from edged.decoding.constraints.base import Grammar, lark_grammar, schema_grammar
from edged.decoding.constraints.masks import GrammarCompiler
from edged.decoding.detokenizer import Detokenizer
from edged.decoding.sampling import Sampling
from edged.decoding.stops import Stops
from edged.executor.torch_executor import TorchExecutor
from edged.speculation.prompt_lookup import PRIOR_RATES, PromptLookup
from edged.speculation.speculator import Speculator
from edged.worker.speculation import measure_steps

VOCABULARY = 257
SPARSE = AttentionConfig(mode="sparse", dense_below=80, top_k=2, window=64)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "on": {"type": "boolean"}},
    "required": ["name", "on"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small") / "model"
    folder.mkdir()
    for name, content in model_files(seed=3).items():
        (folder / name).write_bytes(content)
    return folder


def load(folder, **settings):
    settings = {"context_length": 512, "max_sequences": 4, "threads": 1, "prefill_chunk": 64, **settings}
    executor = TorchExecutor(ModelConfig(name="m", path=folder, **settings))
    executor.load(lambda *_: None)
    return executor


@pytest.fixture(scope="module", params=["dense", "sparse"])
def executor(request, folder):
    # In float64 nothing is nearly equal, so that two tokens could change places with the size of a step.
    return load(folder, dtype="float64", attention=SPARSE if request.param == "sparse" else AttentionConfig())


@pytest.fixture(scope="module")
def texts(folder):
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def grammars(texts):
    compiler = GrammarCompiler(texts, VOCABULARY)
    yield compiler
    compiler.close()


def ways_to_draw(random):
    """Sampling of every kind."""
    warm = {"temperature": 0.8, "seed": random.getrandbits(64)}
    ids = [random.randrange(VOCABULARY) for _ in range(6)]
    return [
        Sampling(),
        Sampling(**warm),
        Sampling(**warm, top_k=20, top_p=0.9),
        Sampling(**warm, min_p=0.02),
        Sampling(**warm, typical_p=0.8),
        Sampling(**warm, repetition_penalty=1.3, penalty_window=20),
        Sampling(**warm, presence_penalty=0.8, frequency_penalty=0.4),
        Sampling(presence_penalty=2.0, frequency_penalty=1.0),
        Sampling(repetition_penalty=1.5),
        Sampling(**warm, logit_bias=tuple((each, 3.0) for each in ids)),
        Sampling(logit_bias=tuple((each, 30.0) for each in ids[:2])),
        Sampling(bad_sequences=((ids[0],), (ids[1], ids[2]), tuple(ids[3:]))),
        Sampling(logprobs=True, top_logprobs=3),
        Sampling(**warm, logprobs=True, frequency_penalty=0.3),
    ]


def make_jobs(seed, texts, grammars, count):
    """Requests of every kind: prompts that repeat themselves, stops that end them, forms that they must have."""
    r = random.Random(seed)
    jobs = []
    while len(jobs) < count:
        for sampling in ways_to_draw(r):
            piece = [r.randrange(1, VOCABULARY) for _ in range(r.randint(3, 30))]
            prompt = (piece * 6)[: r.randint(8, 140)]
            most = r.randint(1, 40)
            kind = r.choice(["plain", "stops", "min_tokens", "schema", "lark"])
            stops, grammar = Stops(most), lambda: None
            if kind == "stops":
                ends = tuple(r.sample(range(VOCABULARY), 12))
                strings = tuple(
                    texts.token_text(each).decode("latin-1") for each in r.sample(range(34, 120), 6)
                )
                stops = Stops(most, strings=strings, token_ids=ends, eos_token_ids=ends[:3])
            elif kind == "min_tokens":
                stops = Stops(most, token_ids=(0, *r.sample(range(1, VOCABULARY), 40)), min_tokens=most // 2)
            elif kind != "plain":
                text = (
                    schema_grammar(SCHEMA)
                    if kind == "schema"
                    else lark_grammar('start: ("ab" | "cde" | /[0-9]x/)+')
                )
                grammar = partial(grammars.start, Grammar(text), (0,))
                stops = Stops(most, token_ids=(0,), eos_token_ids=(0,))
            jobs.append(Job(prompt, stops, sampling, partial(Detokenizer, texts), grammar))
    return jobs[:count]


def knowing(jobs, told):
    """Drafts that know, more or less, what comes."""
    known = {tuple(job.prompt): one.tokens for job, one in zip(jobs, told, strict=True)}

    def truth(prompt, answer, depth):
        tokens = known[tuple(prompt)]
        right = tokens[: len(answer)] == answer and len(answer) + depth < len(tokens)
        return tokens[len(answer) + depth] if right else None

    return lambda prompt: GuessingDraft(prompt, truth, VOCABULARY, share=0.8)


def same(told, expected):
    for one, other in zip(told, expected, strict=True):
        assert one.tokens == other.tokens
        assert (one.text, one.finish) == (other.text, other.finish)
        assert len(one.logprobs) == len(other.logprobs)
        for got, wanted in zip(one.logprobs, other.logprobs, strict=True):
            assert got.top_ids == wanted.top_ids
            np.testing.assert_allclose(
                [got.chosen, *got.top], [wanted.chosen, *wanted.top], rtol=0, atol=1e-6
            )


def compare(executor, jobs, tree_sizes):
    """Hold answers with drafts of three kinds to those without; how many drafts were accepted."""
    expected = answer_all(executor, jobs, together=1)
    accepted = 0
    for index, size in enumerate(tree_sizes):
        for speculator in (
            forced(knowing(jobs, expected), size),
            forced(PromptLookup, size),
            forced(lambda prompt: GuessingDraft(prompt, lambda *_: None, VOCABULARY), size, depth=2),
        ):
            if speculator._make_draft is PromptLookup:
                speculator._acceptance = type(speculator._acceptance)(PRIOR_RATES)
            same(answer_all(executor, jobs, speculator, together=(1, 4)[index % 2]), expected)
            accepted += speculator.accepted
    return accepted


def test_every_way_to_draw_gives_the_same_answer(executor, texts, grammars):
    sparse = executor.plan.selection is not None  # which is slow on the CPU
    jobs = make_jobs(1, texts, grammars, 14 if sparse else 28)
    kinds = {one.finish.split()[0] for one in answer_all(executor, make_jobs(1, texts, grammars, 28))}
    assert kinds >= {"length", "stop_string", "stop_token", "constraint"}
    assert compare(executor, jobs, (64,) if sparse else (7, 64)) > 50


@pytest.mark.soak
@pytest.mark.parametrize("size", range(1, 65))
def test_every_tree_size_gives_the_same_answer(executor, texts, grammars, size):
    assert compare(executor, make_jobs(size, texts, grammars, 56), (size, size)) > 0 or size == 1


def test_forced_text_is_followed_in_a_tree(executor, texts, grammars):
    """What a grammar forces is not drawn, and drafts of it are accepted all the same."""
    expected = b'{"name": "'
    ids = {texts.token_text(each): each for each in range(1, VOCABULARY)}
    prompt = [ids[bytes([each])] for each in b"x" * 20 + expected + b"ab" + b"y" * 5]
    grammar = partial(grammars.start, Grammar(schema_grammar(SCHEMA)), (0,))
    stops = Stops(60, token_ids=(0,), eos_token_ids=(0,))
    job = Job(prompt, stops, Sampling(logprobs=True), partial(Detokenizer, texts), grammar)
    plain, draft = (
        answer_all(executor, [job], speculator)
        for speculator in (None, forced(knowing([job], answer_all(executor, [job])), 16))
    )
    same(draft, plain)
    json.loads(plain[0].text)
    assert draft[0].steps < plain[0].steps


def test_a_draft_outside_the_grammar_is_not_verified(executor, texts, grammars):
    grammar = partial(grammars.start, Grammar(lark_grammar('start: "ab"+')), (0,))
    ids = {texts.token_text(each): each for each in range(1, VOCABULARY)}
    wrong = ids[b"z"]

    class Wrong(GuessingDraft):
        def propose(self, depth, rates):
            proposal = super().propose(depth, rates)
            return proposal and type(proposal)(
                [wrong] * len(proposal), proposal.parents, proposal.chances, proposal.classes
            )

    speculator = forced(lambda prompt: Wrong(prompt, lambda *_: None, VOCABULARY), 16)
    job = Job([5, 6, 7], Stops(8, token_ids=(0,), eos_token_ids=(0,)), grammar=grammar)
    same(answer_all(executor, [job], speculator), answer_all(executor, [job]))
    assert speculator.drafted == 0


def test_speculation_that_chooses_for_itself_gives_the_same_answer(folder, texts, grammars):
    executor = load(folder, dtype="float64")
    jobs = make_jobs(2, texts, grammars, 28)
    speculator = Speculator(PromptLookup, PRIOR_RATES, tree_size=16, depth=15)
    speculator.costs.note_loaded(measure_steps(executor, 16))
    speculator.costs.factor = lambda streams, tokens: 1.01
    same(
        answer_all(executor, jobs, speculator, clock=lambda batch: 0.01 + 1e-4 * len(batch.token_ids)),
        answer_all(executor, jobs, together=1),
    )
    assert speculator.drafted > 20
    assert speculator.accepted > 0
