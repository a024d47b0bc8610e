from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def demo_tokenizer(demo_model):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(demo_model / "tokenizer.json"))
