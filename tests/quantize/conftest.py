"""Text to calibrate with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty kilobytes of letters that are not all alike."""
    random = np.random.default_rng(0)
    words = [
        "".join(chr(97 + c) for c in random.integers(0, 26, size)) for size in random.integers(1, 9, 200)
    ]
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text(" ".join(words[index] for index in random.zipf(1.5, 4000) % 200))
    return path
