"""Which blocks a model's queries attend to: from the configuration and the model's own ``sparse_config``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from edged.errors import CheckpointError, ConfigError
from edged.models.architecture import CONFIG_FILE
from edged.models.config_values import ConfigValues
from plugins_trt.contract import BLOCK, KERNEL, STRIDE, LaunchError, SelectionRule

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from edged.config import AttentionConfig

_KEY = "sparse_config"


def selection_of(folder: Path, attention: AttentionConfig) -> SelectionRule | None:
    """The rule for a model folder; None attends densely everywhere.

    Mode ``auto`` follows the ``sparse_config`` of the folder's ``config.json`` and is dense without one; ``sparse``
    takes the configuration's own numbers, whatever the model says.

    Raises:
        CheckpointError: The model's ``sparse_config`` asks for what the kernels do not do; names the key.
        ConfigError: The configuration's numbers contradict each other.
    """
    if attention.mode == "dense":
        return None
    if attention.mode == "auto":
        try:
            config = json.loads((folder / CONFIG_FILE).read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{folder / CONFIG_FILE}: cannot be read: {error}") from None
        values = ConfigValues(config if isinstance(config, dict) else {})
        return rule_of(values.part(_KEY), attention.lse) if values.has(_KEY) else None
    return _rule(
        {
            "init_blocks": attention.init_blocks,
            "window": attention.window,
            "top_k": attention.top_k,
            "dense_below": attention.dense_below,
        },
        attention.lse,
        ConfigError,
        "attention",
    )


def rule_of(values: ConfigValues, lse: str) -> SelectionRule:
    """The rule that a model's ``sparse_config`` means (InfLLM-v2, as MiniCPM4 writes it).

    Raises:
        CheckpointError: A key is missing or has a value that the kernels do not take; names it.
    """
    for name, wanted in (("kernel_size", KERNEL), ("kernel_stride", STRIDE), ("block_size", BLOCK)):
        if values.count(name) != wanted:
            raise values.refusal(name, f"is not supported; it must be {wanted}")
    if values.flag("use_nope", default=False):
        raise values.refusal("use_nope", "is not supported: selection scores rotated keys")
    dense = values.raw("dense_len")
    if isinstance(dense, bool) or not isinstance(dense, int) or not -1 <= dense < 2**31 - 1:
        raise values.refusal("dense_len", "must be a whole number of tokens, or -1 for always sparse")
    parts = {
        "init_blocks": values.count("init_blocks"),
        "window": values.count("window_size"),
        "top_k": values.count("topk"),
        "dense_below": max(dense, 0),
    }
    return _rule(parts, lse, CheckpointError, _KEY)


def _rule(
    parts: Mapping[str, int], lse: str, refusal: type[CheckpointError | ConfigError], where: str
) -> SelectionRule:
    try:
        return SelectionRule(**parts, lse=lse)
    except LaunchError as error:
        raise refusal(f"{where}.{error}", field=where) from None
