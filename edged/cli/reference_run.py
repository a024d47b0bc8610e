"""Computes the reference logits of a model folder, as a process of its own: torch is not for edgectl to load.

``python -m edged.cli.reference_run FOLDER``; it writes ``{"what": …, "done": …, "total": …}`` lines, then
``{"error": …}`` if it failed. It ends when its standard input does: nothing it does outlives who started it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from edged import __version__
from edged.checkpoint.folder_record import model_key
from edged.checkpoint.reference_logits import MOST_TOKENS, PROMPT, ReferenceLogits, positions_of
from edged.checkpoint.tokenizer import Tokenizer
from edged.config import ModelConfig
from edged.errors import EdgedError
from edged.executor.base import PAGE_TOKENS, StepBatch

_CONTEXT = 2 * PAGE_TOKENS


def main() -> int:
    """Compute and write the file; return the exit status."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        compute(Path(sys.argv[1]), sys.argv[2], _say)
    except EdgedError as error:
        _line(error=error.message)
        return 1
    return 0


def compute(folder: Path, dtype: str, progress: Any) -> None:  # noqa: ANN401 - the executor's Progress
    """Run the prompt through the torch executor on the CPU and put the logits into the folder.

    Raises:
        CheckpointError: The folder is damaged.
    """
    from edged.executor.torch_executor import TorchExecutor  # noqa: PLC0415 - imports torch

    tokens = np.array(Tokenizer.load(folder).encode(PROMPT)[:MOST_TOKENS], np.int32)
    positions = positions_of(len(tokens))
    executor = TorchExecutor(
        ModelConfig(
            name=folder.name.strip(".") or "model",
            path=folder,
            dtype=dtype,
            context_length=_CONTEXT,
            max_sequences=len(positions),
            prefill_chunk=_CONTEXT,
        )
    )
    executor.load(progress)
    batch = StepBatch(
        token_ids=tokens,
        positions=np.arange(len(tokens), dtype=np.int32),
        sequence_starts=np.array([0, len(tokens)], np.int32),
        lengths=np.zeros(1, np.int32),
        page_tables=[np.arange(_CONTEXT // PAGE_TOKENS, dtype=np.int32)],
        logit_rows=positions,
    )
    logits = executor.logits(batch)
    executor.close()
    made_by = {
        "edged": __version__,
        "torch": version("torch"),
        "executor": "torch",
        "device": "cpu",
        "dtype": dtype,
    }
    ReferenceLogits(model_key(folder), tokens, positions, logits, made_by).write(folder)


def _end_with_parent() -> None:
    while os.read(0, 4096):  # not sys.stdin: a thread that waits in it would end the interpreter with a fault
        pass
    os._exit(1)


def _say(what: str, done: int, total: int) -> None:
    _line(what=what, done=done, total=total)


def _line(**content: object) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
