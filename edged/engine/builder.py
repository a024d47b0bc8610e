"""Builds a plan: ONNX bytes in, serialized engine out. Weights are inputs, so it takes seconds and little memory."""

from __future__ import annotations

import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edged.engine.held_weights import write_blank
from edged.engine.monitor import make_monitor
from edged.errors import CancelledError, InternalError
from plugins_trt.tensorrt.logger import record
from plugins_trt.tensorrt.registration import register

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from edged.engine.graph import GraphSpec
    from edged.engine.shapes import EngineShapes
    from plugins_trt.tensorrt.adapter import TensorRT

    Progress = Callable[[str, int, int], None]

WORKSPACE_BYTES = 256 << 20
"""Most scratch memory that a layer of plain TensorRT may choose to need; otherwise it may take all of the device."""

_WAIT_SECONDS = 0.1
_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Plan:
    """What was built.

    Attributes:
        data: The serialized engine.
        activation_bytes: Device memory that a context needs for activations and scratch, by profile; empty where
            TensorRT did not say.
        build_seconds: Time from the graph to the plan.
        timing_cache: Timings to give the next build; None where nothing is timed.
        refitted: It lacks weights, which who loads it has to put in (:attr:`edged.engine.graph.GraphSpec.held`).
    """

    data: memoryview
    activation_bytes: Mapping[str, int] = field(default_factory=dict)
    build_seconds: float = 0.0
    timing_cache: bytes | None = None
    refitted: bool = False


def build(
    tensorrt: TensorRT,
    graph: bytes,
    spec: GraphSpec,
    shapes: EngineShapes,
    targets: Sequence[str],
    *,
    progress: Progress | None = None,
    cancelled: threading.Event | None = None,
    timing_cache: bytes | None = None,
) -> Plan:
    """Build a plan. Runs TensorRT in a thread of its own, so that Ctrl-C reaches the caller at once.

    Args:
        tensorrt: The bindings.
        graph: The serialized model of ``spec``.
        spec: What the graph was emitted from.
        shapes: The steps to build for.
        targets: Compute capabilities; plain TensorRT takes that of this machine's GPU alone.
        progress: Called from the builder's thread with ("building", thousandths done, 1000).
        cancelled: Set it to give up; the build ends at TensorRT's next step.
        timing_cache: What an earlier build returned.

    Raises:
        CancelledError: ``cancelled`` was set.
        InternalError: TensorRT refuses the graph or cannot build it; carries what it logged and the plugins raised.
    """
    stop = cancelled or threading.Event()
    work = _Build(
        tensorrt=tensorrt,
        graph=graph,
        spec=spec,
        shapes=shapes,
        targets=tuple(targets),
        progress=progress,
        cancelled=stop,
        timing_cache=timing_cache,
    )
    # No daemon thread: the interpreter must not end under TensorRT.
    thread = threading.Thread(target=work.run, name="tensorrt-build")
    with _one_at_a_time:
        try:
            thread.start()
            # Not join(): interrupted, it takes the thread for ended (CPython before 3.13).
            while not work.ended.wait(_WAIT_SECONDS):
                pass
        except BaseException:
            # Ctrl-C. TensorRT must have let go of the graph and the GPU before anybody cleans up.
            stop.set()
            if thread.ident is not None:
                work.ended.wait()
            raise
    if work.error is not None:
        raise work.error
    if work.plan is None:
        raise InternalError("the build ended without a plan and without a reason")
    return work.plan


