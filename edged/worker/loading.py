"""From a model's configuration to what runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.errors import UnsupportedError

if TYPE_CHECKING:
    from edged.config import ModelConfig
    from edged.decoding.detokenizer import TokenTexts
    from edged.executor.base import Executor


def load_executor(config: ModelConfig) -> tuple[str, Executor]:
    """Make the executor that ``config`` asks for, not loaded yet, and say its name.

    Raises:
        CheckpointError: The folder's ``config.json`` is missing or refused.
        UnsupportedError: There is no such executor in this version.
    """
    if config.executor == "tensorrt":
        raise UnsupportedError(
            f"model {config.name}: executor tensorrt is not part of this version: use torch or auto",
            field="executor",
        )
    from edged.executor.torch_executor import TorchExecutor  # noqa: PLC0415 - imports torch; only its engines do

    return "torch", TorchExecutor(config)


def load_texts(config: ModelConfig) -> TokenTexts:
    """Load the model's tokenizer.

    Raises:
        CheckpointError: The folder has no tokenizer, or one that cannot be read.
    """
    from edged.checkpoint.tokenizer import Tokenizer  # noqa: PLC0415 - not needed by engines under test

    return Tokenizer.load(config.path)
