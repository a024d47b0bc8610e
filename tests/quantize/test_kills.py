"""Runs that are killed at any moment: by the clock, before each change of the file system, and through the command line."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from quantized_models import random_model, write_folder
from test_ternary import ternary_model

from edged.errors import CheckpointError
from edged.quantize.calibration import read_documents
from edged.quantize.recipe import Recipe
from edged.quantize.run import prepare_calibration, quantize
from edged.quantize.state import State, state_folder

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("models") / "qwen2", random_model("qwen2"))


def killed(model: Path, folder: Path, text: Path, method: str, *numbers: float) -> Any:
    """What tests/quantize/killed_runs.py reports."""
    helper = Path(__file__).with_name("killed_runs.py")
    command = [sys.executable, helper, model, folder / "runs/q", text, method, *numbers]
    result = subprocess.run(
        list(map(str, command)), env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_some_moments(model, text, tmp_path):
    found = killed(model, tmp_path, text, "awq-gptq", 1, 0.04, 5)
    assert found["points"] > 60
    assert found["resumed"] > 2


@pytest.mark.parametrize("share", [0.2, pytest.param(1.0, marks=pytest.mark.soak)])
def test_packing_that_is_killed_begins_again(text, tmp_path, share):
    source = write_folder(tmp_path / "dense", ternary_model(32))
    found = killed(source, tmp_path, text, "ternary-pack", 4, share, 8)
    assert found["points"] > 10


@pytest.mark.soak
@pytest.mark.parametrize("method", ["gptq", "p-gptq", "awq-gptq", "rtn"])
def test_every_moment(model, text, tmp_path, method):
    found = killed(model, tmp_path, text, method, 2, 1.0, 150)
    assert found["killed"] > found["points"] + 100
    assert found["resumed"] > found["points"] / 2


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_edgectl_killed_again_and_again_ends_with_the_same_bytes(model, text, tmp_path):
    """Whole processes, killed at random times from their start on; the same command until it has ended."""

    def command(name: str) -> list[str]:
        return [
            *(sys.executable, "-m", "edged.cli", "quantize", str(model), str(tmp_path / name)),
            *("--method", "p-gptq", "--group", "32", "--calibration", str(text), "--threads", "1"),
            *("--sequences", "24", "--sequence-length", "128"),
        ]

    began = time.monotonic()
    subprocess.run(command("whole"), env=ENVIRONMENT, check=True, capture_output=True)
    seconds = time.monotonic() - began
    chance, kills, finished = random.Random(3), 0, 0
    while finished < 3:
        process = subprocess.Popen(
            command("q"), env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            _, errors = process.communicate(timeout=chance.uniform(0.4, 1.1) * seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            kills += 1
            # Killed when all was done: nothing is left to do.
            if not (tmp_path / "q").exists() or state_folder(tmp_path / "q").exists():
                continue
        else:
            assert process.returncode == 0, errors
        finished += 1
        assert weights(tmp_path / "q") == weights(tmp_path / "whole")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["q", "whole"]
        for path in (tmp_path / "q").iterdir():
            path.unlink()
    assert kills


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes() + (folder / "config.json").read_bytes()


class Killed(BaseException):
    pass


def test_a_run_that_had_only_to_tidy_up_is_done(model, text, tmp_path, monkeypatch):
    recipe = Recipe("gptq", group=32)
    used = prepare_calibration(model, read_documents(text), count=4, length=48)

    def killed_here(self):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(State, "remove", killed_here)
        with pytest.raises(Killed):
            quantize(model, tmp_path / "q", recipe, used)
    before = weights(tmp_path / "q")
    with pytest.raises(
        CheckpointError, match="is not empty"
    ):  # another request is no reason to take it for done
        quantize(model, tmp_path / "q", Recipe("rtn", group=32))
    quantize(model, tmp_path / "q", recipe, used)
    assert weights(tmp_path / "q") == before
    assert not state_folder(tmp_path / "q").exists()
    with pytest.raises(CheckpointError, match="is not empty"):
        quantize(model, tmp_path / "q", recipe, used)


def test_a_request_that_was_half_removed_is_not_mixed_with_the_next(model, text, tmp_path, monkeypatch):
    """Killed while the stages of another request are removed: what is left of them is never taken up."""
    used = prepare_calibration(model, read_documents(text), count=4, length=48)
    first, second = Recipe("gptq", group=32), Recipe("gptq", group=16)
    quantize(model, tmp_path / "whole", first, used)
    commit = State.commit

    def stop_late(self, stage, results):
        commit(self, stage, results)
        if stage == 3:
            raise Killed

    monkeypatch.setattr(State, "commit", stop_late)
    with pytest.raises(Killed):
        quantize(model, tmp_path / "q", first, used)
    unlink = Path.unlink

    def stop_after_first_stage(self, missing_ok=False):
        unlink(self, missing_ok=missing_ok)
        if self.name == "stage-0000.safetensors":
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", stop_after_first_stage)
        with pytest.raises(Killed):
            quantize(model, tmp_path / "q", second, used)
    monkeypatch.setattr(State, "commit", commit)
    quantize(model, tmp_path / "q", first, used)
    assert weights(tmp_path / "q") == weights(tmp_path / "whole")


def test_a_state_without_its_hidden_states_starts_again(model, text, tmp_path, monkeypatch):
    used = prepare_calibration(model, read_documents(text), count=4, length=48)
    recipe = Recipe("gptq", group=32)
    quantize(model, tmp_path / "whole", recipe, used)
    commit = State.commit

    def stop(self, stage, results):
        commit(self, stage, results)
        raise Killed

    monkeypatch.setattr(State, "commit", stop)
    with pytest.raises(Killed):
        quantize(model, tmp_path / "q", recipe, used)
    monkeypatch.setattr(State, "commit", commit)
    (state_folder(tmp_path / "q") / "hidden-0001.f32").unlink()
    quantize(model, tmp_path / "q", recipe, used)
    assert weights(tmp_path / "q") == weights(tmp_path / "whole")
