"""``edged.v1.Control``: the state of the daemon, answered in every state of the engine."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from edged import __version__
from edged.v1 import control_pb2
from edged.worker.state import State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edged.config import Config, ModelConfig
    from edged.memory.ledger import Ledger
    from edged.server.inference import Inference
    from edged.server.methods import AnyContext
    from edged.worker.supervisor import Supervisor

_STATES = {
    State.LOADING: control_pb2.STATE_LOADING,
    State.SERVING: control_pb2.STATE_SERVING,
    State.DRAINING: control_pb2.STATE_DRAINING,
    State.RESTARTING: control_pb2.STATE_RESTARTING,
    State.FAILED: control_pb2.STATE_FAILED,
}


class Control:
    """The control service.

    Args:
        config: The configuration.
        supervisor: Runs the engine process.
        inference: Knows the state and counts requests.
        ledger: The static budget.
        addresses: Where the daemon listens.
    """

    def __init__(
        self,
        config: Config,
        supervisor: Supervisor,
        inference: Inference,
        ledger: Ledger,
        addresses: Sequence[str],
    ) -> None:
        self._config = config
        self._supervisor = supervisor
        self._inference = inference
        self._addresses = addresses
        self._started = time.monotonic()
        self._ledger = control_pb2.Ledger(
            rows=[
                control_pb2.LedgerRow(name=row.name, bytes=row.bytes, note=row.note) for row in ledger.rows
            ],
            total_bytes=ledger.total,
            budget_bytes=ledger.budget,
        )

    async def GetStatus(  # noqa: N802 - the service's name
        self, _request: control_pb2.GetStatusRequest, _context: AnyContext
    ) -> control_pb2.GetStatusResponse:
        """The state now."""
        supervisor = self._supervisor
        return control_pb2.GetStatusResponse(
            state=_STATES[self._inference.state],
            version=__version__,
            uptime_seconds=time.monotonic() - self._started,
            daemon_pid=os.getpid(),
            engine_pid=supervisor.engine_pid or 0,
            engine_restarts=supervisor.restarts,
            last_error=supervisor.last_error or "",
            models=[self._model_status(model) for model in self._config.models],
            ledger=self._ledger,
            addresses=self._addresses,
            requests_finished=self._inference.finished,
            requests_failed=self._inference.failed,
        )

    def _model_status(self, model: ModelConfig) -> control_pb2.ModelStatus:
        """What the engine last said of a model; its configuration where it has said nothing yet."""
        supervisor = self._supervisor
        status = control_pb2.ModelStatus(
            name=model.name,
            state=_STATES[self._inference.state],
            executor=model.executor,
            device=model.device,
            dtype=model.dtype,
            context_length=model.context_length,
            max_sequences=model.max_sequences,
        )
        loading = supervisor.loading.get(model.name)
        if loading is not None:
            status.loading = loading.what
            status.loading_fraction = loading.done / loading.total if loading.total else 0.0
        report = supervisor.models.get(model.name)
        if report is not None:
            status.executor = report.executor
            status.device = report.device
            status.dtype = report.dtype
            status.context_length = report.context_length
            status.max_sequences = report.max_sequences
            status.pages = report.pages
            status.pages_free = report.pages_free
            status.running = report.running
            status.waiting = report.waiting
            status.prompt_tokens = report.prompt_tokens
            status.generated_tokens = report.generated_tokens
            status.steps = report.steps
            status.last_step_seconds = report.last_step_seconds
        return status
