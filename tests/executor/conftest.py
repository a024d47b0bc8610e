from __future__ import annotations

import fcntl
import shutil
from pathlib import Path

import pytest

CACHE = Path(__file__).resolve().parents[2] / ".cache"


@pytest.fixture(scope="session")
def demo_reference(demo_gguf):
    """transformers' own reading of the demo GGUF, fp32; it takes a minute, so what it read is kept in .cache/."""
    import torch
    import transformers

    key = f"transformers {transformers.__version__} {demo_gguf.name} {demo_gguf.stat().st_mtime_ns}"
    folder, stamp = CACHE / "demo-reference", CACHE / "demo-reference.key"
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "demo-reference.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (stamp.exists() and stamp.read_text() == key):
            stamp.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            read = transformers.AutoModelForCausalLM.from_pretrained(
                demo_gguf.parent, gguf_file=demo_gguf.name, dtype=torch.float32
            )
            # A copy without the mark of its origin, which save_pretrained refuses.
            del read.config.quantization_config
            copy = transformers.AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
            copy.load_state_dict(read.state_dict())
            copy.save_pretrained(folder)
            stamp.write_text(key)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def demo_tokenizer(demo_model):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(demo_model / "tokenizer.json"))
