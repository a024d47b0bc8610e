"""Logits of a fixed prompt beside the weights, so that an engine can be checked where there is no torch.

``import`` computes them with the torch executor on the CPU. The file names what it belongs to: the digest of
configuration and weights. A row of logits is the same whether its token was prefilled or decoded, so an engine is
checked on both roads by prefilling up to one of the positions and decoding the rest.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from edged.checkpoint.folder_record import model_key
from edged.checkpoint.model_folder import REFERENCE_FILE
from edged.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FloatArray = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]

PROMPT = (
    'The robot opened the door and said: "Good morning, it is 7:45." Then it counted 1, 2, 3, 5, 8, 13 and wrote '
    "a program:\n\ndef area(width, height):\n    return width * height\n\n"
    "今天天气很好。机器人去了图书馆。 La réponse est dans le troisième livre, à côté de la fenêtre."
)
"""The prompt that every model's reference is computed for: English, numbers, a program, Chinese, French."""

MOST_TOKENS = 128
"""Tokens of the prompt that are used at most."""

_FORMAT = "1"
_MOST_BYTES = 64 << 20
_MOST_ROWS = 16
_TOP = 10


@dataclass(frozen=True)
class Comparison:
    """How far the logits of an engine are from the reference.

    Attributes:
        finite: Whether all of them are finite; if not, the numbers below are infinite or 0.
        max_difference: Largest absolute difference of a logit.
        relative_rms: Root mean square of the differences over that of the reference around its mean, of the worst row.
            (About 0.001 for other sums in float32, 0.01 for bfloat16; 1 for logits of another model.)
        divergence: Kullback-Leibler divergence of the distributions, reference to engine, of the worst row (nats).
        same_first: Part of the rows whose largest logit is the same token's.
        same_top: Part of the reference's ten largest logits that are among the ten largest of the engine.
    """

    finite: bool
    max_difference: float
    relative_rms: float
    divergence: float
    same_first: float
    same_top: float

    def within(self, *, relative_rms: float, divergence: float) -> bool:
        """Whether the logits are finite and both figures at most these."""
        return self.finite and self.relative_rms <= relative_rms and self.divergence <= divergence

    def __str__(self) -> str:
        if not self.finite:
            return "the logits are not all finite"
        return (
            f"relative RMS difference {self.relative_rms:.2g}, largest difference {self.max_difference:.3g}, divergence "
            f"{self.divergence:.2g} nats, same first token in {self.same_first:.0%} of the rows, same top {_TOP} in "
            f"{self.same_top:.0%}"
        )


