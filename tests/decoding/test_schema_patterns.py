"""Patterns of schemas mean what ECMAScript and Python both say, or are refused."""

from __future__ import annotations

import json
import re

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.decoding.constraints.base import LIMITS
from edged.decoding.constraints.checker import check, small_tokenizer
from edged.decoding.constraints.schema_patterns import rust_pattern
from edged.errors import InvalidArgumentError

TEXTS = (
    *("", "a", "b", "ab", "ba", "A", "K", "\u212a", "\u017f", "s", "é", "e\u0301", "ß", "\u0661", "1", "12", "_", "-", " ", "\u00a0"),
    *("\t", "\r", "\n", "a\n", "\u0085", "\u001c", "\u2028", "\ufeff", "😀", "日本", '"', "\\", "/", ".", "[", "]", "&", "~", "{"),
    *("}", "#", "a b", "]a", "a]", "\u0000", "\u0008", "\u0001"),
)  # fmt: skip


def taken(pattern):
    """Which of the texts the pattern lets through."""
    grammar = check("json_schema", json.dumps({"type": "string", "pattern": pattern}))
    start = llguidance.LLMatcher(
        small_tokenizer(), grammar, log_level=0, limits=llguidance.LLParserLimits(**LIMITS)
    )

    def takes(text):
        matcher, data = start.deep_copy(), list(json.dumps(text, ensure_ascii=False).encode())
        return matcher.validate_tokens(data) == len(data)

    return {text for text in TEXTS if takes(text)}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("^[a&&b]$", {"a", "b", "&"}),
        ("^[[a]$", {"a", "["}),
        ("^[[a]]$", {"a]"}),
        ("^[a~~b]$", {"a", "b", "~"}),
        ("^[+--]$", {"-"}),
        (r"^[\d]$", {"1"}),
        (r"^[\b]$", {"\u0008"}),
        (r"^\0$", {"\u0000"}),
        (r"^\cA$", {"\u0001"}),
        (r"^\u00e9$", {"é"}),
        (r"^\x61$", {"a"}),
        ("^a|b$", {"a", "b", "ab", "a\n", "a b", "a]"}),
        ("^]a$", {"]a"}),
        ("^}$", {"}"}),
        (r"^\{$", {"{"}),
        ("^#$", {"#"}),
        (r"^\p{Greek}?$", {""}),
    ],
)
def test_characters_stand_for_themselves(pattern, expected):
    assert taken(pattern) == expected


@pytest.mark.parametrize("letter", ["d", "w", "s", "D", "W", "S"])
@pytest.mark.parametrize(
    "form", [r"^\{}$", r"^[\{}]$", r"^[^\{}]$", r"^[\{}a]$", r"^[^\{}a]$", r"(?i)^[^\{}K]$"]
)
def test_sets_are_those_of_ecmascript_and_of_python(letter, form):
    pattern = form.replace("{}", letter)
    found = taken(pattern)
    ascii_sets = {
        "d": "[0-9]",
        "w": "[0-9A-Za-z_]",
        "s": r"[\t-\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff]",
    }
    inner = ascii_sets[letter.lower()]
    for text in found:
        assert re.search(pattern.replace("$", r"\Z"), text), text
        if "(?i)" not in pattern and len(text) == 1:
            inside = bool(re.match(inner, text)) == letter.islower()
            also = inside or ("a]" in pattern and text == "a")
            assert also != ("[^" in pattern), text
    assert found


@pytest.mark.parametrize(
    "pattern",
    ["^[]a]$", "[^]", "a**", "a++", "a{1}{2}", "a{,2}", "^{", "(?m)^a$", "(?x)a b", "(?U)a", "(?-u)a", "[a-\\d]", "[b-a]", "[a",
     r"\ud83d\ude00", r"\u{110000}", r"[\h]", "(?=a)", r"\bword", "a$b"],
)  # fmt: skip
def test_what_dialects_read_differently_is_refused(pattern):
    with pytest.raises(InvalidArgumentError) as caught:
        check("json_schema", json.dumps({"pattern": pattern}))
    assert caught.value.message.startswith("json_schema: ")


def test_a_refusal_names_the_place():
    schema = {"items": {"patternProperties": {"a++": {}}}}
    with pytest.raises(InvalidArgumentError, match=r"\$\.items\.patternProperties\.a\+\+ cannot be enforced"):
        check("json_schema", json.dumps(schema))


@given(st.text(alphabet="ab01^$.|?*+(){}[]\\-,:dwsDWSbxupcnP_&~ é😀", max_size=12))
@settings(max_examples=300, deadline=None)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_what_is_taken_is_what_python_finds(pattern):
    try:
        rust_pattern(pattern)
        python = re.compile(pattern)
        found = taken(pattern)
    except (InvalidArgumentError, re.error):
        return
    for text in found:
        assert python.search(text), (pattern, text)
