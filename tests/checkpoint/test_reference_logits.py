"""Reference logits: written and read whole, bound to their model, and compared in numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from edged.checkpoint.folder_record import model_key
from edged.checkpoint.model_folder import REFERENCE_FILE
from edged.checkpoint.reference_logits import MOST_TOKENS, ReferenceLogits, positions_of
from edged.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

ROWS, VOCABULARY, TOKENS = 4, 257, 40


@pytest.fixture
def reference(write_model: Any) -> tuple[Path, ReferenceLogits]:
    folder = write_model()
    random = np.random.default_rng(0)
    logits = random.standard_normal((ROWS, VOCABULARY)).astype(np.float32) * 3
    ids = random.integers(0, VOCABULARY, TOKENS).astype(np.int32)
    made = ReferenceLogits(model_key(folder), ids, positions_of(TOKENS), logits, {"dtype": "float32"})
    made.write(folder)
    return folder, made


def test_what_is_written_is_read(reference: tuple[Path, ReferenceLogits]) -> None:
    folder, made = reference
    read = ReferenceLogits.read(folder)
    assert read is not None
    assert (read.key, read.made_by) == (made.key, {"dtype": "float32"})
    for name in ("token_ids", "positions", "logits"):
        np.testing.assert_array_equal(getattr(read, name), getattr(made, name))
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith(".")) == []
    assert (folder / REFERENCE_FILE).stat().st_mode & 0o044  # the daemon may be another user
    assert ReferenceLogits.read(folder.parent) is None


def test_of_other_weights_it_is_refused(reference: tuple[Path, ReferenceLogits]) -> None:
    folder, _ = reference
    config = folder / "config.json"
    config.write_text(config.read_text().replace("8192", "4096"))
    with pytest.raises(CheckpointError, match="edgectl models reference"):
        ReferenceLogits.read(folder)
    assert ReferenceLogits.read(folder, verify=False) is not None


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": np.full(TOKENS, VOCABULARY, np.int32)},
        {"token_ids": np.full(TOKENS, -1, np.int32)},
        {"token_ids": np.zeros(MOST_TOKENS + 1, np.int32)},
        {"token_ids": np.zeros(TOKENS, np.int64)},
        {"positions": np.array([3, 2, 1, TOKENS - 1], np.int32)},
        {"positions": np.array([0, 1, 2, 3], np.int32)},
        {"positions": np.array([0, TOKENS - 1], np.int32)},
        {"logits": np.zeros((ROWS, 0), np.float32)},
        {"logits": np.full((ROWS, VOCABULARY), np.nan, np.float32)},
        {"logits": np.zeros((ROWS, VOCABULARY), np.float16)},
        {"logits": np.zeros(ROWS, np.float32)},
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(
    reference: tuple[Path, ReferenceLogits], change: dict[str, Any]
) -> None:
    folder, made = reference
    replace(made, **change).write(folder)
    with pytest.raises(CheckpointError, match="is damaged"):
        ReferenceLogits.read(folder)


def test_a_file_cut_at_any_byte_or_with_any_byte_changed_is_refused_or_whole(
    reference: tuple[Path, ReferenceLogits],
) -> None:
    folder, made = reference
    path = folder / REFERENCE_FILE
    content = path.read_bytes()
    generator = np.random.default_rng(1)
    for place in generator.integers(0, len(content), 60).tolist():
        path.write_bytes(content[:place])
        with pytest.raises(CheckpointError, match="reference_logits"):
            ReferenceLogits.read(folder)
    for place in generator.integers(0, 400, 60).tolist():
        changed = bytearray(content)
        changed[place] ^= 1 << int(generator.integers(8))
        path.write_bytes(changed)
        try:
            read = ReferenceLogits.read(folder)
        except CheckpointError:
            continue
        assert read is not None
        assert read.logits.shape == made.logits.shape


def test_positions_are_quarters_and_the_end() -> None:
    assert positions_of(40).tolist() == [9, 19, 29, 39]
    for tokens in (1, 2, 3, 5, 128):
        positions = positions_of(tokens)
        assert positions[-1] == tokens - 1
        assert (np.diff(positions) > 0).all()


def test_comparisons_give_numbers(reference: tuple[Path, ReferenceLogits]) -> None:
    _, made = reference
    same = made.compare(made.logits)
    assert (same.max_difference, same.relative_rms, same.divergence, same.same_first, same.same_top) == (
        0,
        0,
        0,
        1,
        1,
    )
    assert same.within(relative_rms=0, divergence=0)
    noise = np.random.default_rng(2).standard_normal(made.logits.shape).astype(np.float32)
    spread = float(made.logits.std(1).max())
    near = made.compare(made.logits + 0.01 * spread * noise)
    assert 0.008 < near.relative_rms < 0.015
    assert near.divergence < 1e-3
    assert near.within(relative_rms=0.02, divergence=0.01)
    assert not near.within(relative_rms=0.005, divergence=0.01)
    other = made.compare(np.roll(made.logits, 1, 1))
    assert other.relative_rms > 1
    assert other.divergence > 1
    assert other.same_first < 1
    assert "nats" in str(other)


def test_one_bad_row_is_enough(reference: tuple[Path, ReferenceLogits]) -> None:
    _, made = reference
    logits = made.logits.copy()
    logits[2] = logits[2, ::-1]
    comparison = made.compare(logits)
    assert comparison.relative_rms > 1
    assert comparison.same_first == 0.75


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_never_pass(reference: tuple[Path, ReferenceLogits], value: float) -> None:
    _, made = reference
    logits = made.logits.copy()
    logits[0, 0] = value
    comparison = made.compare(logits)
    assert not comparison.within(relative_rms=np.inf, divergence=np.inf)
    assert "not all finite" in str(comparison)
    with pytest.raises(ValueError, match="has logits"):
        made.compare(made.logits[:1])
