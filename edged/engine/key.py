"""What a plan depends on. Two engines with one key are interchangeable; any other difference means another build."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edged import __version__
from edged.errors import FailedPreconditionError
from plugins_trt.tensorrt.source_hash import source_hash

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edged.engine.gpu import Gpu
    from edged.engine.graph import GraphSpec
    from edged.engine.shapes import EngineShapes
    from plugins_trt.tensorrt.adapter import TensorRT

NO_DRIVER = "none"
"""Driver of a plan that was built on a machine without a GPU."""

_DIGEST_LENGTH = 32


@dataclass(frozen=True)
class EngineKey:
    """The parts, as texts."""

    graph: str
    """SHA-256 of the serialized ONNX model; the architecture, the dtype and the attention are in it."""
    shapes: str
    dtype: str
    tensorrt: str
    """Name and version: ``tensorrt_rtx 1.7.1.116``."""
    targets: str
    """Compute capabilities: ``sm86 sm89``."""
    driver: str
    """CUDA version of the driver, or ``none``."""
    plugins: str
    """SHA-256 of the plugins' sources."""
    edged: str
    """edged's version."""

    @classmethod
    def of(
        cls,
        model: bytes,
        spec: GraphSpec,
        shapes: EngineShapes,
        *,
        tensorrt: TensorRT,
        targets: Sequence[str],
        gpu: Gpu | None,
    ) -> EngineKey:
        """The key of a build.

        Args:
            model: The serialized ONNX model.
            spec: What it was emitted from.
            shapes: The steps to build for.
            tensorrt: The bindings that build.
            targets: The compute capabilities to build for.
            gpu: This machine's.
        """
        return cls(
            graph=hashlib.sha256(model).hexdigest(),
            shapes=shapes.text,
            dtype=spec.dtype,
            tensorrt=f"{tensorrt.name} {tensorrt.version}",
            targets=" ".join(targets),
            driver=NO_DRIVER if gpu is None else gpu.driver_name,
            plugins=source_hash(),
            edged=__version__,
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> EngineKey:
        """Read back what :meth:`to_json` gave.

        Raises:
            ValueError: Parts are missing, unknown or no texts.
        """
        names = {each.name for each in dataclasses.fields(cls)}
        if set(values) != names or not all(isinstance(value, str) for value in values.values()):
            raise ValueError(f"an engine's key has the texts {', '.join(sorted(names))}")
        return cls(**values)

    def to_json(self) -> dict[str, str]:
        """The parts by name."""
        return dataclasses.asdict(self)

    @property
    def digest(self) -> str:
        """Names the engine's folder: 32 hex digits."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LENGTH]

    def serves(self, wanted: EngineKey) -> bool:
        """Whether an engine of this key can be used where ``wanted`` is asked for."""
        return not self.differences(wanted)

    def differences(self, wanted: EngineKey) -> list[str]:
        """What keeps an engine of this key from being used for ``wanted``: one text a part, none if nothing does.

        A plan for several targets serves each of them. A plan of TensorRT-RTX, which finishes kernels where it is
        loaded, is no child of a driver: one built without any serves every driver.
        """
        faults = []
        for part, name in _NAMES.items():
            mine, other = getattr(self, part), getattr(wanted, part)
            if mine == other:
                continue
            if part == "targets" and set(other.split()) <= set(mine.split()):
                continue
            if part == "driver" and mine == NO_DRIVER and self.tensorrt.startswith("tensorrt_rtx "):
                continue
            faults.append(f"{name} is {_short(mine)}, needed is {_short(other)}")
        return faults

    def check_serves(self, wanted: EngineKey, what: str) -> None:
        """Refuse an engine that was built for something else.

        Args:
            wanted: What is needed.
            what: The engine, for the message.

        Raises:
            FailedPreconditionError: Lists every difference.
        """
        faults = self.differences(wanted)
        if faults:
            raise FailedPreconditionError(
                f"{what} does not fit here: {'; '.join(faults)}; build it again with `edgectl build`"
            )


_NAMES: dict[str, str] = {
    "graph": "the graph",
    "shapes": "the range of step sizes",
    "dtype": "dtype",
    "tensorrt": "TensorRT",
    "targets": "the GPU",
    "driver": "the driver",
    "plugins": "the hash of the plugins' sources",
    "edged": "edged's version",
}


def _short(text: str) -> str:
    return text if len(text) <= 48 else text[:12] + "..."


def slot_of(spec: GraphSpec, targets: Sequence[str]) -> str:
    """What an engine is for, whatever version builds it, in 16 hex digits.

    That is the model's shape, dtype, attention and targets, and whether its plan is stripped of weights.

    Of the engines of one slot, the last that passed its check is kept until a newer one has passed.
    """
    parts = [repr(spec.architecture), spec.dtype, repr(spec.selection), " ".join(targets)]
    if spec.refitted:
        parts.append("refitted")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
