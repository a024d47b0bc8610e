from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "demo-logits"
KEPT = 200
"""Answers that are kept, of less than 13 MiB each."""


class RememberedReference:
    """transformers' reading of the demo model, whose logits for tokens that it has seen come from ``.cache/``.

    Logits are a function of the tokens, the weights and transformers alone; computing those of the tests takes longer
    than what is tested.
    """

    def __init__(self, load, key: str) -> None:
        self._load, self._key = load, key
        self._model = None

    def __call__(self, ids, *, logits_to_keep, use_cache):
        import torch

        what = f"{self._key} {ids.tolist()} {logits_to_keep}"
        file = CACHE / hashlib.sha256(what.encode()).hexdigest()
        if file.exists():
            os.utime(file)
            return SimpleNamespace(logits=torch.load(file))
        if self._model is None:
            self._model = self._load()
        result = self._model(ids, logits_to_keep=logits_to_keep, use_cache=use_cache)
        CACHE.mkdir(exist_ok=True)
        half = file.with_suffix(f".{os.getpid()}")
        torch.save(result.logits, half)
        half.rename(file)
        for old in sorted(CACHE.iterdir(), key=lambda path: path.stat().st_mtime)[:-KEPT]:
            old.unlink(missing_ok=True)
        return result


@pytest.fixture(scope="session")
def remembered_reference(demo_gguf, request):
    import importlib.metadata

    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "torch")]
    key = f"{versions} {demo_gguf.name} {demo_gguf.stat().st_mtime_ns}"
    return RememberedReference(lambda: request.getfixturevalue("demo_reference"), key)


@pytest.fixture(scope="session")
def demo_tokenizer(demo_model):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(demo_model / "tokenizer.json"))
