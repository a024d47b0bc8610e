"""The daemon's side of the engine: starts it, hands it requests, starts it again when it dies, and ends it.

Every request that :meth:`Supervisor.submit` takes ends exactly once, with Finished or with an error: the engine says
which, or the supervisor does when the engine is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from edged.errors import (
    EdgedError,
    InvalidArgumentError,
    UnavailableError,
    from_code,
)
from edged.log import get_logger
from edged.memory.residency import Residency
from edged.worker.channel import ChannelError
from edged.worker.engine_control import EngineControl
from edged.worker.engine_watch import EngineWatch
from edged.worker.life_signs import LifeSigns
from edged.worker.messages import (
    Answered,
    Cancel,
    Drain,
    EngineFailed,
    Failed,
    Finished,
    Loading,
    Message,
    ModelReport,
    Ready,
    Report,
    Shutdown,
    Started,
    Submit,
    ToDaemon,
    Tokens,
)
from edged.worker.model_states import ModelStates
from edged.worker.open_requests import OpenRequests
from edged.worker.outlook import Outlook
from edged.worker.process import ENGINE_COMMAND, EngineProcess
from edged.worker.queries import Queries
from edged.worker.restarts import RestartPolicy
from edged.worker.state import State, StateKeeper

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edged.config import Config
    from edged.worker.stream import RequestStream

_log = get_logger("supervisor")

_SHUTDOWN_SECONDS = 2.0
"""An engine that was told to shut down has this long before it is killed."""


class Supervisor:
    """Owns the engine process.

    Every method and property belongs to the event loop that called :meth:`start`.

    Args:
        config: The whole configuration.
        command: Program and arguments of an engine; the descriptor of the channel is added.
        residency: Which models an engine loads; all of them where it is None.
    """

    def __init__(
        self,
        config: Config,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        residency: Residency | None = None,
    ) -> None:
        self.loading: dict[str, Loading] = {}
        """What each model that loads does now; empty once the engine serves."""
        self.restarts = 0
        """Times the engine was started again."""
        self.last_error = ""
        """Why the engine last ended against its will; empty if it never did."""
        self.failure: EdgedError | None = None
        """Why the state is FAILED."""
        self._config = config
        self._command = tuple(command)
        self._keeper = StateKeeper()
        self._engine: EngineProcess | None = None
        names = [model.name for model in config.models]
        self._residency = Residency(dict.fromkeys(names, 0), (), 0) if residency is None else residency
        self._states = ModelStates(config)
        self.report_of = self._states.find
        """What is known of a model; NotFoundError where none has that name."""
        self.control = EngineControl(self, self._residency)
        """Sessions, and which models are loaded."""
        self._requests = OpenRequests(self._cancel, config)
        self._policy = RestartPolicy()
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._outlook = Outlook()
        self._watch = self._new_watch()
        self.life = LifeSigns()
        """Who is told of the engine's signs of life."""
        self._queries = Queries()
        self._forget_models()

    @property
    def state(self) -> State:
        """What the daemon can do for a client now."""
        return self._keeper.now

    @property
    def models(self) -> dict[str, ModelReport]:
        """Last known state of every model, in the configuration's order."""
        return self._states.reports

    @property
    def finished(self) -> int:
        """Requests that ended with Finished."""
        return self._requests.finished

    @property
    def failed(self) -> int:
        """Requests that ended with an error after they had been taken."""
        return self._requests.failed

    @property
    def engine_pid(self) -> int:
        """Process id of the engine; 0 while there is none."""
        return 0 if self._engine is None else self._engine.pid

    def subscribe(self, callback: Callable[[State], None]) -> Callable[[], None]:
        """Call ``callback`` with every new state; return what ends that."""
        return self._keeper.subscribe(callback)

    async def wait_for(self, *states: State) -> State:
        """Wait until the state is one of ``states`` and return it."""
        return await self._keeper.wait_for(*states)

    async def start(self) -> None:
        """Begin to start the engine; the state says when it serves."""
        self._task = asyncio.get_running_loop().create_task(self._keep_running(), name="edged-supervisor")

    async def stop(self, drain_timeout: float) -> None:
        """End the engine: let what was submitted finish for ``drain_timeout`` seconds, then end it all the same.

        New requests are refused from now on. Requests that were cut off end with UNAVAILABLE.
        """
        serving = self._keeper.now is State.SERVING
        self._stopping.set()
        if self._keeper.now is not State.FAILED:
            self._keeper.set(State.DRAINING)
        if self._task is None:
            return
        if serving and self._engine is not None:
            self._engine.send(Drain())
            if not await self._ended(drain_timeout) and self._engine is not None:
                _log.warning("the drain timeout passed", cut_off=len(self._requests))
                self._engine.send(Shutdown())
                await self._ended(_SHUTDOWN_SECONDS)
        self.kill()
        await asyncio.wait({self._task})

    def kill(self) -> None:
        """Kill the engine now and start no other; open requests end with UNAVAILABLE."""
        self._stopping.set()
        if self._keeper.now is not State.FAILED:
            self._keeper.set(State.DRAINING)
        if self._engine is not None:
            self._engine.kill()

    def submit(self, message: Submit, client: str = "") -> RequestStream:
        """As :meth:`submit_all`, for a request of one answer. Leave the stream as a context manager."""
        return self.submit_all(message, client)[0]

    def submit_all(self, message: Submit, client: str = "") -> list[RequestStream]:
        """Hand a request to the engine, which takes all of its answers or none.

        Args:
            message: The request.
            client: Whose request it is, for ``limits.requests_per_client``; empty where nobody counts.

        Returns:
            The events of each answer. Call ``cancel`` of each when the reader goes away.

        Raises:
            UnavailableError: The engine or the model does not serve now; ``retry_seconds`` says when it is expected to.
            NotFoundError: No model has that name.
            FailedPreconditionError: The model is not loaded.
            ResourceExhaustedError: More requests wait than the queue holds, known before the engine is asked, or the client
                has as many requests as one client may.
            InvalidArgumentError: The request id is in use, the message is too large for the channel, or more answers are
                asked for than there can be at once.
        """
        engine = self._engine
        if self._keeper.now is not State.SERVING or engine is None:
            raise self._unavailable()
        report = self._states.find_ready(message.model)
        streams = self._requests.make(message, client, report)
        self._residency.use(message.model)
        try:
            engine.send(message)
        except ChannelError as error:
            raise InvalidArgumentError(f"the request is too large: {error}") from error
        self._requests.add(streams)
        self.life.tell(self._watch)
        return streams

    async def ask(self, model: str, message_of: Callable[[int], Message]) -> Answered:
        """Ask the engine something about a model and wait for its answer.

        Args:
            model: Name of the model.
            message_of: Makes the message out of the question's number.

        Raises:
            UnavailableError: The engine does not serve now, or ends before it answers.
            NotFoundError: No model has that name.
        """
        engine = self._engine
        if self._keeper.now is not State.SERVING or engine is None:
            raise self._unavailable()
        self.report_of(model)
        return await self._queries.ask(engine.send, message_of)

    async def change(self, model: str, message_of: Callable[[int], Message], *, in_loop: bool) -> Answered:
        """As :meth:`ask`, to load or unload a model: the engine has more time for a sign of life meanwhile.

        Args:
            model: Name of the model.
            message_of: Makes the message out of the question's number.
            in_loop: The engine makes no step until it is done.
        """
        watch = self._watch
        try:
            with watch.changing(in_loop=in_loop):
                self.life.tell(watch)
                return await self.ask(model, message_of)
        finally:
            self.life.tell(self._watch)

    def busy_models(self) -> set[str]:
        """Models with open requests."""
        return self._requests.models()

    def mark(self, model: str, state: str, fault: str = "") -> None:
        """Say what an operator does to a model, as :meth:`edged.worker.model_states.ModelStates.mark` has it."""
        if state != "loading":
            self.loading.pop(model, None)
        self._states.mark(model, state, fault)
        self._keeper.tell()

    def _cancel(self, stream: RequestStream, reason: str) -> None:
        if self._engine is not None:
            self._engine.send(Cancel(stream.request_id, reason))

    def _unavailable(self) -> UnavailableError:
        """Why a request is not taken, and when it would be."""
        return self._outlook.refusal(self._keeper.now, self.last_error)

    # The engine's life

    async def _keep_running(self) -> None:
        """Run engines until one is the last."""
        try:
            while True:
                await self._run_engine()
                if self._stopping.is_set():
                    return
                delay = self._next_delay()
                if delay is None:
                    self._keeper.set(State.FAILED)
                    return
                self._outlook.expect(delay)
                self._keeper.set(State.RESTARTING)
                _log.warning("the engine starts again", why=self.last_error, delay_seconds=delay)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), delay)
                if self._stopping.is_set():
                    return
                self.restarts += 1
        except Exception as error:  # noqa: BLE001 - whatever it is, clients and health must learn of it
            _log.exception("the supervisor failed")
            self.failure = EdgedError(f"the supervisor failed: {error}")
            self.last_error = str(error)
            self.kill()
            self._lose_requests(self.last_error)
            self._keeper.set(State.FAILED)

    def _next_delay(self) -> float | None:
        """Seconds until the next engine, or None, with ``failure`` set, when there is to be none."""
        error = self._watch.error
        if self.failure is not None:
            _log.error("the engine is not started again", why=self.last_error)
            return None
        if error is not None and error.fatal:
            self.failure = from_code(error.code, error.message)
            _log.error("the engine cannot be started", why=error.message)
            return None
        delay = self._policy.next_delay(self._watch.served_seconds)
        if delay is None:
            self.last_error = f"{self._policy.describe()}, last: {self.last_error}"
            self.failure = UnavailableError(self.last_error)
            _log.error("the engine is not started again", why=self.last_error)
        return delay

    async def _run_engine(self) -> None:
        """Start one engine and see it to its end."""
        watch = self._watch = self._new_watch()
        self._outlook.expect()
        try:
            engine = await EngineProcess.start(
                self._config, self._receive, self._command, load=self._residency.loaded
            )
        except OSError as error:
            self.last_error = f"the engine process does not start: {error}"
            return
        self._engine = engine
        if self._stopping.is_set():
            engine.kill()
        _log.info("engine started", engine_pid=engine.pid)
        looking = asyncio.create_task(
            watch.end_if_it_hangs(
                engine, self._become_unavailable, lambda: self.life.tell(watch, looked=True)
            ),
            name="edged-watchdog",
        )
        try:
            await engine.wait_closed()
        finally:
            looking.cancel()
        self._engine = None
        if not watch.is_fatal:
            self._become_unavailable()
        self._lose_requests("the engine hung" if watch.hung else "the engine process ended")
        loading = self.loading
        self._forget_models()
        try:
            how = await engine.wait_exited()
        except UnavailableError as error:  # a new engine would find the device taken
            self.failure, self.last_error = error, f"{watch.hung}; {error.message}".removeprefix("; ")
            return
        if self._stopping.is_set():
            _log.info("engine ended", how=how)
        else:
            self.last_error = reason = watch.reason(how, loading)
            _log.error("engine ended", how=how, why=reason)

    def _new_watch(self) -> EngineWatch:
        return EngineWatch(self._config, lambda: len(self._requests) > 0)

    async def _ended(self, timeout: float) -> bool:
        """Wait for the last engine's end; False if ``timeout`` seconds passed first."""
        assert self._task is not None  # noqa: S101 - only asked once started
        done, _ = await asyncio.wait({self._task}, timeout=timeout)
        return bool(done)

    def _become_unavailable(self) -> None:
        """The engine is gone or about to go, and a new one comes."""
        if not self._stopping.is_set():
            self._outlook.expect()
            self._keeper.set(State.RESTARTING)

    def _forget_models(self) -> None:
        """No engine holds the models: show them as the next one will, where there will be one."""
        self._states.forget(() if self._stopping.is_set() else self._residency.loaded)
        self.loading = {}

    def _lose_requests(self, why: str) -> None:
        """End every open request because no engine is left to do it."""
        self._queries.fail_all(self._unavailable)
        self._requests.fail_all(self._outlook.loss(why, stopping=self._stopping.is_set()))

    def _receive(self, message: ToDaemon) -> None:
        """Act on one message of the engine."""
        self.life.tell(self._watch, alive=self._watch.note(message))
        if isinstance(message, Tokens | Started | Finished | Failed):
            self._requests.give(message)
        elif isinstance(message, Report):
            self._states.note(message.models)
        elif isinstance(message, Answered):
            self._queries.give(message)
        elif isinstance(message, Loading):
            self.loading[message.model] = message
        elif isinstance(message, Ready):
            self._note_ready(message)
        elif isinstance(message, EngineFailed) and not message.fatal:
            self._become_unavailable()  # it answers nothing more, though its end is still to come

    def _note_ready(self, message: Ready) -> None:
        """The engine has loaded everything."""
        self._states.note(message.models)
        self.loading = {}
        self._outlook.note_load(self._watch.serve())
        self.life.tell(self._watch, looked=True)
        if not self._stopping.is_set() and not self._watch.hung:
            self._keeper.set(State.SERVING)
