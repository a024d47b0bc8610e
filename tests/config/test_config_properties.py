"""Any text is read or refused: never another exception, never a message that cannot be printed."""

from __future__ import annotations

from pathlib import Path

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.config import Config
from edged.config_reader import ConfigFileError, parse_config
from edged.config_schema import known_keys

FOLDER = Path("/srv/robot")
KEYS = sorted({key.rsplit(".", 1)[-1].removesuffix("[]") for key in known_keys()})

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["512MiB", "1GiB", "30s", "cpu", "cuda", "float16", "auto", "tensorrt", "127.0.0.1:1", "~x", "$X"]
    ),
    st.dates(),
    st.binary(max_size=4),
)
keys = st.one_of(st.sampled_from(KEYS), st.text(max_size=6), st.integers(), st.none())
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=6),
    max_leaves=30,
)
STRUCTURE = (
    r": |:|  |- |[|]|{|}|, |&a |*a|<<: |!!int |!x |? |%TAG ! x|\|>|#|\x|0|64|1GiB|cpu|=|~|1e9|.nan|10:10"
)
CHARACTERS = "\n\t\"'|\x00\ufeff\u2028\ud800\U0001f600"
tokens = st.sampled_from(
    [*KEYS, *STRUCTURE.split("|"), *CHARACTERS, "---\n", "...\n", "%YAML 1.1\n", "%YAML 9999999999.1\n"]
)


def read_or_refuse(text):
    error = None
    try:
        config = parse_config(text, folder=FOLDER)
    except ConfigFileError as refused:
        error = refused
    if error is None:
        assert isinstance(config, Config)
        assert config.models
    else:
        assert error.faults
        assert all(fault.problem and fault.remedy for fault in error.faults)
        assert all(line.isprintable() for line in str(error).split("\n"))
        str(error).encode()


@settings(max_examples=400, deadline=None)
@given(st.text())
def test_any_text(text):
    read_or_refuse(text)


@settings(max_examples=600, deadline=None)
@given(st.lists(tokens, max_size=40).map("".join))
def test_text_that_is_nearly_yaml(text):
    read_or_refuse(text)


@settings(max_examples=120, deadline=None)
@given(st.dictionaries(st.sampled_from([k for k in known_keys() if "." not in k]), values, max_size=8))
def test_trees_of_any_values(tree):
    text = yaml.safe_dump({key.removesuffix("[]"): value for key, value in tree.items()}, allow_unicode=True)
    read_or_refuse(text)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(keys, values, max_size=8), min_size=1, max_size=3))
def test_models_of_any_keys(models):
    read_or_refuse(yaml.safe_dump({"models": models}))
