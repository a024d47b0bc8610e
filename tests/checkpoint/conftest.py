"""Small GGUF files of architecture llama, made to measure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest

if TYPE_CHECKING:
    from pathlib import Path

ValueType = gguf.GGUFValueType
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 256, 512, 2, 4, 2, 64

# A byte-level vocabulary: all bytes, some merges, some special tokens.
LETTERS = [chr(c) for c in range(256) if chr(c).isprintable() and c not in {32, 0xAD}]
ALPHABET = LETTERS + [chr(256 + number) for number in range(256 - len(LETTERS))]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "1 2", "12 3", "Ġ Ġ", "ä ½", "ä½ ł"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]
TOKENS = [*ALPHABET, *[merge.replace(" ", "") for merge in MERGES], *SPECIAL, ""]
TYPES = [1] * (len(TOKENS) - 5) + [3, 3, 3, 4, 5]


def _default_metadata() -> dict[str, Any]:
    first = len(TOKENS) - 5
    return {
        "llama.context_length": 4096,
        "llama.block_count": LAYERS,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 500000.0,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.vocab_size": len(TOKENS),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": first + 1,
        "tokenizer.ggml.eos_token_id": first + 2,
        "tokenizer.ggml.padding_token_id": first,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }


def _default_tensors() -> dict[str, np.ndarray[Any, Any]]:
    generator = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray[Any, Any]:
        values: np.ndarray[Any, Any] = generator.standard_normal((rows, columns), np.float32)
        values *= np.float32(0.05)
        return values

    tensors = {
        "token_embd.weight": matrix(len(TOKENS), HIDDEN),
        "output_norm.weight": np.ones(HIDDEN, np.float32),
    }
    for layer in range(LAYERS):
        blk = f"blk.{layer}."
        tensors |= {
            blk + "attn_norm.weight": matrix(1, HIDDEN)[0],
            blk + "attn_q.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            blk + "attn_k.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            blk + "attn_v.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            blk + "attn_output.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            blk + "ffn_norm.weight": matrix(1, HIDDEN)[0],
            blk + "ffn_gate.weight": matrix(INNER, HIDDEN),
            blk + "ffn_up.weight": matrix(INNER, HIDDEN),
            blk + "ffn_down.weight": matrix(HIDDEN, INNER),
        }
    return tensors


@dataclass
class GgufRecipe:
    """What goes into a GGUF file; change it, then write it.

    A tensor may be packed already: then ``types`` says how.
    """

    architecture: str = "llama"
    metadata: dict[str, Any] = field(default_factory=_default_metadata)
    tensors: dict[str, np.ndarray[Any, Any]] = field(default_factory=_default_tensors)
    types: dict[str, gguf.GGMLQuantizationType] = field(default_factory=dict)

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in self.metadata.items():
            self._add(writer, key, value)
        for name, array in self.tensors.items():
            writer.add_tensor(name, array, raw_dtype=self.types.get(name))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    @staticmethod
    def _add(writer: Any, key: str, value: Any) -> None:
        kinds = {bool: ValueType.BOOL, int: ValueType.UINT32, float: ValueType.FLOAT32, str: ValueType.STRING}
        if isinstance(value, list):
            kind = kinds[type(value[0])]
            writer.add_key_value(
                key, value, ValueType.ARRAY, ValueType.INT32 if kind is ValueType.UINT32 else kind
            )
        else:
            writer.add_key_value(key, value, kinds[type(value)])


@pytest.fixture(scope="session")
def new_recipe() -> type[GgufRecipe]:
    return GgufRecipe


@pytest.fixture
def recipe() -> GgufRecipe:
    return GgufRecipe()


@pytest.fixture(scope="session")
def demo_reader(demo_gguf: Path) -> gguf.GGUFReader:
    """The demo file as the gguf library reads it, which takes seconds."""
    return gguf.GGUFReader(demo_gguf)
