"""Small random models of each family, and ragged steps to run them on."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

from edged.executor.base import StepBatch
from edged.models.architecture import Architecture
from edged.models.weights import weight_specs

if TYPE_CHECKING:
    from pathlib import Path

_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "vocab_size": 331,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        **_COMMON,
        "model_type": "llama",
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "llama_biased": {
        **_COMMON,
        "model_type": "llama",
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "minicpm": {
        **_COMMON,
        "model_type": "minicpm",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 32,
    },
    "qwen2": {
        **_COMMON,
        "model_type": "qwen2",
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "rope_theta": 10000.0,
    },
    "qwen3": {
        **_COMMON,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_theta": 1000000.0,
    },
}


def model_folder(folder: Path, **changes: Any) -> Path:
    """A folder with nothing but the configuration of a one-layer model that the kernels take."""
    folder.mkdir(exist_ok=True)
    config = {**CONFIGS["qwen3"], "head_dim": 64, "num_hidden_layers": 1, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_model(folder: Path, family: str, **changes: Any) -> Architecture:
    """Write a model folder with random weights."""
    config = {**CONFIGS[family], **changes}
    architecture = Architecture.from_config(config)
    random = np.random.default_rng(len(family))
    tensors = {
        source.name: (
            random.normal(1.0 if "norm" in source.name else 0.0, 0.1, source.shape).astype(np.float32)
        )
        for spec in weight_specs(architecture)
        for source in spec.sources
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return architecture


class Sequences:
    """Sequences that grow step by step in shuffled pages."""

    def __init__(self, count: int, pages: int, vocabulary: int, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.lengths = [0] * count
        self.vocabulary = vocabulary
        order = self.random.permutation(count * pages).astype(np.int32)
        self.tables = order.reshape(count, pages)

    def step(self, new: dict[int, int]) -> StepBatch:
        """A step that brings `new[s]` tokens to sequence s; every last token of a sequence and some others are needed."""
        counts = list(new.values())
        starts = np.cumsum([0, *counts]).astype(np.int32)
        positions = [np.arange(self.lengths[s], self.lengths[s] + count) for s, count in new.items()]
        tokens = int(starts[-1])
        needed = {int(end) - 1 for end in starts[1:]} | {int(self.random.integers(tokens))}
        batch = StepBatch(
            token_ids=self.random.integers(0, self.vocabulary, tokens).astype(np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            sequence_starts=starts,
            lengths=np.array([self.lengths[s] for s in new], np.int32),
            page_tables=[self.tables[s] for s in new],
            logit_rows=np.array(sorted(needed), np.int32),
        )
        for s, count in new.items():
            self.lengths[s] += count
        return batch


def mask_words(masks: list[int]) -> Any:
    return np.array(masks, np.uint64).view(np.int32).reshape(-1, 2)


def graph_inputs(batch: StepBatch, masks: list[int] | None = None) -> dict[str, Any]:
    """The step as the graph's inputs; a chain's mask names every token of its sequence up to itself."""
    starts = batch.sequence_starts
    chain = [
        (2 << (row - int(start))) - 1 if row - start < 64 else 0
        for start, end in itertools.pairwise(starts)
        for row in range(start, end)
    ]
    return {
        "token_ids": batch.token_ids,
        "positions": batch.positions,
        "sequence_starts": starts,
        "lengths": batch.lengths,
        "page_tables": np.stack(list(batch.page_tables)),
        "tree_masks": mask_words(chain if masks is None else masks),
        "logit_rows": batch.logit_rows,
    }
