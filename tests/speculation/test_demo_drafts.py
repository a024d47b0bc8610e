"""SmolLM2-135M: greedy text with drafts is the text without, token for token."""

from __future__ import annotations

from demo_runs import LIGHTHOUSE, TRAINED, encode, guessing, load, lookup, quote, trained
from requests_with_drafts import Job, answer_all

from edged.decoding.stops import Stops


def test_a_quoted_passage_and_a_guessed_answer(demo_model, demo_tokenizer):
    executor = load(demo_model, TRAINED)
    prompts = [encode(demo_tokenizer, text) for text in (quote(LIGHTHOUSE), "The capital of Portugal is")]
    jobs = [Job(prompt, Stops(16)) for prompt in prompts]
    expected = answer_all(executor, jobs)
    quoting = lookup(16)
    told = answer_all(executor, jobs, quoting)
    assert [one.tokens for one in told] == [one.tokens for one in expected]
    assert quoting.accepted >= 10
    assert told[0].steps < 8
    told = answer_all(executor, jobs, guessing(9))
    assert [one.tokens for one in told] == [one.tokens for one in expected]
    foreseeing = trained(executor, 12)
    told = answer_all(executor, jobs, foreseeing)
    assert [one.tokens for one in told] == [one.tokens for one in expected]
    assert foreseeing.accepted >= 10
