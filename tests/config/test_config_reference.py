from __future__ import annotations

from pathlib import Path

import pytest

from edged.config_reference import BEGIN, END, main, reference, replaced
from edged.config_schema import known_keys

README = Path(__file__).parents[2] / "README.md"


def test_every_key_has_its_row():
    rows = reference().splitlines()
    for key in known_keys():
        assert any(row.startswith(f"| `{key.rsplit('.', 1)[-1].removesuffix('[]')}` |") for row in rows), key


def test_limits_units_and_defaults_are_said():
    text = reference()
    assert (
        "| `context_length` | Most tokens of prompt and answer together | a whole number from 64 to 4194304 |"
        in text
    )
    assert "| a size from 1KiB to 1GiB | twice limits.prompt_size, at least 2 MiB |" in text
    assert "| a duration from 0s to 24h | `30s` |" in text
    assert "| one of debug, info, warning, error | `info` |" in text
    assert "`models[].attention`:" in text


def test_writing_into_a_document(tmp_path, capsys):
    file = tmp_path / "README.md"
    file.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert main(["--write", str(file)]) == 0
    assert file.read_text() == f"before\n{BEGIN}\n{reference()}{END}\nafter\n"
    assert replaced(file.read_text()) == file.read_text()
    assert main([]) == 0
    assert capsys.readouterr().out == reference()


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}\n{BEGIN}", f"{BEGIN}{END}{BEGIN}"])
def test_a_document_without_markers_is_refused(text):
    with pytest.raises(ValueError, match="config:begin"):
        replaced(text)


def test_readme_holds_the_reference():
    text = README.read_text("utf-8")
    assert replaced(text) == text, "run: python -m edged.config_reference --write README.md"
