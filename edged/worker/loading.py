"""From a model's configuration to what runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.checkpoint.tokenizer import Tokenizer
from edged.decoding.token_table import TokenTable
from edged.executor.available import choose_executor
from edged.memory.heap import trim_heap
from edged.models.architecture import Architecture

if TYPE_CHECKING:
    from edged.config import ModelConfig
    from edged.executor.base import Executor


def load_executor(config: ModelConfig) -> tuple[str, Executor]:
    """Make the executor that ``config`` asks for, not loaded yet, and say its name.

    Raises:
        CheckpointError: The folder's ``config.json`` is missing or refused.
        ConfigError: There is no such executor in this version, or not on this machine.
        UnsupportedError: The executor does not run this model there.
    """
    name = choose_executor(config)
    if name == "tensorrt":
        from edged.executor.tensorrt_executor import TensorRTExecutor  # noqa: PLC0415

        return name, TensorRTExecutor(config)
    # Both import torch; only its engines do.
    if config.device == "cuda":
        from edged.executor.cuda_executor import CudaExecutor  # noqa: PLC0415

        return name, CudaExecutor(config)
    from edged.executor.torch_executor import TorchExecutor  # noqa: PLC0415

    return name, TorchExecutor(config)


def load_texts(config: ModelConfig) -> TokenTable:
    """Load the texts of the model's tokens.

    Raises:
        CheckpointError: The folder has no tokenizer, one that cannot be read, or one of another model.
    """
    rows = Architecture.of(config).vocabulary
    tokenizer = Tokenizer.load(config.path)
    tokenizer.check_embedding(rows)
    table = TokenTable(tokenizer, rows)
    del tokenizer
    trim_heap()  # the tokenizer's many small pieces are free now
    return table
