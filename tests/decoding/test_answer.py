from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.checkpoint.tokenizer import Tokenizer
from edged.decoding.answer import Answer
from edged.decoding.detokenizer import Detokenizer
from edged.decoding.stops import Stops
from edged.decoding.token_table import TokenTable


class Bytes:
    """Every token is one byte."""

    special_token_ids = frozenset({0})
    has_byte_fallback = False
    strips_leading_space = False

    def token_text(self, token_id):
        return bytes([token_id])


def run(ids, texts=None, *, skip=True, **stops):
    """Feed ids until the answer ends: (pieces, finish, answer)."""
    stops.setdefault("max_tokens", len(ids) + 1)
    answer = Answer(Detokenizer(texts or Bytes(), skip_special_tokens=skip), Stops(**stops))
    pieces = []
    for token in ids:
        pieces.append(answer.accept(token))
        if answer.finish is not None:
            break
    return pieces, answer.finish, answer


def test_max_tokens_ends_with_what_was_held_back():
    pieces, finish, answer = run(b"abSTO", strings=("STOP",), max_tokens=5)
    assert pieces == ["a", "b", "", "", ""]
    assert (finish.reason, finish.text, finish.matched_stop, finish.matched_token_id) == (
        "length",
        "STO",
        "",
        None,
    )
    assert answer.generated == 5


def test_max_tokens_inside_a_character_ends_with_its_replacement():
    pieces, finish, _ = run("中".encode()[:2], max_tokens=2)
    assert (pieces, finish.text) == (["", ""], "\ufffd")


def test_a_stop_string_ends_the_answer_and_takes_precedence_over_max_tokens():
    pieces, finish, _ = run(b"a--b", strings=("--",), max_tokens=3)
    assert pieces == ["a", "", ""]
    assert (finish.reason, finish.text, finish.matched_stop) == ("stop_string", "", "--")


def test_a_stop_token_has_no_text_and_is_reported():
    pieces, finish, answer = run(b"ab.", token_ids=(ord("."),))
    assert pieces == ["a", "b", ""]
    assert (finish.reason, finish.text, finish.matched_token_id) == ("stop_token", "", ord("."))
    assert answer.generated == 3


def test_the_models_own_end_is_told_from_a_stop_token():
    _, finish, _ = run([97, 0], token_ids=(0, 46), eos_token_ids=(0,))
    assert (finish.reason, finish.matched_token_id) == ("end_of_sequence", 0)


def test_without_its_end_in_the_stops_an_answer_goes_on_past_it():
    pieces, finish, _ = run([97, 0, 98], max_tokens=3)
    assert (pieces, finish.reason) == (["a", "", "b"], "length")
    pieces, _, _ = run([97, 0, 98], max_tokens=3, skip=False)
    assert pieces == ["a", "\0", "b"]


def test_text_held_back_before_a_stop_token_is_released():
    _, finish, _ = run(b"S.", strings=("STOP",), token_ids=(ord("."),))
    assert (finish.reason, finish.text) == ("stop_token", "S")


def test_a_stop_string_that_the_last_flush_completes_is_the_reason():
    _, finish, _ = run([ord("a"), 0xE4], strings=("a\ufffd",), max_tokens=2)
    assert (finish.reason, finish.text, finish.matched_stop) == ("stop_string", "", "a\ufffd")


def test_an_answer_that_ended_takes_no_more():
    _, _, answer = run(b"a", max_tokens=1)
    with pytest.raises(ValueError, match="has ended"):
        answer.accept(97)


def test_an_answer_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        run(b"", max_tokens=0)


@pytest.fixture(scope="module")
def demo(demo_model):
    tokenizer = Tokenizer.load(demo_model)
    return TokenTable(tokenizer, tokenizer.vocabulary_size), tokenizer


words = st.text(alphabet="ab é中😀\n.", max_size=60)


@settings(deadline=None, max_examples=200)
@given(
    text=words,
    stops=st.lists(st.text(alphabet="ab é中😀\n.", min_size=1, max_size=4), max_size=4),
    data=st.data(),
)
def test_with_the_real_tokenizer_nothing_leaks_is_lost_or_cut(demo, text, stops, data):
    """However a text is cut into tokens, the answer is the text before its first stop string."""
    table, tokenizer = demo
    ids = []
    while text:  # tokens of pieces cut at random: another way to write the same text than the tokenizer's own
        cut = data.draw(st.integers(1, len(text)))
        ids += tokenizer.encode(text[:cut], add_special_tokens=False, parse_special=False)
        text = text[cut:]
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    max_tokens = data.draw(st.integers(1, len(ids) + 1))
    given = tokenizer.decode(ids[:max_tokens], skip_special_tokens=False)
    pieces, finish, _ = run(ids, table, skip=False, strings=tuple(stops), max_tokens=max_tokens)
    got = "".join(pieces) + (finish.text if finish else "")
    ends = {given.find(stop) + len(stop): stop for stop in sorted(stops, key=len) if stop in given}
    if ends:
        first = min(ends)
        assert finish.reason == "stop_string"
        assert finish.matched_stop == ends[first]
        assert got == given[: first - len(ends[first])]
    elif finish is not None:
        assert finish.reason == "length"
        assert got == given
    else:
        assert whole.startswith(got), "the rest is held back, for no token has ended the answer"
    shown = "".join(pieces)
    assert not any(stop in shown for stop in stops)


def test_min_tokens_holds_stop_strings_off():
    pieces, finish, _ = run(b"a--b--c", strings=("--",), min_tokens=3)
    assert "".join(pieces) == "a--b"
    assert (finish.reason, finish.matched_stop) == ("stop_string", "--")


@given(st.binary(min_size=1, max_size=30), st.integers(0, 30))
def test_min_tokens_looks_for_stop_strings_in_the_text_after_them(data, least):
    data = bytes(byte % 4 + 97 for byte in data)
    pieces, finish, answer = run(data, strings=("ab", "cc"), min_tokens=least)
    text = "".join(pieces) + ("" if finish is None else finish.text)
    rest = data[least:].decode()
    places = {stop: rest.find(stop) for stop in ("ab", "cc")}
    ends = [place + 2 for place in places.values() if place >= 0]
    if ends:
        assert finish.reason == "stop_string"
        assert answer.generated == least + min(ends)
        assert text == data[: least + min(ends) - 2].decode()
    else:
        assert finish is None
        # Its end may be the beginning of a stop string, which is held back.
        assert data.decode().startswith(text)
        assert len(text) >= len(data) - 1


def test_an_answer_that_has_its_form_ends_with_what_was_held_back():
    pieces, finish, answer = run(b"abST", strings=("STOP",))
    assert finish is None
    answer.complete()
    assert (answer.finish.reason, answer.finish.text) == ("constraint", "ST")
    answer.complete()
    assert "".join(pieces) == "ab"
