"""Has a model's reference logits computed, where that is possible."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from edged.checkpoint.safetensors_files import WeightFiles
from edged.config import ModelConfig
from edged.errors import CheckpointError
from edged.memory.available import available_memory
from edged.memory.buffers import PAGE_TOKENS, ModelPlan
from edged.memory.ledger import TORCH_RUNTIME
from edged.memory.model_rows import model_bytes
from edged.models.architecture import Architecture
from edged.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Progress = Callable[[str, int, int], None]

_ROWS = 4
_HALF = {"BF16": "bfloat16", "F16": "float16"}


def make_reference(folder: Path, progress: Progress | None = None) -> str:
    """Compute the reference logits of a model folder and store them in it, in a process that loads torch.

    Weights and KV are in float32 where the memory allows it, else in the type of the checkpoint.

    Returns:
        Why it was not tried: there is no torch here, or too little memory. Empty when it is done.

    Raises:
        CheckpointError: The model cannot be loaded or run.
    """
    if find_spec("torch") is None:
        return "torch is not installed"
    dtype, refusal = _affordable_dtype(folder)
    if refusal:
        return refusal
    process = subprocess.Popen(  # noqa: S603 - this program's own module
        [sys.executable, "-m", "edged.cli.reference_run", str(folder), dtype],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for edgectl, which then ends it
        text=True,
    )
    error = ""
    try:
        for line in process.stdout or ():
            message = json.loads(line)
            if "error" in message:
                error = message["error"]
            elif progress is not None:
                progress(f"reference: {message['what']}", message["done"], message["total"])
        _, tail = process.communicate()
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        last = (tail.strip().splitlines() or [f"it ended with status {process.returncode}"])[-1]
        if process.returncode < 0:
            last = f"it was ended by signal {-process.returncode}; is there enough memory?"
        raise CheckpointError(error or f"{folder}: the reference logits cannot be computed: {last}")
    return ""


def _affordable_dtype(folder: Path) -> tuple[str, str]:
    """The dtype to compute with, and why there is none."""
    available = available_memory()
    needs = {}
    for dtype in dict.fromkeys(["float32", _stored_dtype(folder)]):
        config = ModelConfig(
            name="model",
            path=folder,
            dtype=dtype,
            context_length=2 * PAGE_TOKENS,
            max_sequences=_ROWS,
            prefill_chunk=2 * PAGE_TOKENS,
        )
        needs[dtype] = model_bytes(ModelPlan.of(config, Architecture.read(folder))) + TORCH_RUNTIME
        if available is None or needs[dtype] <= available:
            return dtype, ""
    least = format_size(min(needs.values()))
    return "", f"computing them needs {least} of memory, {format_size(available or 0)} are available"


def _stored_dtype(folder: Path) -> str:
    with WeightFiles.open(folder) as files:
        kinds = [files.info(name).dtype for name in files.names()]
    return next((_HALF[kind] for kind in kinds if kind in _HALF), "float32")
