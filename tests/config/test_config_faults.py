"""Files that are refused: each with the key's path, what was found and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import FOLDER, LEAST, assert_one_fault, model, refusal

from edged.config_reader import ConfigFileError, parse_config, read_config
from edged.errors import Code, ConfigError

# The file; the path, and a part each of what was found and of what to do.
ONE_FAULT = [
    # the document
    ("", "", "nothing is in it", "models:"),
    ("# only a comment\n", "", "nothing is in it", "models:"),
    ("---\n", "", "nothing is in it", "models:"),
    ("null", "", "nothing is in it", "models:"),
    ("- a\n- b\n", "", "a list instead of keys", "begin with keys"),
    ("just text", "", "the value 'just text' instead of keys", "begin with keys"),
    (LEAST + "---\n" + LEAST, "", "a second YAML document", "one document"),
    ("models:\n\t- name: a", "", "a tab", "spaces"),
    ("models:\n  - name: a\n\tpath: b", "", "a tab", "spaces"),
    ("models: [", "", "not YAML", "correct the syntax"),
    ("models: [{name: a, path: b}", "", "not YAML", "correct the syntax"),
    ('models: "a', "", "not YAML", "correct the syntax"),
    ("log: level: info\n" + LEAST, "", "a second ': '", "quotes"),
    ("log: *nowhere\n" + LEAST, "", "undefined alias", "correct the syntax"),
    ('log: {level: "\\UFFFFFFFF"}', "", "not YAML", "escape"),
    ("models: \x07", "", "U+0007", "remove it"),
    ("[" * 40 + "]" * 40, "", "deeper than 32", "five"),
    ("x" * (256 * 2**10 + 1), "", "longer than 262144", "configuration file"),
    # keys
    (LEAST + "speling: 1", "speling", "unknown key", "the keys of the file are models, listen"),
    (LEAST + "momory: {}", "momory", "unknown key", "did you mean memory?"),
    (LEAST + "memory: {Budget: 1GiB}", "memory.Budget", "unknown key", "did you mean budget?"),
    (LEAST + "budget: 1GiB", "budget", "unknown key", "it belongs at memory.budget"),
    (LEAST + "context_length: 64", "context_length", "unknown key", "it belongs at models[].context_length"),
    (model("contxt_length: 64"), "models[0].contxt_length", "unknown key", "did you mean context_length?"),
    (model("attention: {topk: 1}"), "models[0].attention.topk", "unknown key", "did you mean top_k?"),
    (LEAST + LEAST, "models", "given twice, first in line 1", "keep one"),
    (LEAST + "log: {level: info, level: debug}", "log.level", "given twice", "keep one"),
    (LEAST + "1: 2", "", "1 as a key", "names of the reference"),
    (LEAST + "? [a]\n: 1", "", "a collection as a key", "names of the reference"),
    (LEAST + "yes: 1", "", "yes as a key", "names of the reference"),
    (LEAST + "<<: 5", "", "<< merges something", "<<: *NAME"),
    (LEAST + "log: &x {<<: *x}", "log", "<< merges something", "<<: *NAME"),
    # shapes
    (
        "log: {level: info}",
        "models",
        "missing",
        "write models (The models to serve): a list of 1 to 64 entries",
    ),
    ("models: []", "models", "0 entries", "1 to 64 entries"),
    ("models:", "models", "no value", "a list under it"),
    ("models: {name: a, path: b}", "models", "keys", "a list under it, each entry as - KEY: VALUE"),
    ("models: a", "models", "'a'", "a list under it"),
    ("models: [a]", "models[0]", "'a'", "write keys under it: name, path"),
    ("models: [{path: b}]", "models[0].name", "missing", "write name (Name that requests use"),
    ("models: [{name: a}]", "models[0].path", "missing", "write path (Model folder"),
    ("models: [{name: a, paht: b}]", "models[0].paht", "unknown key", "did you mean path?"),
    ("models: [{name: a, path: b}, ]\nlog: [info]", "log", "a list", "write keys under it: level, format"),
    (LEAST + "log: info", "log", "'info'", "write keys under it: level, format"),
    (LEAST + "drain_timeout: {seconds: 3}", "drain_timeout", "keys", "a duration from 0s to 24h"),
    # numbers
    (model('context_length: "64"'), "models[0].context_length", "'64'", "64 to 4194304 without quotes"),
    (
        model("context_length: many"),
        "models[0].context_length",
        "'many'",
        "a whole number from 64 to 4194304",
    ),
    (model("context_length: 4K"), "models[0].context_length", "'4K'", "a whole number from 64 to 4194304"),
    (model("context_length: true"), "models[0].context_length", "true (a truth value)", "a whole number"),
    (model("context_length: 64.5"), "models[0].context_length", "64.5 (a number)", "a whole number"),
    (model("context_length: .nan"), "models[0].context_length", ".nan (a number)", "a whole number"),
    (model("context_length: .inf"), "models[0].context_length", ".inf (a number)", "a whole number"),
    (model("context_length: 0100"), "models[0].context_length", "0100 (a number)", "a whole number"),
    (model("context_length: 0x80"), "models[0].context_length", "0x80 (a number)", "a whole number"),
    (model("context_length: 10:30"), "models[0].context_length", "10:30 (a number)", "a whole number"),
    (
        model("context_length: 2024-01-01"),
        "models[0].context_length",
        "2024-01-01 (a date)",
        "a whole number",
    ),
    (model("context_length: "), "models[0].context_length", "no value", "or remove the key"),
    (model("context_length: ~"), "models[0].context_length", "no value", "or remove the key"),
    (model("context_length: [64]"), "models[0].context_length", "a list", "a whole number"),
    (model("context_length: 63"), "models[0].context_length", "63 (a number)", "from 64 to 4194304"),
    (model("context_length: 4194305"), "models[0].context_length", "4194305", "from 64 to 4194304"),
    (model("context_length: -64"), "models[0].context_length", "-64", "from 64 to 4194304"),
    (model("context_length: " + "9" * 5000), "models[0].context_length", "999...", "from 64 to 4194304"),
    (model("max_sequences: 0"), "models[0].max_sequences", "0 (a number)", "from 1 to 256"),
    (model("attention: {window: 100}"), "models[0].attention.window", "100", "a multiple of 64"),
    (
        model("context_length: !!python/object:os.system {}"),
        "models[0].context_length",
        "keys",
        "a whole number",
    ),
    (model("context_length: !secret x"), "models[0].context_length", "tag '!secret'", "a whole number"),
    # sizes and durations
    (LEAST + "memory: {budget: 512}", "memory.budget", "512 without a unit", "such as 512MiB"),
    (LEAST + "memory: {budget: 1073741824}", "memory.budget", "1073741824 without a unit", "such as 1GiB"),
    (LEAST + "memory: {budget: 0.5}", "memory.budget", "0.5 without a unit", "such as 0.5MiB"),
    (
        LEAST + "memory: {budget: 12gb}",
        "memory.budget",
        "'12gb'",
        "B, KiB, MiB, GiB, kB, MB, GB, such as 12GiB",
    ),
    (LEAST + "memory: {budget: 512M}", "memory.budget", "'512M'", "such as 512MiB"),
    (LEAST + "memory: {budget: -1GiB}", "memory.budget", "'-1GiB'", "such as 512MiB"),
    (LEAST + "memory: {budget: lots}", "memory.budget", "'lots'", "such as 512MiB"),
    (LEAST + "memory: {budget: true}", "memory.budget", "true (a truth value)", "a size from 1B to"),
    (LEAST + f"memory: {{budget: {'9' * 400}GiB}}", "memory.budget", "...", "such as 512MiB"),
    (LEAST + "memory: {budget: 999999999GiB}", "memory.budget", "'999999999GiB'", "to 1048576GiB"),
    (LEAST + "memory: {budget: 0B}", "memory.budget", "'0B'", "a size from 1B"),
    (LEAST + "drain_timeout: 30", "drain_timeout", "30 without a unit", "such as 30s"),
    (LEAST + "drain_timeout: .nan", "drain_timeout", ".nan without a unit", "such as 30s"),
    (LEAST + "drain_timeout: 5m", "drain_timeout", "'5m'", "ms, s, min, h, such as 5min"),
    (LEAST + "drain_timeout: 25h", "drain_timeout", "'25h'", "from 0s to 24h"),
    (LEAST + "limits: {message_size: 2GiB}", "limits.message_size", "'2GiB'", "from 1KiB to 1GiB"),
    # text, choices, paths
    ("models: [{name: 12, path: b}]", "models[0].name", "12 (a number)", 'needs quotes: "12"'),
    ("models: [{name: on, path: b}]", "models[0].name", "on (a truth value)", 'needs quotes: "on"'),
    ("models: [{name: a b, path: b}]", "models[0].name", "'a b'", "text that matches"),
    ('models: [{name: "", path: b}]', "models[0].name", "''", "text that matches"),
    ('models: [{name: "a\\nb", path: b}]', "models[0].name", "'a\\nb'", "without control characters"),
    ('models: [{name: "\\uD800", path: b}]', "models[0].name", "ud800", "without control characters"),
    ('models: [{name: a, path: "b\\0"}]', "models[0].path", "'b\\x00'", "without control characters"),
    ('models: [{name: a, path: ""}]', "models[0].path", "an empty path", "write a path"),
    ("models: [{name: a, path: [b]}]", "models[0].path", "a list", "write a path"),
    ("models: [{name: a, path: $HOME/b}]", "models[0].path", "'$HOME/b'", "not expanded, only ~ is"),
    (
        "models: [{name: a, path: ~nobody-at-all/b}]",
        "models[0].path",
        "'~nobody-at-all/b'",
        "home folder itself",
    ),
    ("models: [{name: a, path: https://x/b}]", "models[0].path", "'https://x/b'", "a plain path"),
    (LEAST + "listen: {unix: unix:/run/x}", "listen.unix", "'unix:/run/x'", "a plain path"),
    (model("device: gpu"), "models[0].device", "'gpu'", "write one of cpu, cuda"),
    (model("dtype: bf16"), "models[0].dtype", "'bf16'", "did you mean bfloat16?"),
    (model("dtype: Float32"), "models[0].dtype", "'Float32'", "did you mean float32?"),
    (model("device: 0"), "models[0].device", "0 (a number)", "write one of cpu, cuda"),
    (LEAST + "log: {level: trace}", "log.level", "'trace'", "one of debug, info, warning, error"),
]


@pytest.mark.parametrize(("text", "path", "problem", "remedy"), ONE_FAULT, ids=[c[0][:60] for c in ONE_FAULT])
def test_refusal_names_path_problem_and_remedy(text, path, problem, remedy):
    assert_one_fault(text, path, problem, remedy)


def test_it_is_the_typed_error():
    error = refusal("")
    assert isinstance(error, ConfigError)
    assert error.code is Code.INVALID_ARGUMENT


def test_every_fault_at_once_with_its_place():
    error = refusal(
        "memory:\n"
        "  budget: 512\n"
        "models:\n"
        "  - name: a\n"
        "    path: b\n"
        "    dtype: f32\n"
        "    threads: -1\n"
        "  - name: a\n"
        "    path: b\n"
        "    executor: tensorrt\n"
        "    colour: red\n"
        "default_model: c\n"
    )
    assert [(fault.path, fault.line, fault.column) for fault in error.faults] == [
        ("memory.budget", 2, 11),
        ("models[0].dtype", 6, 12),
        ("models[0].threads", 7, 14),
        ("models[1].name", 8, 5),
        ("models[1].executor", 10, 5),
        ("models[1].colour", 11, 5),
        ("default_model", 12, 1),
    ]
    lines = str(error).splitlines()
    assert lines[0] == "edged.yaml: 7 faults"
    assert lines[1].startswith("edged.yaml:2:11: memory.budget: found 512 without a unit; ")
    assert len(lines) == 8
    assert error.field == "memory.budget"


def test_a_fault_does_not_cause_another():
    """The refused dtype and executor are not held against device: cpu, nor the context against the chunk."""
    error = refusal(model("dtype: float15, executor: tensort, context_length: 1, prefill_chunk: 600"))
    assert [fault.path.rpartition(".")[2] for fault in error.faults] == [
        "dtype",
        "executor",
        "context_length",
    ]


def test_faults_are_bounded():
    error = refusal(LEAST + "".join(f"key{number}: 1\n" for number in range(900)))
    assert len(error.faults) == 50
    assert str(error).startswith("edged.yaml: 50 or more faults")


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x]\n" + "".join(f"k{n}: &k{n} [*a, *a, *a]\n" for n in range(100)),
        "models:\n- &m0 {name: a, path: b}\n"
        + "".join(f"- &m{n + 1} {{<<: [{', '.join([f'*m{n}'] * 16)}]}}\n" for n in range(63)),
        "models: [&m {name: a, path: b}" + ", *m" * 60000 + "]",
        "".join(f"key{n}: 1\n" for n in range(20000)),
        "? " * 30000,
        "- " * 30000,
        "{" * 100000,
        '"' + "\\x41" * 60000 + '": 1',
        "models: [{name: a, path: b}]\n<<: [" + ", ".join(["{a: 1}"] * 20000) + "]",
        "k" * 250000 + ": 1",
    ],
    ids=range(10),
)
def test_hostile_files_end_soon(text):
    """Exponential work would take hours, and run into the timeout that every test has."""
    with pytest.raises(ConfigFileError) as caught:
        parse_config(text, folder=FOLDER)
    assert len(str(caught.value)) < 20_000


def test_files_that_cannot_be_read(tmp_path):
    def message(path):
        with pytest.raises(ConfigFileError) as caught:
            read_config(path)
        return str(caught.value)

    assert message(tmp_path / "none.yaml").endswith(
        "none.yaml: no such file; give the path of a configuration file"
    )
    assert "is a folder; give the YAML file in it" in message(tmp_path)
    assert "cannot be read (Not a directory)" in message(Path("/dev/null/x"))
    (tmp_path / "latin.yaml").write_bytes(b"# ok\nmodels: \xe9")
    assert "latin.yaml:2:9: the byte 0xE9 is no UTF-8; save as UTF-8" in message(tmp_path / "latin.yaml")
    assert "longer than" in message(Path("/dev/zero"))
    assert "nothing is in it" in message(Path("/dev/null"))
