"""One engine for one model, whatever it takes: found in the store, or built there by the one process that may."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from edged.engine import builder
from edged.engine.gpu import find_gpu
from edged.engine.graph import GraphSpec, emit, serialize
from edged.engine.held_weights import held_weights
from edged.engine.key import EngineKey, slot_of
from edged.engine.selection import selection_of
from edged.engine.shapes import EngineShapes
from edged.engine.targets import choose
from edged.engine.timings import TimingCaches
from edged.errors import CheckpointError, ConfigError, FailedPreconditionError
from edged.models.architecture import Architecture
from plugins_trt.contract import KERNEL_DTYPES, LaunchError, check_heads

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from edged.config import ModelConfig
    from edged.engine.builder import Progress
    from edged.engine.entries import StoredEngine
    from edged.engine.store import EngineStore
    from plugins_trt.tensorrt.adapter import TensorRT

PLUGIN_DTYPES = tuple(KERNEL_DTYPES)
"""Types that the plugins have kernels for."""
_TELL_SECONDS = 10.0
"""Who waits for another process's build says so anew this often."""


def provide(
    spec: GraphSpec,
    shapes: EngineShapes,
    store: EngineStore,
    *,
    label: str,
    targets: Sequence[str] = (),
    rebuild: bool = False,
    progress: Progress | None = None,
    cancelled: threading.Event | None = None,
) -> tuple[StoredEngine, bool]:
    """Find the engine or build it.

    Args:
        spec: The model's graph.
        shapes: The steps to build for.
        store: Where engines are kept.
        label: The model's name, for people.
        targets: Compute capabilities (``sm89``); empty for this machine's GPU.
        rebuild: Build also if there is one. The old one stays until the new one has passed its check.
        progress: Called with (what is being done, units done, units in all), from another thread.
        cancelled: Set it to give up.

    Returns:
        The engine and whether it was built now.

    Raises:
        FailedPreconditionError: No TensorRT of this machine builds for these targets, the cache cannot be written,
            or the engine failed its check before.
        ResourceExhaustedError: The disk is full.
        CancelledError: ``cancelled`` was set.
        InternalError: TensorRT cannot build the graph.
    """
    tensorrt, targets, graph, key = _identify(spec, shapes, targets)
    if not rebuild and (found := store.find(key)) is not None:
        return _unless_failed(found), False

    began = time.monotonic()

    def waiting() -> None:
        if progress is not None:
            # The count goes on, so that who watches the load does not take the wait for a hang. The other process is
            # alive, or its lock would be free.
            told = 1 + int(
                (time.monotonic() - began) / _TELL_SECONDS
            )  # of 0 nothing is said where there is no terminal
            progress("waiting for another build of it", told % 1000, 1000)

    with store.building(key, waiting=waiting, cancelled=cancelled):
        # Another process may have built it while this one waited.
        if not rebuild and (found := store.find(key)) is not None:
            return _unless_failed(found), False
        timings = TimingCaches(store.folder)
        plan = builder.build(
            tensorrt,
            graph,
            spec,
            shapes,
            targets,
            progress=progress,
            cancelled=cancelled,
            timing_cache=timings.read(key),
        )
        engine = store.publish(key, plan, slot=slot_of(spec, targets), label=label)
        if plan.timing_cache is not None:
            timings.keep(key, plan.timing_cache)
    store.prune(keep=engine.folder)
    return engine, True


def provide_model(
    model: ModelConfig,
    store: EngineStore,
    *,
    targets: Sequence[str] = (),
    refitted: bool | None = None,
    rebuild: bool = False,
    progress: Progress | None = None,
    cancelled: threading.Event | None = None,
) -> tuple[StoredEngine, bool]:
    """As :func:`provide`, for a model of the configuration: what the daemon and ``edgectl build`` ask for.

    `refitted` says whether the weights of dense products are constants, of which the plan is stripped. None, as the daemon
    asks: they are if somebody has built such an engine and it has not failed its check, else every weight is an input.

    Raises:
        CheckpointError: The model folder is refused.
        ConfigError: The configuration asks for what no engine has.
    """
    specs, shapes = specs_of(model), EngineShapes.of(model)
    if refitted is None and not rebuild and find_gpu() is not None:
        for spec in specs[1:]:
            found = store.find(_identify(spec, shapes, targets)[-1])
            if found is not None and (found.check is None or found.check.get("passed") is True):
                return found, False
    return provide(
        spec_of(model, refitted=bool(refitted)),
        shapes,
        store,
        label=model.name,
        targets=targets,
        rebuild=rebuild,
        progress=progress,
        cancelled=cancelled,
    )


def _identify(
    spec: GraphSpec, shapes: EngineShapes, targets: Sequence[str]
) -> tuple[TensorRT, tuple[str, ...], bytes, EngineKey]:
    """What builds, for which targets, from which graph, and the key that all this gives."""
    gpu = find_gpu()
    tensorrt, chosen = choose(targets, gpu)
    if spec.refitted and gpu is None:
        raise FailedPreconditionError(
            "a plan that is stripped of its weights is built on the machine whose GPU is to run it: TensorRT's compiler asks "
            "the driver, and there is none here; build it there, or here without --refit",
            field="refit",
        )
    graph = serialize(emit(spec))
    key = EngineKey.of(graph, spec, shapes, tensorrt=tensorrt, targets=chosen, gpu=gpu)
    return tensorrt, chosen, graph, key


def specs_of(model: ModelConfig) -> tuple[GraphSpec, ...]:
    """The graphs that can run a model of the configuration: with every weight an input, and refitted if it can be.

    Raises:
        CheckpointError: As :func:`spec_of`.
        ConfigError: As :func:`spec_of`.
    """
    spec = spec_of(model)
    return (spec, replace(spec, refitted=True)) if held_weights(spec.architecture, spec.dtype) else (spec,)


def spec_of(model: ModelConfig, *, refitted: bool = False) -> GraphSpec:
    """The graph of a model of the configuration.

    Raises:
        UnsupportedError: ``refitted``, and the model has no weights that could be constants.
        CheckpointError: The model folder is refused.
        ConfigError: A dtype, or attention, that the plugins do not take.
    """
    if model.dtype not in PLUGIN_DTYPES:
        raise ConfigError(
            f"model {model.name}: dtype {model.dtype}: executor tensorrt takes {' or '.join(PLUGIN_DTYPES)}",
            field="dtype",
        )
    if model.kv_dtype not in ("auto", {"bfloat16": "bf16", "float16": "fp16"}[model.dtype]):
        raise ConfigError(
            f"model {model.name}: kv_dtype {model.kv_dtype}: executor tensorrt keeps keys and values in dtype: set "
            "kv_dtype to auto, or executor to torch",
            field="kv_dtype",
        )
    architecture = Architecture.of(model)
    try:
        check_heads(architecture.heads, architecture.kv_heads, architecture.head_dim)
    except LaunchError as error:
        raise CheckpointError(f"{model.path}: no kernel takes this model's heads: {error}") from None
    return GraphSpec(architecture, model.dtype, selection_of(model.path, model.attention), refitted)


def _unless_failed(engine: StoredEngine) -> StoredEngine:
    """Refuse an engine that gave wrong logits before: it would again."""
    if engine.check is not None and engine.check.get("passed") is not True:
        figures = ", ".join(f"{name} {value}" for name, value in engine.check.items() if name != "passed")
        raise FailedPreconditionError(
            f"the engine {engine.folder.name} of {engine.manifest.label} failed its check against the reference "
            f"({figures}) and is not used; build it again with `edgectl build --rebuild`, or use executor: torch"
        )
    return engine
