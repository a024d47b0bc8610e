"""What a reload takes over, and what it names."""

from __future__ import annotations

import pytest

from edged.config_reader import read_config
from edged.reload import reload_config

LEAST = "models: [{name: a, path: b}]\n"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "edged.yaml"
    path.write_text(LEAST)
    return path


@pytest.fixture(autouse=True)
def no_logging(monkeypatch):
    monkeypatch.setattr("edged.log.configure", lambda *_args, **_options: None)


def test_what_can_change_changes(file):
    running = read_config(file)
    file.write_text(LEAST + "log: {level: debug}\ndrain_timeout: 3s\n")
    config, said = reload_config(file, running)
    assert (config.log.level, config.drain_timeout) == ("debug", 3.0)
    assert said == "reloaded: drain_timeout, log.level"
    assert reload_config(file, config)[1] == "reloaded: nothing has changed"


def test_what_needs_a_restart_is_named_and_not_taken(file):
    running = read_config(file)
    file.write_text("models: [{name: a, path: b, context_length: 128}]\nqueue: {capacity: 3}\n")
    config, said = reload_config(file, running)
    assert config == running
    assert said.startswith("reloaded; a restart is needed for models[0].context_length")
    assert "queue.capacity" in said


def test_a_refused_file_changes_nothing(file):
    running = read_config(file)
    file.write_text("nonsense: 1\n")
    config, said = reload_config(file, running)
    assert config is running
    assert "nonsense" in said
