"""``edged.v1.Control``: the state of the daemon, answered in every state of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING

from edged import __version__
from edged.errors import InvalidArgumentError, NotFoundError, UnavailableError
from edged.server.board_status import board_status
from edged.server.errors import clip
from edged.server.identity import identity_of
from edged.server.model_status import add_report
from edged.server.validation import check_interval
from edged.v1 import control_pb2
from edged.worker.state import State

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edged.config import Config, ModelConfig
    from edged.memory.ledger import Ledger
    from edged.server.inference import Inference
    from edged.server.methods import AnyContext
    from edged.server.thermal import ThermalGate
    from edged.worker.supervisor import Supervisor

_STATES = {
    State.LOADING: control_pb2.STATE_LOADING,
    State.SERVING: control_pb2.STATE_SERVING,
    State.DRAINING: control_pb2.STATE_DRAINING,
    State.RESTARTING: control_pb2.STATE_RESTARTING,
    State.FAILED: control_pb2.STATE_FAILED,
}
_MODEL_STATES = {
    "loading": control_pb2.STATE_LOADING,
    "unloading": control_pb2.STATE_UNLOADING,
    "unloaded": control_pb2.STATE_UNLOADED,
}
_NAME_SHOWN = 100


class Control:
    """The control service.

    Args:
        config: The configuration.
        supervisor: Runs the engine process.
        inference: Knows the state and counts requests.
        ledger: The static budget.
        addresses: Where the daemon listens.
        gate: Knows the board and whether it is hot.
        metrics_address: Where the metrics are; empty for nowhere.
    """

    def __init__(
        self,
        config: Config,
        supervisor: Supervisor,
        inference: Inference,
        ledger: Ledger,
        addresses: Sequence[str],
        *,
        gate: ThermalGate,
        metrics_address: Callable[[], str] = str,
    ) -> None:
        self._config = config
        self._supervisor = supervisor
        self._inference = inference
        self._addresses = addresses
        self._gate = gate
        self._metrics_address = metrics_address
        self._default = config.default_model or config.models[0].name
        self._started = time.monotonic()
        self._changed = asyncio.Event()
        self._closed = False
        supervisor.subscribe(self._note_change)
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
            board=None if self._gate.board is None else board_status(self._gate.board),
            notices=[self._gate.notice] if self._gate.notice else [],
            metrics_address=self._metrics_address(),
        )

    async def WatchStatus(  # noqa: N802 - the service's name
        self, request: control_pb2.WatchStatusRequest, context: AnyContext
    ) -> None:
        """The state, again and again."""
        interval = check_interval(request)
        while not self._closed:
            changed = self._changed  # taken before the state is read: no change falls between the two
            await context.write(await self.GetStatus(control_pb2.GetStatusRequest(), context))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(changed.wait(), interval)
        raise UnavailableError("the daemon is ending; watch again", retry_seconds=1.0)

    async def ListSessions(  # noqa: N802 - the service's name
        self, request: control_pb2.ListSessionsRequest, context: AnyContext
    ) -> control_pb2.ListSessionsResponse:
        """The caller's sessions."""
        tenant = identity_of(context)
        response = control_pb2.ListSessionsResponse()
        names = [request.model] if request.model else [model.name for model in self._config.models]
        for model in names:
            response.sessions.extend(
                control_pb2.Session(
                    model=model,
                    name=session.name,
                    pages=session.pages,
                    requests=session.requests,
                    idle_seconds=session.idle_seconds,
                )
                for session in await self._supervisor.control.sessions(model)
                if session.tenant == tenant
            )
        return response

    async def DropSession(  # noqa: N802 - the service's name
        self, request: control_pb2.DropSessionRequest, context: AnyContext
    ) -> control_pb2.DropSessionResponse:
        """Let a session's pages go."""
        model = request.model or self._default
        if not request.name:
            raise InvalidArgumentError("name is empty; give the name of a session", field="name")
        if not await self._supervisor.control.drop_session(model, identity_of(context), request.name):
            raise NotFoundError(
                f"model {model} has no session {clip(request.name, _NAME_SHOWN)!r}; edgectl sessions lists them",
                field="name",
            )
        return control_pb2.DropSessionResponse()

    async def ListModels(  # noqa: N802 - the service's name
        self, _request: control_pb2.ListModelsRequest, _context: AnyContext
    ) -> control_pb2.ListModelsResponse:
        """Every model of the configuration."""
        return control_pb2.ListModelsResponse(models=map(self._model, self._config.models))

    async def LoadModel(  # noqa: N802 - the service's name
        self, request: control_pb2.LoadModelRequest, _context: AnyContext
    ) -> control_pb2.LoadModelResponse:
        """Load a model."""
        result = await self._supervisor.control.load(_required_name(request.name))
        return control_pb2.LoadModelResponse(unloaded=result.unloaded, seconds=result.seconds)

    async def UnloadModel(  # noqa: N802 - the service's name
        self, request: control_pb2.UnloadModelRequest, _context: AnyContext
    ) -> control_pb2.UnloadModelResponse:
        """Give a model's memory back."""
        await self._supervisor.control.unload(_required_name(request.name), cancel=request.cancel_requests)
        return control_pb2.UnloadModelResponse()

    def close(self) -> None:
        """End the watches."""
        self._closed = True
        self._note_change()

    def _note_change(self, *_: object) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _model_status(self, model: ModelConfig) -> control_pb2.ModelStatus:
        """What the engine last said of a model; its configuration where it has said nothing yet."""
        supervisor = self._supervisor
        status = control_pb2.ModelStatus(
            name=model.name,
            state=self._model_state(model.name),
            executor=model.executor,
            device=model.device,
            dtype=model.dtype,
            context_length=model.context_length,
            max_sequences=model.max_sequences,
            bytes=supervisor.control.residency.size(model.name),
            evictable=supervisor.control.residency.is_evictable(model.name),
        )
        loading = supervisor.loading.get(model.name)
        if loading is not None:
            status.loading = loading.what
            status.loading_fraction = loading.done / loading.total if loading.total else 0.0
        report = supervisor.models.get(model.name)
        if report is not None:
            add_report(status, report)
        status.waiting_to_cool = self._gate.waiting(model.name)
        status.waiting += status.waiting_to_cool
        status.queue_capacity = self._config.queue.capacity
        return status

    def _model(self, model: ModelConfig) -> control_pb2.Model:
        """One entry of the list."""
        status = self._model_status(model)
        return control_pb2.Model(
            name=model.name,
            state=status.state,
            evictable=status.evictable,
            bytes=status.bytes,
            context_length=status.context_length,
            max_sequences=status.max_sequences,
            executor=status.executor,
            device=status.device,
            dtype=status.dtype,
            default=model.name == self._default,
        )

    def _model_state(self, name: str) -> control_pb2.State:
        """A model's own state where it differs from the daemon's."""
        report = self._supervisor.models.get(name)
        return _MODEL_STATES.get("" if report is None else report.state) or _STATES[self._inference.state]


def _required_name(name: str) -> str:
    if not name:
        raise InvalidArgumentError("name is empty; give the name of a model", field="name")
    return name