@dataclass(frozen=True)
class ReferenceLogits:
    """The reference of one model.

    Attributes:
        key: Digest of the configuration and weights that they belong to (:func:`model_key`).
        token_ids: The prompt, int32 [T].
        positions: Ascending positions of the prompt whose logits are kept, int32 [R]; the last is T - 1.
        logits: fp32 [R, V]; row r is computed from the tokens up to and including ``positions[r]``.
        made_by: Versions and the dtype of the weights and KV that they were computed with.
    """

    key: str
    token_ids: Int32Array
    positions: Int32Array
    logits: FloatArray
    made_by: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path, *, verify: bool = True) -> ReferenceLogits | None:
        """The reference of a model folder, or None where it has none.

        Args:
            folder: The model folder.
            verify: Hold its key against the folder's configuration and weights, which reads those that changed since
                the import.

        Raises:
            CheckpointError: The file is damaged, or belongs to other weights or another configuration.
        """
        path = folder / REFERENCE_FILE
        if not path.exists():
            return None
        reference = _read(path)
        if verify and reference.key != model_key(folder):
            raise CheckpointError(
                f"{path}: belongs to other weights or another config.json than the folder has now; make it again with: "
                f"edgectl models reference {folder}"
            )
        return reference

    def write(self, folder: Path) -> None:
        """Put the file into a model folder, whole or not at all.

        Raises:
            CheckpointError: The disk refuses it.
        """
        path = folder / REFERENCE_FILE
        temporary = folder / f".{REFERENCE_FILE}.{secrets.token_hex(4)}.partial"
        metadata = {"format": _FORMAT, "key": self.key, "made_by": json.dumps(dict(self.made_by))}
        tensors: dict[str, npt.NDArray[Any]] = {
            "token_ids": self.token_ids,
            "positions": self.positions,
            "logits": self.logits,
        }
        try:
            with temporary.open("xb") as file:
                file.write(save(tensors, metadata))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be written: {error}") from error
        finally:
            temporary.unlink(missing_ok=True)

    def compare(self, logits: FloatArray) -> Comparison:
        """Compare the logits of an engine for the same positions, [R, V].

        Raises:
            ValueError: They have another shape.
        """
        if logits.shape != self.logits.shape:
            raise ValueError(f"the reference has logits {self.logits.shape}, these are {logits.shape}")
        if not np.isfinite(logits).all():
            return Comparison(
                finite=False,
                max_difference=np.inf,
                relative_rms=np.inf,
                divergence=np.inf,
                same_first=0.0,
                same_top=0.0,
            )
        expected, found = self.logits.astype(np.float64), logits.astype(np.float64)
        difference = found - expected
        spread = np.sqrt(np.mean((expected - expected.mean(1, keepdims=True)) ** 2, 1))
        log_p, log_q = _log_softmax(expected), _log_softmax(found)
        divergence = (np.exp(log_p) * (log_p - log_q)).sum(1)
        top = min(_TOP, logits.shape[1])
        best, others = (np.argpartition(-rows, top - 1, 1)[:, :top] for rows in (expected, found))
        shared = [
            len(set(one) & set(other)) for one, other in zip(best.tolist(), others.tolist(), strict=True)
        ]
        return Comparison(
            finite=True,
            max_difference=float(np.abs(difference).max()),
            relative_rms=float((np.sqrt(np.mean(difference**2, 1)) / np.maximum(spread, 1e-30)).max()),
            divergence=float(max(divergence.max(), 0.0)),
            same_first=float(np.mean(expected.argmax(1) == found.argmax(1))),
            same_top=sum(shared) / (top * len(shared)),
        )


def positions_of(tokens: int) -> Int32Array:
    """The positions of a prompt of so many tokens that are kept: the quarters and the end."""
    return np.unique(np.array([tokens * part // 4 - 1 for part in (1, 2, 3, 4)], np.int32).clip(0))


def _read(path: Path) -> ReferenceLogits:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise CheckpointError(
                f"{path}: larger than {_MOST_BYTES >> 20} MiB; this is no file of reference logits"
            )
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        if metadata.get("format") != _FORMAT:
            raise CheckpointError(f"{path}: is of another format than this version reads; make it again")
        key, made_by = metadata["key"], json.loads(metadata["made_by"])
        token_ids, positions, logits = (arrays[name] for name in ("token_ids", "positions", "logits"))
    except (OSError, SafetensorError, KeyError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is damaged: {error}") from None
    if not _is_sound(token_ids, positions, logits) or not isinstance(made_by, dict):
        raise CheckpointError(f"{path}: is damaged: its arrays do not fit together")
    return ReferenceLogits(key, token_ids, positions, logits, made_by)


def _is_sound(token_ids: npt.NDArray[Any], positions: npt.NDArray[Any], logits: npt.NDArray[Any]) -> bool:
    if [array.dtype.name for array in (token_ids, positions, logits)] != ["int32", "int32", "float32"]:
        return False
    if token_ids.ndim != 1 or positions.ndim != 1 or logits.ndim != 2 or len(positions) != len(logits):
        return False
    if not 1 <= len(token_ids) <= MOST_TOKENS or not 1 <= len(positions) <= _MOST_ROWS or not logits.shape[1]:
        return False
    within = bool((token_ids >= 0).all() and (token_ids < logits.shape[1]).all())
    ascending = bool(
        (np.diff(positions) > 0).all() and positions[0] >= 0 and positions[-1] == len(token_ids) - 1
    )
    return within and ascending and bool(np.isfinite(logits).all())


def _log_softmax(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = rows - rows.max(1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return result
