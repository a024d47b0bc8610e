"""What is known of a model's engine before anything is loaded: for the ledger, in processes that load no TensorRT."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged import __version__
from edged.engine.gpu import find_gpu
from edged.engine.key import slot_of
from edged.engine.provision import specs_of
from edged.engine.shapes import EngineShapes
from edged.engine.store import EngineStore, default_folder
from edged.errors import FailedPreconditionError
from plugins_trt.tensorrt.source_hash import source_hash

if TYPE_CHECKING:
    from pathlib import Path

    from edged.config import ModelConfig
    from edged.engine.manifest import Manifest


def planned_context_bytes(model: ModelConfig, folder: Path | None = None) -> int | None:
    """Device memory that the model's engine needs for activations and scratch; None where no build has said it.

    Of the engines in the cache that would run the model on this machine's GPU (without one: on any), whatever TensorRT
    built them and wherever they have their weights, the one that needs most.

    Args:
        model: The model of the configuration.
        folder: The engine cache; the default one when None.

    Raises:
        CheckpointError: The model folder is refused.
        ConfigError: The configuration asks for what no engine has.
    """
    shapes, gpu = EngineShapes.of(model), find_gpu()
    specs = specs_of(model)
    store = EngineStore(default_folder() if folder is None else folder)

    def fits(manifest: Manifest) -> bool:
        key = manifest.key
        targets = key.targets.split()
        return (
            manifest.slot in {slot_of(spec, targets) for spec in specs}
            and key.shapes == shapes.text
            and (gpu is None or gpu.target in targets)
            and (key.edged, key.plugins) == (__version__, source_hash())
        )

    try:
        known = [
            entry.manifest for entry in store.entries() if entry.manifest is not None and not entry.fault
        ]
    except FailedPreconditionError:
        return None  # whoever builds the engine will say that the cache cannot be read
    sizes = [each.context_bytes for each in known if each.context_bytes is not None and fits(each)]
    return max(sizes, default=None)
