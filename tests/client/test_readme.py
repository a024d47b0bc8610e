"""The README's Python example, as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_python_example_streams(daemon):
    example = re.search(
        r"```python\n(from edged.client import Client\n.*?)```", README.read_text(), re.DOTALL
    )
    assert example is not None
    result = subprocess.run(
        [sys.executable, "-c", example[1]],
        env={**os.environ, "EDGED_ADDRESS": daemon.address},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
