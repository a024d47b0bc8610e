"""Small random models and their executors of device cuda, on the kernels' references or on a GPU."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from host_device import HostDevice
from safetensors.numpy import save_file

from edged.config import AttentionConfig, ModelConfig
from edged.executor.cuda_executor import CudaExecutor
from edged.models.architecture import Architecture
from edged.models.weights import weight_specs

if TYPE_CHECKING:
    from pathlib import Path

SMALL = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 257,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
WIDE = {
    **SMALL,
    "model_type": "minicpm",
    "num_attention_heads": 16,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "scale_emb": 3,
    "scale_depth": 1.4,
    "dim_model_base": 32,
}
BIASED = {**SMALL, "model_type": "llama", "attention_bias": True, "mlp_bias": True}
MODELS = {"small": SMALL, "wide": WIDE, "biased": BIASED}
FEW = AttentionConfig(mode="sparse", dense_below=300, top_k=3, window=64)
SETTINGS: dict[str, Any] = {"context_length": 1024, "max_sequences": 3, "prefill_chunk": 512}
PROMPT = np.random.default_rng(5).integers(0, 257, 520).tolist()
ERROR = {"bfloat16": 0.06, "float16": 0.008}
"""Mean difference from fp32 over the spread of the logits: 16 and 13 bits of mantissa less, through two layers."""


def write_model(folder, config, seed=11):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(seed)
    tensors = {}
    for spec in weight_specs(Architecture.from_config(config)):
        for source in spec.sources:
            if len(source.shape) > 1:
                values = 1.5 * random.standard_normal(source.shape) / source.shape[-1] ** 0.5
            else:
                values = 0.5 + random.random(source.shape)
            tensors[source.name] = values.astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder


def error(ours, expected):
    assert np.isfinite(ours).all()
    return np.abs(ours - expected).mean() / expected.std()


class CudaExecutors:
    """Executors of :data:`MODELS`, each loaded once."""

    def __init__(self, root: Path, place: str) -> None:
        """Writes the models below `root`; their executors run on the kernels' "references", or "kernels" on the first GPU."""
        self.folders = {name: write_model(root / name, config) for name, config in MODELS.items()}
        self._open_device = HostDevice if place == "references" else None
        self._made: dict[Any, CudaExecutor] = {}

    def load(self, model: str, **settings: Any) -> CudaExecutor:
        """One that the caller closes."""
        settings = {"dtype": "float16", **SETTINGS, **settings}
        config = ModelConfig(name="m", path=self.folders[model], device="cuda", **settings)
        executor = CudaExecutor(config, self._open_device)
        executor.load(lambda *_: None)
        return executor

    def __call__(
        self,
        model: str,
        dtype: str = "bfloat16",
        attention: AttentionConfig = AttentionConfig(),  # noqa: B008 - frozen
    ) -> CudaExecutor:
        key = (model, dtype, attention)
        if key not in self._made:
            self._made[key] = self.load(model, dtype=dtype, attention=attention, embeddings="mean")
        return self._made[key]

    def close(self) -> None:
        for executor in self._made.values():
            executor.close()
