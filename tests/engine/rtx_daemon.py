"""edged as on a machine with an RTX 4090: `rtx_daemon.py --config FILE`, with the folder `gpu_machine` on PYTHONPATH.

What is real: the daemon, its engine process with the TensorRT executor, and the process that builds the engine with
TensorRT-RTX into the cache. What stands in: the GPU's memory and TensorRT's runtime, which runs the graph in numpy
(`tests/executor/tensorrt_stand_in.py`). The engine process is this file, too.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

EXECUTOR_TESTS = Path(__file__).resolve().parents[1] / "executor"


def serve_as_engine() -> None:
    """The engine process, given `--fd` and `--parent`."""
    sys.path.insert(0, str(EXECUTOR_TESTS))
    from numpy_kernels import kernels
    from tensorrt_stand_in import StandInDevice, StandInRuntime

    from edged.engine.graph import emit, serialize
    from edged.executor.available import choose_executor
    from edged.executor.tensorrt_executor import TensorRTExecutor
    from edged.worker import engine

    class GraphRuntime(StandInRuntime):
        """Runs the graph that the plan was built from."""

        def load(self, engine: Any, stream: int) -> Any:
            graph = serialize(emit(self.spec))
            assert hashlib.sha256(graph).hexdigest() == engine.manifest.key.graph
            return super().load(replace(engine, plan=graph), stream)

    def executor_of(config: Any) -> tuple[str, TensorRTExecutor]:
        executor = TensorRTExecutor(
            config,
            open_device=lambda: StandInDevice(kernels),
            open_runtime=lambda _: GraphRuntime(config),
        )
        return choose_executor(config), executor

    engine.serve = functools.partial(engine.serve, executor_of=executor_of)
    sys.exit(engine.main())


def serve_as_daemon() -> None:
    """The daemon, given `--config`."""
    from edged import daemon
    from edged.worker.supervisor import Supervisor

    daemon.Supervisor = functools.partial(Supervisor, command=(sys.executable, __file__))  # type: ignore[misc, assignment]
    sys.exit(daemon.main())


if __name__ == "__main__":
    (serve_as_engine if "--fd" in sys.argv else serve_as_daemon)()
