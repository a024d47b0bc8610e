"""Forced tokens: taken with the drawn one, stored by the next step together, whatever else the step carries."""

from __future__ import annotations

import pytest
from fake_executor import next_token
from hand_stepped import HandStepped
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.decoding.sampling import Sampling

VOCABULARY = 97


class Forcing:
    """A grammar that forces ``token % most`` tokens after each drawn one."""

    complete = False
    error = ""

    def __init__(self, most):
        self.most = most

    def accept(self, token_id, *, forced=True):
        return (
            [(token_id * 7 + 13 * number) % VOCABULARY for number in range(token_id % self.most)]
            if forced
            else []
        )


class Ending(Forcing):
    """One that is complete after the first token and what it forces."""

    def accept(self, token_id, *, forced=True):
        self.complete = True
        return super().accept(token_id, forced=forced)


def alone(prompt, count, most):
    """What a request gets when nothing else runs, and nothing is cut by a step's size."""
    history, grammar = list(prompt), Forcing(most)
    while len(history) < len(prompt) + count:
        token = next_token(history, VOCABULARY)
        history += [token, *grammar.accept(token)]
    return history[len(prompt) : len(prompt) + count]


requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=90),
        st.integers(1, 40),
        st.sampled_from([1, 3, 40]),
    ),
    min_size=1,
    max_size=6,
)


@given(requests, st.sampled_from([4, 9, 64]), st.booleans())
@settings(max_examples=80, deadline=None)
def test_company_and_small_steps_change_no_token(given_requests, step_tokens, caches):
    stepped = HandStepped(max_step_tokens=step_tokens, prefill_chunk=step_tokens, caches=caches, pages=24)
    for number, (prompt, count, most) in enumerate(given_requests):
        stepped.submit(str(number), prompt, count, grammar=Forcing(most))
    stepped.run()
    for number, (prompt, count, most) in enumerate(given_requests):
        assert stepped.tokens[str(number)] == alone(prompt, count, most)


def test_forced_tokens_take_no_steps_of_their_own():
    stepped = HandStepped()
    request = stepped.submit("a", [1, 2, 3], 60, grammar=Forcing(10))
    stepped.run()
    assert len(stepped.tokens["a"]) == 60
    assert request.steps < 40


def test_max_tokens_cuts_what_is_forced():
    stepped = HandStepped()
    wanted = alone([5], 30, 40)
    for count in (1, 2, 7):
        stepped.submit(f"a{count}", [5], count, grammar=Forcing(40))
    stepped.run()
    for count in (1, 2, 7):
        assert stepped.tokens[f"a{count}"] == wanted[:count]


def test_a_complete_answer_ends_with_what_it_forced():
    stepped = HandStepped()
    request = stepped.submit("a", [5, 6], 30, grammar=Ending(9))
    stepped.run()
    assert request.answer.finish.reason == "constraint"
    first = next_token([5, 6], VOCABULARY)
    assert stepped.tokens["a"] == [first, *Forcing(9).accept(first)]


@pytest.mark.parametrize(("logprobs", "steps"), [(True, 20), (False, None)])
def test_with_log_probabilities_every_token_has_a_step(logprobs, steps):
    stepped = HandStepped()
    sampling = Sampling(logprobs=logprobs)
    request = stepped.submit("a", [1, 2, 3], 20, grammar=Forcing(10), sampling=sampling)
    stepped.run()
    assert (request.steps == 20) == (steps == 20)
