"""A small random model in float64 on the real executor, and what it says to a request that is alone."""

from __future__ import annotations

import json

import numpy as np
from safetensors.numpy import save_file

from edged.config import ModelConfig
from edged.executor.base import SamplingRow, StepBatch
from edged.executor.torch_executor import TorchExecutor
from edged.models.architecture import Architecture
from edged.models.weights import weight_specs

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float64",
}


def save(folder):
    """Write the model's folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    numbers = np.random.default_rng(5)
    tensors = {
        source.name: numbers.normal(0, 0.3, source.shape) + (1.0 if len(source.shape) == 1 else 0.0)
        for spec in weight_specs(Architecture.read(folder))
        for source in spec.sources
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def load(folder):
    """The executor: 16 pages, 4 sequences, 132 tokens a step."""
    config = ModelConfig(
        name="small",
        path=folder,
        dtype="float64",
        threads=1,
        context_length=256,
        max_sequences=4,
        prefill_chunk=128,
    )
    executor = TorchExecutor(config)
    executor.load(lambda *_: None)
    return executor


class Sequential:
    """What a request gets that has an executor to itself: its prompt in one piece, then token after token.

    Args:
        executor: Nobody else's.
    """

    def __init__(self, executor):
        self._executor = executor
        self._known = {}

    def __call__(self, prompt, count, sampling):
        key = (tuple(prompt), sampling.temperature, sampling.seed if sampling.temperature else 0)
        if len(self._known.get(key, ())) < count:
            self._known[key] = self._generate(prompt, count, sampling)
        return self._known[key][:count]

    def _generate(self, prompt, count, sampling):
        tokens = list(prompt)
        stored = 0
        table = np.arange(4, dtype=np.int32)
        while len(tokens) < len(prompt) + count:
            new = tokens[stored : stored + 128]
            end = stored + len(new)
            row = SamplingRow(sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed, end)
            last = end == len(tokens)
            drawn = self._executor.step(
                StepBatch(
                    token_ids=np.array(new, np.int32),
                    positions=np.arange(stored, end, dtype=np.int32),
                    sequence_starts=np.array([0, len(new)], np.int32),
                    lengths=np.array([stored], np.int32),
                    page_tables=[table[: -(-end // 64)]],
                    logit_rows=np.array([len(new) - 1] if last else [], np.int32),
                    sampling=[row] if last else [],
                )
            )
            stored = end
            if last:
                tokens.append(int(drawn[0]))
        return tokens[len(prompt) :]
