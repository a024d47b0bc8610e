"""From a model's ``sparse_config`` and the configuration to the rule in the graph."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from edged.config import AttentionConfig
from edged.engine.selection import selection_of
from edged.errors import CheckpointError, ConfigError
from plugins_trt.contract import SelectionRule

if TYPE_CHECKING:
    from pathlib import Path

# As MiniCPM4's model card gives it.
SPARSE = {
    "kernel_size": 32,
    "kernel_stride": 16,
    "init_blocks": 1,
    "block_size": 64,
    "window_size": 2048,
    "topk": 64,
    "use_nope": False,
    "dense_len": 8192,
}


def rule(folder: Path, sparse: dict[str, Any] | None, **attention: Any) -> SelectionRule | None:
    content = {} if sparse is None else {"sparse_config": sparse}
    (folder / "config.json").write_text(json.dumps(content))
    return selection_of(folder, AttentionConfig(**attention))


def test_auto_follows_the_model(tmp_path: Path) -> None:
    assert rule(tmp_path, None) is None
    assert rule(tmp_path, SPARSE) == SelectionRule(1, 2048, 64, 8192)
    assert rule(tmp_path, {**SPARSE, "dense_len": -1}) == SelectionRule(1, 2048, 64, 0)
    exact = rule(tmp_path, SPARSE, lse="exact")
    assert exact is not None
    assert exact.lse == "exact"


def test_dense_and_sparse_do_not_ask_the_model(tmp_path: Path) -> None:
    assert rule(tmp_path, SPARSE, mode="dense") is None
    chosen = rule(tmp_path, SPARSE, mode="sparse", top_k=8, window=512, init_blocks=2, dense_below=100)
    assert chosen == SelectionRule(2, 512, 8, 100)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("kernel_size", 64, "sparse_config.kernel_size 64 is not supported; it must be 32"),
        ("block_size", 32, "sparse_config.block_size 32 is not supported; it must be 64"),
        ("use_nope", True, "sparse_config.use_nope True is not supported"),
        ("dense_len", "all", "sparse_config.dense_len 'all' must be a whole number"),
        ("dense_len", -2, "sparse_config.dense_len -2 must be a whole number"),
        ("topk", None, "sparse_config.topk is missing"),
        ("window_size", 100, "sparse_config.window: 100, must be a multiple of 64 tokens"),
    ],
)
def test_what_the_kernels_do_not_do_is_refused_by_its_key(
    key: str, value: object, said: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as error:
        rule(tmp_path, {**SPARSE, key: value})
    assert error.value.message.startswith(said)


def test_numbers_of_the_configuration_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"attention\.top_k: 1 leaves"):
        rule(tmp_path, None, mode="sparse", top_k=1, init_blocks=5)
