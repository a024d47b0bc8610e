"""Choices and ready-made grammars: every answer is one of theirs."""

from __future__ import annotations

import json
import re
import sqlite3

import pytest
from drawn_answers import walks

from edged.decoding.constraints.checker import check, small_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


@pytest.mark.parametrize(
    "texts", [[f"item {number}" for number in range(10_000)], ["", *map(str, range(2500))]]
)
def test_a_choice_of_many_texts_gives_them_alone(tokenizer, texts):
    known = set(texts)
    found = {text for text, _ in walks(check("choice", json.dumps(texts)), tokenizer, 60)}
    assert len(found) > 20
    assert found <= known
    assert any(text + "1" in known for text in found), "a text that another one begins with is an answer too"


def test_a_choice_gives_its_texts_alone(tokenizer):
    texts = [
        "left",
        "left turn",
        'say "no"\n',
        "\\d+",
        "日本",
        "ß",
        "\x7f",
        "\x00\x1b",
        "\u0085",
        "// a",
        "<end>",
    ]
    found = {text for text, _ in walks(check("choice", json.dumps(texts)), tokenizer, 120)}
    assert found == set(texts)


def sqlite_error(statement):
    try:
        sqlite3.connect(":memory:").execute(statement)
    except sqlite3.Error as error:
        return str(error)
    return ""


def test_sqlite_says_what_is_no_statement():
    assert "syntax error" in sqlite_error("SELECT FROM WHERE")
    assert "no such table" in sqlite_error("SELECT a FROM b")


def test_every_statement_of_sql_select_is_one_to_sqlite(tokenizer):
    found = walks(check("ready_made", "sql-select"), tokenizer, 60, most=120)
    statements = [text for text, end in found if end]
    assert len(statements) > 20
    for text in statements:
        assert text.startswith("SELECT ")
        # Tables that are not there, aggregates in odd places: then SQLite has parsed the statement.
        assert not re.search("syntax error|incomplete input|unrecognized token", sqlite_error(text)), text


def test_json_is_an_object_or_an_array(tokenizer):
    found = [json.loads(text) for text, end in walks(check("ready_made", "json"), tokenizer, 60) if end]
    assert {type(value) for value in found} == {dict, list}
