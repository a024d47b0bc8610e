"""Which executor runs a model, where this machine has one."""

from __future__ import annotations

from pathlib import Path

import pytest

from edged.config import ModelConfig
from edged.errors import ConfigError
from edged.executor import available


@pytest.mark.parametrize("executor", ["auto", "torch"])
def test_an_executor_without_its_torch_is_refused_before_anything_starts(monkeypatch, executor):
    model = ModelConfig(name="a", path=Path("a"), executor=executor)
    monkeypatch.setattr(available, "find_spec", lambda _name: object())
    assert available.choose_executor(model) == "torch"
    monkeypatch.setattr(available, "find_spec", lambda _name: None)
    with pytest.raises(
        ConfigError, match=f"executor {executor} needs torch, which is not installed"
    ) as caught:
        available.choose_executor(model)
    assert caught.value.field == "executor"
