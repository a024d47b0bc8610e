"""The tests' chat templates, and transformers to render them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import tokenizers
import transformers

from edged.checkpoint.chat_template import ChatTemplate

TEMPLATES = Path(__file__).parent / "templates"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def transformers_tokenizer() -> Any:
    """One that knows the special tokens and no others."""
    backend: Any = transformers.PreTrainedTokenizerFast
    return backend(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), **SPECIAL)


def source(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


@functools.cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate({"default": source(name)}, SPECIAL)
