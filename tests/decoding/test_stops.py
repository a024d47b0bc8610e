from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edged.decoding.stops import StopMatcher


def run(stops, pieces):
    """Texts of each feed, then of the flush if nothing matched."""
    matcher = StopMatcher(tuple(stops))
    texts = [matcher.feed(piece) for piece in pieces]
    if matcher.matched is None:
        texts.append(matcher.flush())
    return texts, matcher.matched


def search(stops, text):
    """The definition, without streaming: earliest end, then the longest."""
    best = None
    for stop in stops:
        start = text.find(stop)
        if start >= 0:
            key = (start + len(stop), start)
            if best is None or key < best[0]:
                best = (key, stop)
    return (text, None) if best is None else (text[: best[0][1]], best[1])


def test_a_stop_string_over_token_borders_never_shows_even_its_first_half():
    assert run(["STOP"], ["hello S", "T", "O", "P and more"]) == (["hello ", "", "", ""], "STOP")


def test_text_is_released_as_soon_as_it_cannot_be_a_stop_string_any_more():
    matcher = StopMatcher(("STOP",))
    assert matcher.feed("ST") == ""
    assert matcher.feed("OA") == "STOA"
    assert matcher.feed("S") == ""
    assert matcher.feed("S") == "S", "only the second S may begin a stop string"
    assert matcher.flush() == "S"
    assert matcher.flush() == ""


def test_the_text_after_a_stop_string_in_the_same_token_is_dropped():
    assert run(["\n\n"], ["a\n\nb\n\nc"]) == (["a"], "\n\n")


def test_the_match_that_ends_first_wins():
    assert run(["abcd", "bc"], ["xabcd"]) == (["xa"], "bc")
    assert run(["bcd", "abc"], ["abcd"]) == ([""], "abc")


def test_of_those_that_end_together_the_longest_wins():
    assert run(["c", "abc", "bc"], ["a", "b", "c"]) == (["", "", ""], "abc")


def test_a_failed_match_falls_back_to_a_shorter_one_inside_it():
    assert run(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", ""], "aab")
    assert run(["ababac"], ["ababab", "ac"]) == (["ab", ""], "ababac")


def test_nothing_is_taken_after_a_match():
    matcher = StopMatcher(("x",))
    assert matcher.feed("axb") == "a"
    assert matcher.feed("c") == ""
    assert matcher.flush() == ""
    assert matcher.matched == "x"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="at least one character"):
        StopMatcher(("a", ""))


# Few letters, so that partial and overlapping matches are the rule.
text = st.text(alphabet="abé", max_size=40)
stops = st.lists(st.text(alphabet="abé", min_size=1, max_size=6), max_size=5)


@given(stops, st.lists(text, max_size=20))
@example(["aab", "ab"], ["a", "aa", "b"])
def test_any_cut_of_the_text_gives_what_the_whole_gives(stops, pieces):
    texts, matched = run(stops, pieces)
    assert ("".join(texts), matched) == search(stops, "".join(pieces))


@given(stops, st.lists(text, max_size=20))
def test_exactly_what_may_become_a_stop_string_is_held_back(stops, pieces):
    matcher = StopMatcher(tuple(stops))
    seen = given_out = ""
    for piece in pieces:
        given_out += matcher.feed(piece)
        seen += piece
        if matcher.matched is not None:
            break
        prefixes = {stop[:length] for stop in stops for length in range(1, len(stop))}
        held = max((len(prefix) for prefix in prefixes if seen.endswith(prefix)), default=0)
        assert given_out == seen[: len(seen) - held]


def test_a_long_stop_string_costs_nothing_before_it_begins_to_match():
    long = "b" * 1_000_000
    matcher = StopMatcher((long,))
    assert matcher.feed("a" * 100) == "a" * 100
    assert len(matcher._by_first["b"][0]._borders) == 2
    assert matcher.feed("bb") == ""
    assert matcher.feed("a") == "bba"
