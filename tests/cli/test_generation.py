"""edgectl generate: how tokens are chosen, the answer's form, several answers."""

from __future__ import annotations

import json

import pytest

from edged.cli.exit_codes import ExitCode

STORY = "Once upon a time there was a robot who"


@pytest.fixture
def generate(edgectl, daemon):
    """``edgectl generate`` with the session's daemon; greedy unless said otherwise."""

    def run(*arguments):
        return edgectl("generate", "--temperature", "0", *arguments, EDGED_ADDRESS=daemon.address)

    return run


def out(result):
    assert result.code == ExitCode.DONE, result.err
    return result.out


def test_forms(generate, tmp_path):
    assert out(generate("Is water wet?", "--choice", "yes", "--choice", "no")) in {"yes\n", "no\n"}
    assert out(generate("Two digits:", "--regex", "[0-9]{2}")).strip().isdigit()
    schema = tmp_path / "schema.json"
    schema.write_text(
        '{"type": "object", "properties": {"n": {"enum": [7, 8]}}, "required": ["n"], "additionalProperties": false}'
    )
    for given in (str(schema), schema.read_text()):
        assert json.loads(out(generate("A number:", "--json-schema", given)))["n"] in {7, 8}
    grammar = tmp_path / "grammar.lark"
    grammar.write_text('start: "a" | "b"')
    assert out(generate("Letter:", "--lark", str(grammar))) in {"a\n", "b\n"}


def test_sampling(generate):
    plain = json.loads(out(generate(STORY, "-n", "4", "--json", "--logprobs", "2")))
    assert len(plain["logprobs"]) == 4
    first = plain["logprobs"][0]["top"][0]
    assert first["token_id"] == plain["token_ids"][0]
    assert plain["text"].startswith(first["text"])
    other = json.loads(out(generate(STORY, "-n", "4", "--json", "--logit-bias", f"{first['token_id']}=-inf")))
    assert other["token_ids"][0] != first["token_id"]
    assert "logprobs" not in other
    out(
        generate(
            STORY,
            "-n",
            "2",
            "--min-p",
            "0.1",
            "--typical-p",
            "0.9",
            "--repetition-penalty",
            "1.1",
            "--presence-penalty",
            "0.1",
            "--frequency-penalty",
            "0.1",
            "--penalty-window",
            "9",
            "--min-tokens",
            "1",
            "--bad-word",
            "dragon",
        )
    )


def test_several_answers(generate):
    arguments = (STORY, "-n", "3", "--temperature", "1", "--seed", "4", "--answers", "2")
    result = generate(*arguments)
    assert "[answer 1 of 2]" in result.err
    answers = json.loads(out(generate(*arguments, "--json")))["answers"]
    assert len(answers) == 2
    assert out(result) == "".join(each["text"] + "\n" for each in answers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--logit-bias", "x=1"), "is not ID=X"),
        (("--logit-bias", "5=nan"), "is not ID=X"),
        (("--lark", "/nowhere/at/all"), "cannot be read"),
        (("--json-schema", '{"not": {}}'), "$.not cannot be enforced"),
        (("--regex", "a", "--choice", "b"), "both given"),
        (("--tool-choice", "maybe"), "use one of auto, none, required"),
        (("--min-p", "2"), "sampling.min_p is 2"),
    ],
)
def test_refusals(generate, arguments, message):
    result = generate(STORY, *arguments)
    assert result.code != ExitCode.DONE
    assert message in " ".join(result.err.replace("│", " ").split())
