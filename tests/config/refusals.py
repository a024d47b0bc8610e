"""What a refused configuration says, as the tests of its faults ask for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from edged.config_reader import ConfigFileError, parse_config

FOLDER = Path("/srv/robot")
LEAST = "models: [{name: a, path: b}]\n"


def refusal(text: str) -> ConfigFileError:
    with pytest.raises(ConfigFileError) as caught:
        parse_config(text, folder=FOLDER, source="edged.yaml")
    return caught.value


def model(keys: str) -> str:
    return f"models: [{{name: a, path: b, {keys}}}]"


def assert_one_fault(text: str, path: str, problem: str, remedy: str) -> None:
    """Both parts of the message, and that there is no second fault."""
    error = refusal(text)
    assert len(error.faults) == 1, error
    fault = error.faults[0]
    assert fault.path == error.field == path
    assert problem in fault.problem
    assert remedy in fault.remedy
    assert str(error).startswith("edged.yaml")
    assert (f"{path}: " if path else "") + fault.problem + "; " + fault.remedy in str(error)
    assert str(error).isprintable()
