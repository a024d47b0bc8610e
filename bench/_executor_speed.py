"""The torch executor beside transformers on the CPU: time a decoded token and a prefilled prompt.

Both run the same model in the same dtype on the same threads, in turns; a figure is the median of the rounds' ratios.
transformers keeps its default KV cache and computes the last token's logits alone, as its `generate` does.
"""

from __future__ import annotations

import inspect
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from edged.config import ModelConfig
from edged.executor.base import PAGE_TOKENS, SamplingRow, StepBatch
from edged.executor.torch_executor import TorchExecutor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PROMPT = 1000
DECODED = 24
SHORT_PROMPT = 128
CHUNK = 512


class Ours:
    """The executor, one sequence at a time."""

    def __init__(self, model: Path, dtype: str, threads: int) -> None:
        self._executor = TorchExecutor(
            ModelConfig(
                name="bench",
                path=model,
                dtype=dtype,
                context_length=2048,
                max_sequences=1,
                prefill_chunk=CHUNK,
                threads=threads,
            )
        )
        self._executor.load(lambda *_: None)
        self._table = np.arange(2048 // PAGE_TOKENS, dtype=np.int32)

    def prefill(self, prompt: list[int]) -> int:
        """Run a prompt; return the next token."""
        drawn: list[int] = []
        for start in range(0, len(prompt), CHUNK):
            # As the scheduler asks: logits of the last chunk alone.
            drawn = self._step(prompt[start : start + CHUNK], start, draws=start + CHUNK >= len(prompt))
        return drawn[0]

    def decode(self, token: int, past: int, count: int) -> int:
        """Run `count` steps from the token at position `past`; return the last token drawn."""
        for position in range(past, past + count):
            (token,) = self._step([token], position)
        return token

    def close(self) -> None:
        """Free its memory."""
        self._executor.close()

    def _step(self, tokens: list[int], past: int, *, draws: bool = True) -> list[int]:
        batch = StepBatch(
            token_ids=np.array(tokens, np.int32),
            positions=np.arange(past, past + len(tokens), dtype=np.int32),
            sequence_starts=np.array([0, len(tokens)], np.int32),
            lengths=np.array([past], np.int32),
            page_tables=[self._table],
            logit_rows=np.array([len(tokens) - 1] * draws, np.int32),
            sampling=(SamplingRow(position=past + len(tokens)),) * draws,
        )
        drawn: list[int] = self._executor.step(batch).tolist()
        return drawn


class Theirs:
    """transformers, one sequence at a time."""

    def __init__(self, model: Path, dtype: str) -> None:
        from transformers import AutoModelForCausalLM

        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self._model = loaded.eval()
        self._cache: Any = None
        # The argument's name changed; older versions know only the first.
        names = inspect.signature(loaded.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> int:
        """Run a prompt; return the next token."""
        result = self._model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        self._cache = result.past_key_values
        return int(result.logits[0, -1].argmax())

    @torch.inference_mode()
    def decode(self, token: int, past: int, count: int) -> int:  # noqa: ARG002 - the cache knows
        """Run `count` steps; return the last token drawn."""
        for _ in range(count):
            result = self._model(torch.tensor([[token]]), use_cache=True, **{self._cache_name: self._cache})
            token = int(result.logits[0, -1].argmax())
        return token


def compare(
    model: Path, dtype: str, threads: int, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Ratios and rates of one dtype.

    Args:
        model: A model folder.
        dtype: float32 or bfloat16.
        threads: For both.
        rounds: Of each measurement; a first one is not counted.
        clock: Seconds; the wall's by default.
    """
    torch.set_num_threads(threads)
    ours, theirs = Ours(model, dtype, threads), Theirs(model, dtype)
    prompt = np.random.default_rng(0).integers(0, 1000, PROMPT).tolist()
    seconds: dict[str, list[float]] = {
        name: [] for name in ("decode", "their decode", "prefill", "their prefill")
    }

    def timed(name: str, work: Callable[..., int], *arguments: object) -> None:
        begin = clock()
        work(*arguments)
        seconds[name].append(clock() - begin)

    for _ in range(rounds + 1):
        first = ours.prefill(prompt[:SHORT_PROMPT])
        theirs.prefill(prompt[:SHORT_PROMPT])
        timed("decode", ours.decode, first, SHORT_PROMPT, DECODED)
        timed("their decode", theirs.decode, first, SHORT_PROMPT, DECODED)
    for _ in range(rounds + 1):
        timed("prefill", ours.prefill, prompt)
        timed("their prefill", theirs.prefill, prompt)
    ours.close()
    counted = {name: values[1:] for name, values in seconds.items()}
    median = {name: statistics.median(values) for name, values in counted.items()}

    def ratio(name: str) -> float:
        pairs = zip(counted[name], counted[f"their {name}"], strict=True)
        return statistics.median(mine / other for mine, other in pairs)

    return {
        f"decode_vs_transformers_{dtype}": ratio("decode"),
        f"prefill_vs_transformers_{dtype}": ratio("prefill"),
        f"decode_tokens_per_second_{dtype}": DECODED / median["decode"],
        f"transformers_decode_tokens_per_second_{dtype}": DECODED / median["their decode"],
        f"prefill_tokens_per_second_{dtype}": PROMPT / median["prefill"],
        f"transformers_prefill_tokens_per_second_{dtype}": PROMPT / median["their prefill"],
    }


def executor_figures(model: Path, threads: int, rounds: int) -> dict[str, float]:
    """Both dtypes; `decode_vs_transformers` and `prefill_vs_transformers` are the worse one's."""
    figures = {}
    for dtype in ("float32", "bfloat16"):
        figures.update(compare(model, dtype, threads, rounds))
    worst = {
        name: max(figures[f"{name}_float32"], figures[f"{name}_bfloat16"])
        for name in ("decode_vs_transformers", "prefill_vs_transformers")
    }
    return {**worst, **figures}
