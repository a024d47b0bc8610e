"""A grammar in the engine: masks over a model's vocabulary, forced tokens, ends and faults."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from edged.decoding.constraints import masks
from edged.decoding.constraints.base import LIMITS, Grammar, choice_grammar, lark_grammar, schema_grammar
from edged.decoding.constraints.masks import GrammarCompiler, _make_tokenizer

END = 0
PIECES = [
    "<end>",
    "<pad>",
    *'abcdefghij0123456789"{}[]:, \\',
    "ab",
    "abc",
    '": ',
    '{"',
    ", ",
    b"\xe6",
    b"\x97",
    b"\xa5",
]


class Texts:
    eos_token_ids = (0,)
    special_token_ids = frozenset({0, 1})
    has_byte_fallback = False
    strips_leading_space = False

    def token_text(self, token_id):
        return PIECES[token_id] if token_id < len(PIECES) else ""


@pytest.fixture(scope="module")
def compiler():
    compiler = GrammarCompiler(Texts(), len(PIECES) + 5)
    yield compiler
    compiler.close()


def allowed(answer):
    mask = answer.allowed()
    assert mask.dtype == np.bool_
    assert len(mask) == len(PIECES) + 5
    return {PIECES[token] for token in np.flatnonzero(mask)}


def token(piece):
    return PIECES.index(piece)


def test_the_vocabulary_is_there_before_the_first_grammar(monkeypatch):
    made = []
    monkeypatch.setattr(
        masks, "_make_tokenizer", lambda *args: made.append(args[2]) or _make_tokenizer(*args)
    )
    compiler = GrammarCompiler(Texts(), len(PIECES) + 5)
    compiler.prepare((END,))
    assert made == [(END,)]
    assert "ab" in allowed(start(compiler, choice_grammar(["ab"])))
    assert made == [(END,)]
    compiler.prepare(())  # a model without ends takes no constraints
    assert made == [(END,)]
    compiler.close()


def start(compiler, grammar):
    return compiler.start(Grammar(grammar), (END,))


def test_masks_follow_the_answer(compiler):
    answer = start(compiler, lark_grammar('start: ("ab" | "abc" | "b") "d"'))
    assert allowed(answer) == {"a", "b", "ab", "abc"}
    assert answer.accept(token("ab")) == []
    assert allowed(answer) == {"c", "d"}
    assert answer.accept(token("d")) == []
    assert answer.complete


def test_what_must_follow_is_forced(compiler):
    schema = {
        "type": "object",
        "properties": {"abc": {"enum": [1, 2]}},
        "required": ["abc"],
        "additionalProperties": False,
    }
    answer = start(compiler, schema_grammar(schema))
    assert allowed(answer) == {"{", '{"'} or allowed(answer) == {'{"'}
    forced = [PIECES[each] for each in answer.accept(token("{"))]
    assert "".join(forced) == '"abc": '
    assert allowed(answer) == {"1", "2"}
    assert [PIECES[each] for each in answer.accept(token("2"))] == ["}"]
    assert answer.complete


def test_nothing_is_forced_where_every_token_is_to_be_drawn(compiler):
    answer = start(compiler, choice_grammar(["abcdef"]))
    text = ""
    while not answer.complete:
        piece = next(iter(allowed(answer)))
        text += piece
        assert answer.accept(token(piece), forced=False) == []
    assert text == "abcdef"


def test_draft_tokens_are_held_to_the_form(compiler):
    answer = start(compiler, lark_grammar('start: "abc" /[0-9]{2}/'))
    draft = [token("ab"), token("c"), token("7"), token("a")]
    assert answer.admissible(draft) == 3
    assert answer.admissible(draft[1:]) == 0
    answer.accept(token("ab"), forced=False)
    assert answer.admissible(draft[1:]) == 2


def test_an_answer_may_end_where_its_form_lets_it(compiler):
    answer = start(compiler, lark_grammar("start: /[0-9]+/"))
    assert "<end>" not in allowed(answer)
    answer.accept(token("7"))
    assert "<end>" in allowed(answer)
    assert "<pad>" not in allowed(answer)
    assert not answer.complete


def test_a_character_may_come_in_bytes(compiler):
    answer = start(compiler, choice_grammar(["日a", "日b"]))
    assert allowed(answer) == {b"\xe6"}
    answer.accept(token(b"\xe6"), forced=False)
    assert allowed(answer) == {b"\x97"}


def test_one_grammar_serves_many_answers_at_once(compiler):
    grammar = choice_grammar(["abc", "abd", "ef"])
    first, second = start(compiler, grammar), start(compiler, grammar)
    first.accept(token("ab"))
    assert allowed(first) == {"c", "d"}
    assert allowed(second) == {"a", "ab", "abc", "e"}


def test_a_token_that_was_not_allowed_leaves_nothing_to_draw(compiler):
    answer = start(compiler, choice_grammar(["abc"]))
    answer.accept(token("9"))
    assert not answer.complete
    assert allowed(answer) == set()
    assert "constraint" in answer.error


def test_what_grows_beyond_its_limits_says_so(compiler, monkeypatch):
    monkeypatch.setitem(LIMITS, "max_lexer_states", 30)
    answer = start(compiler, lark_grammar("start: /(a|b)*a(a|b){10}/"))
    generator = random.Random(0)
    for _ in range(60):
        if not allowed(answer):
            break
        answer.accept(token(generator.choice("ab")), forced=False)
    assert "too complex" in answer.error


def test_text_that_no_grammar_has_compiled_is_an_error_and_no_exception(compiler):
    answer = start(compiler, json.dumps({"grammars": [{"lark_grammar": "start: nothing"}]}))
    assert allowed(answer) == set()
    assert answer.error