class _Build:
    """One build; every TensorRT object lives and dies in its thread."""

    def __init__(
        self,
        *,
        tensorrt: TensorRT,
        graph: bytes,
        spec: GraphSpec,
        shapes: EngineShapes,
        targets: tuple[str, ...],
        progress: Progress | None,
        cancelled: threading.Event,
        timing_cache: bytes | None,
    ) -> None:
        self._tensorrt = tensorrt
        self._trt = tensorrt.module
        self._graph = graph
        self._spec = spec
        self._shapes = shapes
        self._targets = targets
        self._progress = progress
        self._cancelled = cancelled
        self._timing_cache = timing_cache
        self.plan: Plan | None = None
        self.error: BaseException | None = None
        self.ended = threading.Event()

    def run(self) -> None:
        """Build and keep the plan or the error."""
        try:
            register(self._tensorrt)
            record.clear()
            self.plan = self._build()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            self.error = error
        finally:
            self.ended.set()

    def _build(self) -> Plan:
        trt, started = self._trt, time.monotonic()
        builder = trt.Builder(self._tensorrt.logger)
        network, _parser = self._parse(builder)
        config = self._configure(builder)
        cache = self._load_timing_cache(config)
        monitor = make_monitor(trt, self._report, self._cancelled)
        config.progress_monitor = monitor
        plan = builder.build_serialized_network(network, config)
        if self._cancelled.is_set():
            raise CancelledError("the build was cancelled")
        if monitor.error is not None:
            raise monitor.error
        if plan is None:
            raise InternalError(f"{self._tensorrt.name} cannot build the engine: {record.reason()}")
        self._report(1.0)
        names = [profile.name for profile in self._shapes.profiles]
        said = record.activation_bytes
        return Plan(
            data=memoryview(plan),
            activation_bytes=dict(zip(names, said, strict=True)) if len(said) == len(names) else {},
            build_seconds=time.monotonic() - started,
            timing_cache=None if cache is None else bytes(config.get_timing_cache().serialize()),
            refitted=self._spec.refitted,
        )

    def _report(self, fraction: float) -> None:
        if self._progress is not None:
            self._progress("building", round(1000 * fraction), 1000)

    def _parse(self, builder: Any) -> tuple[Any, Any]:  # noqa: ANN401 - the bindings have no types
        trt = self._trt
        flag = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        network = builder.create_network(flag)
        parser = trt.OnnxParser(network, self._tensorrt.logger)
        if not self._read(parser):
            raise InternalError(f"{self._tensorrt.name} cannot read the graph: {record.reason()}")
        for each in self._spec.held:
            if not network.mark_weights_refittable(each.name):
                raise InternalError(
                    f"{self._tensorrt.name} cannot leave {each.name} out of a plan: {record.reason()}"
                )
        # What the parser has mapped, the network reads until it is built.
        return network, parser

    def _read(self, parser: Any) -> bool:  # noqa: ANN401
        if not self._spec.held:
            return bool(parser.parse(self._graph))
        with tempfile.TemporaryDirectory(prefix="edged-build-") as folder:
            write_blank(Path(folder), self._spec.held)
            return bool(parser.parse(self._graph, str(Path(folder) / "graph.onnx")))

    def _configure(self, builder: Any) -> Any:  # noqa: ANN401
        trt = self._trt
        config = builder.create_builder_config()
        # A captured step may not fork onto streams that nobody else knows.
        config.max_aux_streams = 0
        if self._spec.refitted:
            # Of the marked weights alone: with REFIT every small constant would be missing, too.
            config.set_flag(trt.BuilderFlag.REFIT_INDIVIDUAL)
            config.set_flag(trt.BuilderFlag.STRIP_PLAN)
        if self._tensorrt.is_rtx:
            config.num_compute_capabilities = len(self._targets)
            for index, target in enumerate(self._targets):
                capability = getattr(trt.ComputeCapability, target.upper())
                config.set_compute_capability(capability, index)
        else:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, WORKSPACE_BYTES)
        for each in self._shapes.profiles:
            profile = builder.create_optimization_profile()
            for name, (_, dims) in self._spec.input_shapes().items():
                if any(isinstance(dim, str) for dim in dims):
                    profile.set_shape(name, *each.shape(dims))
            if config.add_optimization_profile(profile) < 0:
                raise InternalError(
                    f"{self._tensorrt.name} refuses the profile {each.name}: {record.reason()}"
                )
        return config

    def _load_timing_cache(self, config: Any) -> Any:  # noqa: ANN401
        """TensorRT-RTX times nothing when it builds."""
        if self._tensorrt.is_rtx:
            return None
        cache = config.create_timing_cache(self._timing_cache or b"")
        # One that another version or GPU wrote is refused; the build then begins with none.
        if not config.set_timing_cache(cache, ignore_mismatch=False):
            cache = config.create_timing_cache(b"")
            config.set_timing_cache(cache, ignore_mismatch=False)
        return cache
