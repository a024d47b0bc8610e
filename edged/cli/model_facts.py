"""What edgectl says about a model folder: whether it is sound, what its weights are, what it needs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import yaml

from edged.checkpoint.chat_template import ChatTemplate
from edged.checkpoint.folder_import import normalized_config
from edged.checkpoint.model_folder import CONFIG_FILE
from edged.checkpoint.safetensors_files import WeightFiles
from edged.checkpoint.tokenizer import Tokenizer
from edged.config_reader import ConfigFileError, parse_config
from edged.errors import CheckpointError
from edged.memory.ledger import compute_ledger
from edged.models.architecture import Architecture
from edged.models.folder import check_folder
from edged.models.weights import parameter_count

if TYPE_CHECKING:
    from pathlib import Path

CONTEXTS = (4096, 32768, 131072)
"""Context lengths whose needs are shown."""

_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "I32": "packed integers"}
_FLOATS = ("F32", "BF16", "F16")


def check_model(folder: Path) -> None:
    """Hold the parts of a model folder to each other; no weight is read.

    Raises:
        CheckpointError: A part is missing, damaged, not supported, or does not belong to the others.
    """
    architecture = Architecture.read(folder)
    check_folder(folder)
    Tokenizer.load(folder).check_embedding(architecture.vocabulary)
    ChatTemplate.load(folder)


def check_small_files(folder: Path) -> None:
    """Hold what lies beside the weights to each other, before there are weights.

    Raises:
        CheckpointError: As :func:`check_model`.
    """
    config = normalized_config(folder)
    try:
        architecture = Architecture.from_config(config)
    except CheckpointError as error:
        raise CheckpointError(f"{folder / CONFIG_FILE}: {error.message}", field=error.field) from None
    Tokenizer.load(folder).check_embedding(architecture.vocabulary)
    ChatTemplate.load(folder)


def stored_types(folder: Path) -> Counter[str]:
    """Bytes of the weights by their type in safetensors."""
    types: Counter[str] = Counter()
    with WeightFiles.open(folder) as files:
        for name in files.names():
            types[files.info(name).dtype] += files.info(name).nbytes
    return types


def describe_weights(folder: Path) -> str:
    """The type of the weights in words: ``bfloat16``, ``4 bits (gptq, groups of 128) and float16``."""
    quantization = Architecture.read(folder).quantization
    types = stored_types(folder)
    floats = [kind for kind, _ in types.most_common() if kind in _FLOATS]
    names = [_NAMES[kind] for kind in floats[:1]] or [types.most_common(1)[0][0]]
    if quantization is not None:
        groups = f"groups of {quantization.group}" if quantization.group else "one group a row"
        bits = 2 if quantization.ternary else 4
        names.insert(0, f"{bits} bits ({quantization.method}, {groups})")
    return " and ".join(names)


def natural_dtype(folder: Path) -> str:
    """The dtype of the configuration that keeps the weights as they are stored."""
    kinds = [kind for kind, _ in stored_types(folder).most_common() if kind in _FLOATS]
    return _NAMES[kinds[0]] if kinds else "float32"


def facts(folder: Path) -> dict[str, Any]:
    """Everything that ``edgectl models inspect`` shows, as JSON.

    Raises:
        CheckpointError: The folder is damaged or not supported.
    """
    architecture = Architecture.read(folder)
    dtype = natural_dtype(folder)
    template = ChatTemplate.load(folder)
    tokenizer = Tokenizer.load(folder)
    quantization = architecture.quantization
    return {
        "architecture": architecture.model_type,
        "parameters": parameter_count(architecture),
        "layers": architecture.layers,
        "hidden": architecture.hidden,
        "heads": f"{architecture.heads}/{architecture.kv_heads} x {architecture.head_dim}",
        "vocabulary": architecture.vocabulary,
        "max_position": architecture.max_position,
        "weights": describe_weights(folder),
        "quantization": None if quantization is None else quantization.method,
        "dtype": dtype,
        "eos_token_ids": list(tokenizer.eos_token_ids),
        "templates": list(template.names),
        "tools": template.takes("tools"),
        "thinking": template.takes("enable_thinking") or template.takes("thinking"),
        "needs": [needs(folder, length, dtype, architecture.max_position) for length in CONTEXTS],
    }


def needs(folder: Path, context_length: int, dtype: str, max_position: int) -> dict[str, Any]:
    """What one sequence of that length needs: bytes of weights, KV and everything together."""
    content = {
        "models": [
            {
                "name": "model",
                "path": str(folder.absolute()),
                "context_length": context_length,
                "dtype": dtype,
            }
        ],
        "memory": {"budget": "1048576GiB"},
    }
    result: dict[str, Any] = {"context_length": context_length, "dtype": dtype}
    try:
        ledger = compute_ledger(parse_config(yaml.safe_dump(content), folder=folder))
    except ConfigFileError as error:
        return {**result, "refused": error.faults[0].problem}
    rows: Counter[str] = Counter()
    for row in ledger.rows:
        rows[row.name] += row.bytes
    return {
        **result,
        "beyond_the_model": context_length > max_position,
        "weights": rows["weights"],
        "kv": rows["KV pages"],
        "total": ledger.total,
    }
