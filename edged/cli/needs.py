"""What the models of a configuration need of the machine: the doctor measures it by that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from edged.config import ModelConfig


@dataclass(frozen=True)
class Needs:
    """What has to be there.

    Attributes:
        gpu: A model runs on ``cuda``.
        torch: A model runs on torch (``executor: torch`` or ``auto``).
        torch_gpu: One of those runs on ``cuda``.
        tensorrt: A model runs on TensorRT.
        known: Whether a configuration said so; without one nothing is needed, and nothing is superfluous.
    """

    gpu: bool = False
    torch: bool = False
    torch_gpu: bool = False
    tensorrt: bool = False
    known: bool = False

    @classmethod
    def of(cls, models: Iterable[ModelConfig]) -> Needs:
        """What ``models`` need."""
        models = tuple(models)
        on_torch = [model for model in models if model.executor != "tensorrt"]
        return cls(
            gpu=any(model.device == "cuda" for model in models),
            torch=bool(on_torch),
            torch_gpu=any(model.device == "cuda" for model in on_torch),
            tensorrt=len(on_torch) < len(models),
            known=True,
        )
