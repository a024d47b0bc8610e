"""A model folder, measured: perplexity and greedy tokens, by edged's executor on the CPU and by transformers in float32."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PROMPTS = 4
PROMPT, ANSWER = 64, 64
"""Tokens of a prompt, and greedy tokens after it, that are compared."""


def perplexity(model: Path, windows: np.ndarray) -> float:
    """Of every token but the first of each window, as edged's executor on the CPU computes its logits."""
    import torch

    executor = _open_executor(model, windows.shape[1])
    total, count = 0.0, 0
    for window in windows:
        logits = torch.from_numpy(executor.logits(_step(window, 0, range(len(window) - 1))))
        targets = torch.from_numpy(window[1:])
        total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        count += len(window) - 1
    executor.close()
    return math.exp(total / count)


def reference_perplexity(model: Path, windows: np.ndarray, device: str) -> float:
    """The same as transformers' model in float32 computes its logits."""
    import torch

    reference = _load_reference(model).to(device)
    total, count = 0.0, 0
    with torch.inference_mode():
        for window in windows:
            tokens = torch.from_numpy(window).to(device)
            logits = reference(tokens[None]).logits[0, :-1].float()
            total += float(torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum"))
            count += len(window) - 1
    return math.exp(total / count)


def tokens_equal(model: Path, windows: np.ndarray) -> float:
    """The share of greedy tokens on the CPU that are the reference's."""
    import torch

    executor, reference = _open_executor(model, windows.shape[1]), _load_reference(model)
    same, count = 0, 0
    for prompt in windows[:: len(windows) // PROMPTS][:PROMPTS, :PROMPT]:
        tokens = torch.from_numpy(prompt)[None]
        with torch.inference_mode():
            expected = reference.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=False,
                min_new_tokens=ANSWER,
                max_new_tokens=ANSWER,
                eos_token_id=None,
            )[0, PROMPT:].tolist()
        answer: list[int] = []
        new, position = prompt, 0
        while len(answer) < ANSWER:
            answer += executor.step(_step(new, position, [len(new) - 1])).tolist()
            position += len(new)
            new = np.array(answer[-1:])
        same += sum(one == other for one, other in zip(answer, expected, strict=True))
        count += ANSWER
    executor.close()
    return same / count


def _open_executor(model: Path, context: int) -> Any:  # noqa: ANN401 - torch is imported here
    """Edged's executor on the CPU."""
    import torch

    from edged.config import ModelConfig
    from edged.executor.torch_executor import TorchExecutor

    executor = TorchExecutor(
        ModelConfig(
            name="bench",
            path=model,
            context_length=context,
            max_sequences=1,
            prefill_chunk=context,
            threads=torch.get_num_threads(),
        )
    )
    executor.load(lambda *_: None)
    return executor


def _step(tokens: np.ndarray, position: int, rows: Sequence[int]) -> Any:  # noqa: ANN401 - as above
    """A step of one sequence whose tokens before `position` are in its pages."""
    from edged.executor.base import PAGE_TOKENS, SamplingRow, StepBatch

    return StepBatch(
        token_ids=tokens.astype(np.int32),
        positions=np.arange(position, position + len(tokens), dtype=np.int32),
        sequence_starts=np.array([0, len(tokens)], np.int32),
        lengths=np.array([position], np.int32),
        page_tables=[np.arange(-(-(position + len(tokens)) // PAGE_TOKENS), dtype=np.int32)],
        logit_rows=np.array(rows, np.int32),
        sampling=tuple(SamplingRow() for _ in rows),
    )


def _load_reference(model: Path) -> Any:  # noqa: ANN401 - transformers is not typed
    """Transformers' model in float32, with 4-bit linears widened by the definition of GPTQ's files."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    tensors = load_file(model / "model.safetensors")
    state = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part == "qweight":
            state[f"{module}.weight"] = torch.from_numpy(_widened(tensors, module))
        elif part not in ("qzeros", "scales", "g_idx"):
            state[name] = tensor.float()
    loader: Any = AutoModelForCausalLM
    reference = loader.from_config(config, dtype=torch.float32).eval()
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    reference.load_state_dict(state)
    return reference


def _widened(tensors: dict[str, Any], module: str) -> np.ndarray:
    """`scale * (q - (zero + 1))`, float32 `[N, K]`: eight numbers a word, the first in the lowest bits."""
    words, zero_words, scales, groups = (
        tensors[f"{module}.{part}"].numpy() for part in ("qweight", "qzeros", "scales", "g_idx")
    )
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    q = (words.view(np.uint32)[:, None, :] >> shifts[None, :, None]) & 15  # [K / 8, 8, N]
    zeros = (zero_words.view(np.uint32)[:, :, None] >> shifts) & 15  # [groups, N / 8, 8]
    above = zeros.reshape(len(zeros), -1)[groups].astype(np.float32) + 1  # [K, N]
    difference = q.reshape(above.shape).astype(np.float32) - above
    weight: np.ndarray = (scales[groups].astype(np.float32) * difference).T.copy()
    return weight
