"""``edgectl pull`` against a server that speaks the hub's protocol, with broken connections, on real sockets."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import time

import pytest
from edgectl_process import COMMAND, Terminal, clean_environment
from fixtures.small_models import TEMPLATE, model_files

from edged.cli.exit_codes import ExitCode

NAME = "acme/tiny"
CHUNK = 256 << 10
EXTRA = {
    "README.md": b"# tiny",
    "LICENSE": b"free",
    "pytorch_model.bin": b"\x80\x04pickle",
    "model.pt": b"\x80\x04pickle",
    "modeling_tiny.py": b"import os",
    "onnx/model.onnx": b"onnx",
    "original/consolidated.safetensors": b"other",
    "consolidated.safetensors": b"other",
    "adapter_model.safetensors": b"other",
    "flax_model.msgpack": b"x",
    "assets/picture.png": b"x",
}


@pytest.fixture
def environment(hub, tmp_path):
    return {
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(tmp_path / "hf"),
        "EDGED_MODELS": str(tmp_path / "models"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONWARNINGS": "ignore",  # the hub's library has some of its own
        "NO_PROXY": "127.0.0.1",
    }


@pytest.fixture
def pull(edgectl, environment):
    def run(*arguments, **changes):
        return edgectl("pull", *arguments, "--no-reference", **{**environment, **changes})

    return run


@pytest.fixture
def models(tmp_path):
    return tmp_path / "models"


def listed(edgectl, environment) -> list[str]:
    result = edgectl("models", "list", "--json", **environment)
    assert result.code == 0, result.err
    return [model["name"] for model in json.loads(result.out)["models"]]


@pytest.mark.parametrize("shards", [1, 3])
def test_what_is_needed_and_nothing_else(  # noqa: PLR0917 - fixtures
    hub, pull, edgectl, environment, models, shards
):
    files = model_files(shards=shards)
    hub.add(
        NAME,
        {**files, **EXTRA, "additional_chat_templates/rag.jinja": b"rag", "chat_template.jinja": b"file"},
    )
    result = pull(NAME)
    assert result.code == 0, result.err
    folder = models / "tiny"
    assert result.out.startswith(f"wrote {folder}: ")
    assert result.out.endswith("weights in float32\n")
    assert f"path: {folder}" in result.err
    for name, content in files.items():
        if name != "config.json":  # normalized
            assert (folder / name).read_bytes() == content
    assert json.loads((folder / "config.json").read_bytes()) == json.loads(files["config.json"])
    assert (folder / "additional_chat_templates/rag.jinja").read_text() == "rag"
    assert {path.name for path in folder.iterdir()} == {
        *files, "edged.json", "chat_template.jinja", "additional_chat_templates"
    }  # fmt: skip
    asked = {request.path.rpartition("/")[2] for request in hub.requests}
    assert not asked & {name.rpartition("/")[2] for name in EXTRA}
    assert [path.name for path in models.iterdir()] == ["tiny"]
    assert listed(edgectl, environment) == ["tiny"]
    source = json.loads((folder / "edged.json").read_text())["source"]
    assert source == {"kind": "hub", "repository": NAME, "commit": "a" * 40}


def test_a_second_pull_finds_it_there_and_a_new_commit_replaces_it(hub, pull, models):
    hub.add(NAME, model_files())
    assert pull(NAME).code == 0
    count = len(hub.requests)
    again = pull(NAME)
    assert (again.code, "already" in again.out) == (0, True)
    assert len(hub.requests) == count + 1
    small = model_files(1)
    hub.add(NAME, small, commit="b" * 40)
    assert pull(f"{NAME}@main").code == 0
    assert (models / "tiny/model.safetensors").read_bytes() == small["model.safetensors"]
    assert [path.name for path in models.iterdir()] == ["tiny"]


def test_another_model_at_the_destination_is_kept(hub, pull, models):
    hub.add(NAME, model_files())
    hub.add("other/tiny", model_files(2))
    assert pull(NAME).code == 0
    before = (models / "tiny/model.safetensors").read_bytes()
    result = pull("other/tiny")
    assert result.code == ExitCode.FILE
    assert "is not empty" in result.err
    assert "--overwrite" in result.err
    assert (models / "tiny/model.safetensors").read_bytes() == before
    assert not [request for request in hub.requests if request.path.startswith("/other/tiny/resolve")]
    assert pull("other/tiny", models / "mine").code == 0
    assert pull("other/tiny", "--overwrite").code == 0
    assert (models / "tiny/model.safetensors").read_bytes() != before


def test_cut_connections_are_resumed_within_one_pull(hub, pull, models):
    files = model_files(wide=2048)
    hub.add(NAME, files)
    hub.cut_after = [1_000_000, 1, 600_000]
    assert pull(NAME).code == 0
    assert (models / "tiny/model.safetensors").read_bytes() == files["model.safetensors"]
    ranges = [request.range for request in hub.downloads("/store/acme/tiny/model.safetensors")]
    assert ranges == [None, f"bytes={3 * CHUNK}-", f"bytes={3 * CHUNK}-", f"bytes={5 * CHUNK}-"]


def test_a_server_that_ignores_ranges_is_no_harm(hub, pull, models):
    files = model_files(wide=2048)
    hub.add(NAME, files)
    hub.cut_after, hub.ignore_ranges = [1_000_000], True
    assert pull(NAME).code == 0
    assert (models / "tiny/model.safetensors").read_bytes() == files["model.safetensors"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_pull_that_is_ended_leaves_no_model_and_the_next_one_goes_on(  # noqa: PLR0917 - fixtures
    hub, pull, edgectl, environment, models, number
):
    files = model_files(shards=3, wide=8192)
    hub.add(NAME, files)
    hub.slow_chunk = 64 << 10
    process = subprocess.Popen(
        [*COMMAND, "pull", NAME, "--no-reference"],
        env=clean_environment(**environment),
        stderr=subprocess.PIPE,
    )
    shard = sorted(name for name in files if name.endswith(".safetensors"))[1]
    end = time.monotonic() + 60
    while not list(models.glob(f".tiny.pulling/.{shard}.*.partial")) and time.monotonic() < end:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.005)
    while not sum(path.stat().st_size for path in models.glob(f".tiny.pulling/.{shard}.*.partial")):
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode != 0
    assert [path.name for path in models.iterdir()] == [".tiny.pulling"]
    assert listed(edgectl, environment) == []
    (partial,) = models.glob(f".tiny.pulling/.{shard}.*.partial")
    size = partial.stat().st_size
    assert 0 < size < len(files[shard])
    hub.slow_chunk = 0
    hub.requests.clear()
    assert pull(NAME).code == 0
    assert [request.range for request in hub.downloads(f"/store/{NAME}/{shard}")] == [f"bytes={size}-"]
    assert not hub.downloads("config.json")  # whole files are not fetched again
    assert all(
        (models / "tiny" / name).read_bytes() == files[name]
        for name in files
        if name.endswith(".safetensors")
    )
    assert [path.name for path in models.iterdir()] == ["tiny"]


def test_two_pulls_at_once(hub, pull, environment, models):
    hub.add(NAME, model_files(wide=8192))
    hub.slow_chunk = 64 << 10
    process = subprocess.Popen(
        [*COMMAND, "pull", NAME, "--no-reference"],
        env=clean_environment(**environment),
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 60
    while not list(models.glob(".tiny.pulling/*.partial")) and time.monotonic() < end:
        time.sleep(0.01)
    second = pull(NAME)
    assert second.code == ExitCode.REFUSED
    assert "another edgectl pull fetches this model" in second.err
    assert process.wait(60) == 0
    assert [path.name for path in models.iterdir()] == ["tiny"]


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_content_that_is_not_what_the_hub_says_is_thrown_away(hub, pull, models, file):
    repository = hub.add(NAME, model_files())
    hub.other_bytes = True
    result = pull(NAME)
    assert result.code == ExitCode.FILE
    assert "the hub says" in result.err
    assert not (models / "tiny").exists()
    assert not list(models.glob(".tiny.pulling/*.partial"))
    hub.other_bytes = False
    assert pull(NAME).code == 0
    assert (models / "tiny" / file).read_bytes() == repository.files[file]


def test_a_hub_that_goes_away(hub, pull, models):
    """What came stays and is told; wrong bytes in it are found out; another commit takes nothing of it."""
    hub.add(NAME, {**model_files(wide=2048), "chat_template.jinja": b"old"})
    hub.cut_after = [1_000_000] + [0] * 8
    result = pull(NAME)
    assert result.code == ExitCode.FAILED
    assert "the same command goes on from there" in result.err
    assert str(models / ".tiny.pulling") in result.err
    assert (models / ".tiny.pulling/chat_template.jinja").exists()
    (partial,) = models.glob(".tiny.pulling/.model.safetensors.*.partial")
    partial.write_bytes(bytes(partial.stat().st_size))
    hub.cut_after = []
    assert "the hub says" in pull(NAME).err
    assert not partial.exists()
    files = model_files(5)
    hub.add(NAME, files, commit="c" * 40)
    assert pull(NAME).code == 0
    assert not (models / "tiny/chat_template.jinja").exists()
    assert (models / "tiny/model.safetensors").read_bytes() == files["model.safetensors"]


def test_the_hub_that_is_down(hub, pull, models):
    hub.add(NAME, model_files())
    hub.broken = True
    result = pull(NAME)
    assert result.code == ExitCode.FAILED
    assert result.err.count("\n") == 1
    assert "does not answer" in result.err
    assert not models.exists()
    refused = pull(NAME, HF_ENDPOINT="http://127.0.0.1:1")
    assert refused.code == ExitCode.FAILED
    assert "does not answer" in refused.err


def test_tokens(hub, pull, tmp_path):
    hub.add(NAME, model_files(), token="secret-token")
    result = pull(NAME)
    assert result.code == ExitCode.REFUSED
    assert "set HF_TOKEN" in result.err
    assert pull(NAME, HF_TOKEN="wrong").code == ExitCode.REFUSED
    done = pull(NAME, HF_TOKEN="secret-token")
    assert done.code == 0
    assert "secret-token" not in done.out + done.err
    assert all(
        "secret-token" not in path.read_text(errors="replace")
        for path in (tmp_path / "models/tiny").glob("*.json")
    )
    hub.add("acme/gated", model_files(), token="secret-token", gated=True)
    gated = pull("acme/gated")
    assert gated.code == ExitCode.REFUSED
    assert "terms to be accepted" in gated.err


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b"x"}, "only as pickles (pytorch_model.bin)"),
        ({"README.md": b"x"}, "holds neither model.safetensors nor model.safetensors.index.json nor a GGUF file"),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}, "holds an adapter, not a model"),
        (model_files(model_type="mamba"), "acme/tiny: config.json: model_type 'mamba' is not supported"),
        (model_files(num_key_value_heads=None), "num_key_value_heads is missing"),
        (model_files(vocab_size=9999), "257 tokens for the 9999 rows"),
        ({**model_files(), "tokenizer.json": b"{}"}, "acme/tiny: tokenizer.json: cannot be loaded"),
        ({**model_files(), "chat_template.jinja": b"{% include 'x' %}"}, "cannot use other files"),
    ],
    ids=["pickles", "nothing", "adapter", "architecture", "heads", "vocabulary", "tokenizer", "template"],
)  # fmt: skip
def test_what_is_not_supported_costs_no_gigabytes(hub, pull, models, files, message):
    hub.add(NAME, files)
    result = pull(NAME)
    assert result.code == ExitCode.FILE
    assert message in result.err.splitlines()[-1]
    assert not hub.downloads("model.safetensors")
    assert not models.exists() or not list(models.iterdir())


def test_weights_that_contradict_the_configuration(hub, pull, models):
    hub.add(NAME, model_files(intermediate_size=100))
    result = pull(NAME)
    assert result.code == ExitCode.FILE
    assert "mlp" in result.err.splitlines()[-1]
    assert not list(models.iterdir())


@pytest.mark.parametrize(("name", "message"), [
    ("acme/none", "there is no such repository, or it is private"),
    (f"{NAME}@nowhere", "the repository has no such revision"),
])  # fmt: skip
def test_what_is_not_there(hub, pull, name, message):
    hub.add(NAME, model_files())
    result = pull(name)
    assert result.code == ExitCode.REFUSED
    assert message in result.err
    assert pull(f"{hub.address.replace('http://127.0.0.1', 'x')}/a/b/c").code == ExitCode.USAGE


def test_a_gguf_file_of_several(hub, pull, models, small_gguf):
    content = small_gguf.read_bytes()
    hub.add(NAME, {"tiny-Q4_0.gguf": content, "tiny-Q8_0.gguf": b"other", "README.md": b"x"})
    result = pull(NAME)
    assert result.code == ExitCode.FILE
    assert "name one GGUF file, several are there: tiny-Q4_0.gguf, tiny-Q8_0.gguf" in result.err
    assert pull(NAME, "--file", "q5").code == ExitCode.FILE
    assert pull(NAME, "--file", "q4_0", "--dtype", "bfloat16").code == 0
    assert {path.name for path in (models / "tiny").iterdir()} >= {"config.json", "model.safetensors"}
    assert [path.name for path in models.iterdir()] == ["tiny"]
    assert not hub.downloads("tiny-Q8_0.gguf")
    assert json.loads((models / "tiny/edged.json").read_text())["source"]["file"] == "tiny-Q4_0.gguf"
    assert "already" in pull(NAME, "--file", "q4_0").out


@pytest.mark.parametrize("how", [{"flag": True}, {"HF_HUB_OFFLINE": "1"}])
def test_offline_from_the_hubs_cache(hub, pull, models, tmp_path, how):
    files = model_files()
    missing = pull(NAME, "--offline")
    assert missing.code == ExitCode.REFUSED
    assert "is not in the hub's cache" in missing.err
    cache = tmp_path / "hf/hub/models--acme--tiny"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs/main").write_text("d" * 40)
    (cache / "blobs").mkdir()
    snapshot = cache / "snapshots" / ("d" * 40)
    snapshot.mkdir(parents=True)
    for name, content in files.items():
        blob = cache / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / name).symlink_to(blob)
    flags = ["--offline"] if how.pop("flag", False) else []
    result = pull(NAME, *flags, **how)
    assert result.code == 0, result.err
    assert (models / "tiny/model.safetensors").read_bytes() == files["model.safetensors"]
    assert not (models / "tiny/model.safetensors").is_symlink()
    assert not hub.requests


def test_bars_on_a_terminal(hub, environment, models):
    hub.add(NAME, model_files())
    with Terminal("pull", NAME, "--no-reference", **environment) as terminal:
        assert terminal.end() == 0, terminal.text
    assert "━" in terminal.text
    assert "fetching" in terminal.text
    assert (models / "tiny").exists()
    assert TEMPLATE in (models / "tiny/tokenizer_config.json").read_text()


@pytest.mark.soak
def test_pulls_killed_at_random_moments(hub, pull, edgectl, environment, models):
    generator = random.Random(0)
    for round_number in range(12):
        files = model_files(round_number, shards=3, wide=8192)
        hub.add(NAME, files, commit=f"{round_number:040x}")
        hub.slow_chunk = 64 << 10
        while True:
            asked = len(hub.requests)
            process = subprocess.Popen(
                [*COMMAND, "pull", NAME, "--no-reference"],
                env=clean_environment(**environment),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            while process.poll() is None and len(hub.requests) == asked:  # it has not come so far yet
                time.sleep(0.01)
            try:
                code = process.wait(generator.uniform(0, 1.5))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                code = -9
            for name in listed(edgectl, environment):
                assert edgectl("models", "verify", name, **environment).code == 0
            if code == 0:
                break
        assert all(
            (models / "tiny" / name).read_bytes() == files[name] for name in files if "safetensors" in name
        )
        assert [path.name for path in models.iterdir()] == ["tiny"]
