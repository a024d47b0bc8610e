"""Answers of a given form from the real model at temperature 1.5: they fit, every one of them."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import llguidance
import pytest

from edged.decoding.constraints.checker import check, small_tokenizer
from edged.errors import InvalidArgumentError

SCHEMAS = sorted((Path(__file__).parent / "schemas").glob("*.json"))
HOT = {"temperature": 1.5, "max_tokens": 48}
PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["first_name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


def is_beginning(text, kind, constraint, tokenizer):
    """Whether some text of that form begins with ``text``, byte by byte."""
    matcher = llguidance.LLMatcher(tokenizer, check(kind, constraint), log_level=0)
    data = list(text.encode())
    return matcher.validate_tokens(data) == len(data)


def hold(client, tokenizer, seed):
    """One generation over one of the schemas; its finish reason."""
    path = SCHEMAS[seed % len(SCHEMAS)]
    text = path.read_text()
    answer = client.generate("An example in JSON: ", json_schema=text, seed=seed, **HOT).answer()
    if answer.finished.reason == "length":
        assert is_beginning(answer.text, "json_schema", text, tokenizer), f"{path.stem}: {answer.text}"
        return "length"
    assert answer.finished.reason in {"constraint", "end_of_sequence"}
    validator = jsonschema.Draft202012Validator(
        json.loads(text), format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    validator.validate(json.loads(answer.text))
    return answer.finished.reason


def hold_all(client, tokenizer, seeds):
    with ThreadPoolExecutor(8) as threads:
        return list(threads.map(lambda seed: hold(client, tokenizer, seed), seeds))


def test_thirty_answers_fit_their_schemas(client, tokenizer):
    reasons = hold_all(client, tokenizer, range(0, 30 * 7, 7))
    assert reasons.count("length") < 12


@pytest.mark.soak
def test_three_hundred_answers_fit_their_schemas(client, tokenizer):
    reasons = hold_all(client, tokenizer, range(1000, 1312))
    assert len(reasons) >= 300
    assert reasons.count("length") < 120


def test_an_answer_that_is_cut_off_is_the_beginning_of_one(client, tokenizer):
    text = json.dumps(PERSON)
    for most in (1, 3, 9):
        answer = client.generate(
            "Person: ", json_schema=PERSON, seed=most, temperature=1.5, max_tokens=most
        ).answer()
        assert answer.finished.reason == "length"
        assert answer.finished.usage.generated_tokens == len(answer.token_ids) == most
        assert is_beginning(answer.text, "json_schema", text, tokenizer)
        assert not is_beginning(answer.text + "x", "json_schema", text, tokenizer) or '": "' in answer.text


def test_what_is_forced_takes_no_steps(client):
    answer = client.generate("Person: ", json_schema=PERSON, temperature=0.0, max_tokens=60).answer()
    assert set(json.loads(answer.text)) == {"first_name", "age"}
    assert answer.finished.timings.steps < answer.finished.usage.generated_tokens - 6
    assert answer.finished.usage.generated_tokens == len(answer.token_ids)
    each = client.generate(
        "Person: ", json_schema=PERSON, temperature=0.0, max_tokens=60, logprobs=True
    ).answer()
    assert each.finished.timings.steps == each.finished.usage.generated_tokens == len(each.logprobs)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.soak), 1.5])
def test_every_kind_of_constraint_holds(client, temperature):
    def text(**options):
        return (
            client.generate("Say: ", temperature=temperature, seed=5, max_tokens=40, **options).answer().text
        )

    forms = (
        {"regex": r"[a-z]{3,8}( [a-z]{3,8}){2}"},
        {"choice": ["forward", "back", "日本"]},
        {"lark": 'start: sum\nsum: sum "+" N | N\nN: /[0-9]/'},
        {"ready_made": "sql-select"},
        {"ready_made": "json"},
    )
    with ThreadPoolExecutor(len(forms)) as threads:  # together, because steps are shared
        words, choice, total, query, document = threads.map(lambda form: text(**form), forms)
    assert re.fullmatch(r"[a-z]{3,8}( [a-z]{3,8}){2}", words)
    assert choice in {"forward", "back", "日本"}
    assert re.fullmatch(r"\d(\+\d)*\+?", total)
    assert query.startswith("SELECT ")
    assert document[0] in "{["


def test_seeded_answers_are_the_same_in_any_company(client):
    def answer(seed):
        return client.generate("Person: ", json_schema=PERSON, seed=seed, **HOT).answer().token_ids

    alone = [answer(seed) for seed in range(2)]
    with ThreadPoolExecutor(5) as threads:
        other = [threads.submit(lambda: client.generate("Once", max_tokens=8).answer()) for _ in range(2)]
        together = list(threads.map(answer, range(2)))
        assert all(each.result().token_ids for each in other)
    assert together == alone


def test_penalties_and_bias_hold_within_the_form(client):
    options = {"choice": ["yes", "no"], "temperature": 0.0, "max_tokens": 4}
    plain = client.generate("Is water wet? ", **options).answer()
    other = client.generate("Is water wet? ", logit_bias={plain.token_ids[0]: -1000.0}, **options).answer()
    assert plain.text in {"yes", "no"}
    assert other.text in {"yes", "no"}
    assert other.token_ids[0] != plain.token_ids[0]


def test_a_form_of_which_nothing_is_allowed_fails_with_the_reason(client):
    with pytest.raises(InvalidArgumentError, match="no token is left to be drawn"):
        client.generate(
            "x", choice=["7"], bad_token_ids=[[each] for each in client.tokenize("7")], max_tokens=4
        ).answer()


CHAIN = "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(4500)) + '\na4500: "x"'


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"regex": "(a"}, "regex"),
        ({"regex": ".*a.{200}b.*c.{200}d"}, "regex"),
        ({"json_schema": {"not": {}}}, "json_schema"),
        ({"json_schema": {"enum": ["x" * 1_000_000]}}, "json_schema"),
        ({"json_schema": '{"items":' * 1000 + "{}" + "}" * 1000}, "json_schema"),
        ({"lark": 'start: "a" start'}, "lark"),
        ({"lark": 'start: start start | "a"'}, "lark"),
        ({"lark": CHAIN}, "lark"),
        ({"lark": 'start: ("a" "b"){1000000}'}, "lark"),
        ({"choice": []}, "choice.texts"),
        ({"ready_made": "xml"}, "ready_made"),
        ({"regex": "a", "ignore_eos": True}, "stops.ignore_eos"),
        ({"regex": "a", "min_tokens": 2}, "stops.min_tokens"),
    ],
)
def test_bad_constraints_are_refused_before_any_token(client, options, field):
    with pytest.raises(InvalidArgumentError) as caught:
        next(iter(client.generate("x", max_tokens=4, **options)))
    assert caught.value.field == field
    assert client.generate("x", regex="[ab]", max_tokens=4).answer().text in {"a", "b"}
