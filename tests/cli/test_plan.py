"""``edgectl plan``: the table, what fits, what does not and what would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edged.cli.exit_codes import ExitCode

# The hyper-parameters of SmolLM2-135M; plan reads nothing else of a model folder.
SMOLLM = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_act": "silu",
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
PARAMETERS = 134_515_008
PAGE_BYTES = 64 * 2 * 30 * 3 * 64 * 4


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMOLLM))
    return folder


def planned(edgectl_here, *arguments):
    result = edgectl_here("plan", *arguments, "--json")
    return result.code, json.loads(result.out)


def rows(plan):
    return {row["name"]: row["bytes"] for row in plan["rows"]}


def test_a_model_folder(edgectl_here, model):
    code, plan = planned(edgectl_here, model, "--budget", "4GiB")
    assert code == 0
    assert plan["fits"]
    assert plan["budget_bytes"] == 4 * 2**30
    assert plan["total_bytes"] == sum(rows(plan).values())
    assert rows(plan)["weights"] == 4 * PARAMETERS
    assert rows(plan)["KV pages"] == 4096 // 64 * PAGE_BYTES


def test_options_change_the_plan(edgectl_here, model):
    options = [
        "--context-length",
        "1000",
        "--max-sequences",
        "3",
        "--dtype",
        "bfloat16",
        "--prefill-chunk",
        "64",
    ]
    _, plan = planned(edgectl_here, model, "--budget", "4GiB", *options)
    assert rows(plan)["weights"] < 4 * PARAMETERS * 0.51
    assert rows(plan)["KV pages"] == 3 * 16 * PAGE_BYTES // 2  # 1000 tokens are 16 pages


def test_the_context_of_a_short_model_is_its_own(edgectl_here, model):
    (model / "config.json").write_text(json.dumps({**SMOLLM, "max_position_embeddings": 512}))
    _, plan = planned(edgectl_here, model, "--budget", "4GiB")
    assert rows(plan)["KV pages"] == 512 // 64 * PAGE_BYTES


@pytest.mark.parametrize("key", ["context_length", "max_sequences"])
def test_what_is_said_to_fit_fits_and_one_more_does_not(edgectl_here, model, key):
    option = "--" + key.replace("_", "-")
    code, plan = planned(edgectl_here, model, "--budget", "1204MiB", "--context-length", "1024")
    assert code == 0
    largest = plan["largest"]["model"][key]
    others = ["--context-length", "1024"] if key == "max_sequences" else []
    assert largest > 1
    assert planned(edgectl_here, model, "--budget", "1204MiB", *others, option, largest)[0] == 0
    assert planned(edgectl_here, model, "--budget", "1204MiB", *others, option, largest + 1)[0] == ExitCode.NO


def test_what_does_not_fit_is_said_with_what_would(edgectl_here, model):
    result = edgectl_here(
        "plan", model, "--budget", "1128MiB", "--context-length", "8192", "--max-sequences", "4"
    )
    assert result.code == ExitCode.NO
    assert result.out.splitlines()[0].split() == ["memory", "size", "how"]
    assert "more than the budget of 1.10 GiB" in result.out
    assert result.err.startswith("edgectl: it does not fit: ")
    assert "would fit with context_length of at most" in result.err
    assert result.err.count("\n") == 1


def test_the_table(edgectl, model):
    result = edgectl("plan", model, "--budget", "4GiB")
    assert result.code == 0
    assert result.err == ""
    assert "134,515,008 parameters in float32" in result.out
    assert "of a budget of 4.00 GiB" in result.out
    assert "It fits, with " in result.out
    assert "room for up to context_length 8192 with max_sequences 1, or max_sequences " in result.out
    assert all(line == line.rstrip() for line in result.out.splitlines())


def test_a_configuration_with_two_models(edgectl_here, model, tmp_path):
    (tmp_path / "edged.yaml").write_text(
        "models:\n"
        "- {name: a, path: model, context_length: 1024}\n"
        "- {name: b, path: model, context_length: 64, dtype: bfloat16}\n"
        "memory: {budget: 2GiB}\n"
    )
    code, plan = planned(edgectl_here, "--config", "edged.yaml")
    assert code == 0
    assert {"a: weights", "b: weights", "a: KV pages", "b: KV pages"} < set(rows(plan))
    assert set(plan["largest"]) == {"a", "b"}
    text = edgectl_here("plan", "-f", "edged.yaml").out
    assert "a: up to context_length " in text
    assert "b: up to context_length " in text


USAGE = [
    ([], "give either a model folder or --config FILE"),
    (["model", "--config", "edged.yaml"], "give either a model folder or --config FILE"),
    (["edged.yaml"], "looks like a configuration; write: edgectl plan --config edged.yaml"),
    (["--config", "edged.yaml", "--dtype", "bfloat16"], "--dtype goes with a model folder"),
    (["--config", "edged.yaml", "--budget", "1GiB"], "--budget goes with a model folder"),
    (["model", "--budget", "700"], "'--budget': found '700'; write a size with a unit"),
    (["model", "--budget", "100MiB"], "100MiB, which memory.host (144MiB) uses up"),
    (["model", "--context-length", "12"], "'--context-length': found 12"),
    (["model", "--max-sequences", "0"], "'--max-sequences': found 0"),
    (["model", "--dtype", "bf16"], "did you mean bfloat16?"),
    (["model", "--device", "gpu"], "one of cpu, cuda"),
    (["model", "--context-length", "128", "--prefill-chunk", "512"], "more than context_length (128)"),
]


@pytest.mark.parametrize(("arguments", "message"), USAGE, ids=[" ".join(case[0]) for case in USAGE])
def test_mistakes(edgectl_here, model, arguments, message):
    result = edgectl_here("plan", *arguments)
    assert result.code == ExitCode.USAGE
    assert message in result.err
    assert result.out == ""


FILES = [
    (["--config", "none.yaml"], "none.yaml: no such file"),
    (["--config", "model"], "model: is a folder; give the YAML file in it"),
    (["--config", "bad.yaml"], "bad.yaml:1:1: modls: unknown key; did you mean models?"),
    (["empty"], "empty/config.json: this file is missing"),
    (["none"], "none/config.json: this file is missing"),
]


@pytest.mark.parametrize(("arguments", "message"), FILES, ids=[" ".join(case[0]) for case in FILES])
def test_files_that_are_refused(edgectl_here, model, tmp_path, arguments, message):
    (tmp_path / "bad.yaml").write_text("modls: []\n")
    (tmp_path / "empty").mkdir()
    result = edgectl_here("plan", *arguments)
    assert result.code == ExitCode.FILE
    assert message in result.err
    assert result.out == ""


def test_the_demo_configuration_fits_with_little_to_spare(edgectl_here, tmp_path):
    """From any working directory: its model's path is relative to the file."""
    for folder in ("repo/examples", "repo/.demo/SmolLM2-135M-Instruct"):
        (tmp_path / folder).mkdir(parents=True)
    demo = Path(__file__).parents[2] / "examples/demo.yaml"
    (tmp_path / "repo/examples/demo.yaml").write_text(demo.read_text())
    (tmp_path / "repo/.demo/SmolLM2-135M-Instruct/config.json").write_text(json.dumps(SMOLLM))
    code, plan = planned(edgectl_here, "--config", "repo/examples/demo.yaml")
    assert code == 0
    assert 0.85 * plan["budget_bytes"] < plan["total_bytes"] <= plan["budget_bytes"]
    assert edgectl_here("plan", "--config", "repo/examples/demo.yaml").code == 0
