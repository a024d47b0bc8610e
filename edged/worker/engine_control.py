"""What an operator asks of the engine: sessions, and which models are loaded."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edged.errors import FailedPreconditionError, UnavailableError, from_code
from edged.log import get_logger
from edged.worker.messages import DropSession, ListSessions, LoadModel, UnloadModel

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from edged.memory.residency import Residency
    from edged.worker.messages import Answered, SessionReport
    from edged.worker.supervisor import Supervisor

_log = get_logger("supervisor")
_IDLE_CHECK_SECONDS = 0.02


@dataclass(frozen=True)
class LoadResult:
    """What loading a model took.

    Attributes:
        unloaded: Models that had to go for it.
        seconds: Time it took.
    """

    unloaded: tuple[str, ...]
    seconds: float


class EngineControl:
    """One operator at a time loads and unloads.

    Args:
        supervisor: Owns the engine.
        residency: Knows what fits beside what.
    """

    def __init__(self, supervisor: Supervisor, residency: Residency) -> None:
        self.residency = residency
        self._supervisor = supervisor
        self._one_at_a_time = asyncio.Lock()

    async def sessions(self, model: str) -> tuple[SessionReport, ...]:
        """The sessions of a model, the one used last first.

        Raises:
            UnavailableError: The engine does not serve now, or ends before it answers.
            NotFoundError: No model has that name.
        """
        return (await self._supervisor.ask(model, lambda query: ListSessions(query, model))).sessions

    async def drop_session(self, model: str, tenant: str, name: str) -> bool:
        """Let a session's pages go; False if there is none of that name.

        Raises:
            UnavailableError: The engine does not serve now, or ends before it answers.
            NotFoundError: No model has that name.
        """
        answer = await self._supervisor.ask(model, lambda query: DropSession(query, model, tenant, name))
        return answer.found

    async def load(self, model: str) -> LoadResult:
        """Load a model, and unload idle evictable ones where it does not fit beside them.

        What has begun is brought to its end, also if the caller goes away meanwhile.

        Raises:
            UnavailableError: The engine does not serve now, or ends before it answers.
            NotFoundError: No model has that name.
            FailedPreconditionError: It is loaded, or its folder is damaged.
            ResourceExhaustedError: It does not fit beside the models that answer requests.
        """
        async with self._one_at_a_time:
            self._supervisor.report_of(model)
            if model in self.residency.loaded:
                raise FailedPreconditionError(f"model {model} is loaded already", field="name")
            begun = time.monotonic()
            victims = self.residency.victims(model, self._supervisor.busy_models())
            await _to_its_end(self._load(model, victims))
            _log.info("model loaded", model=model, unloaded=victims)
            return LoadResult(victims, time.monotonic() - begun)

    async def unload(self, model: str, *, cancel: bool) -> None:
        """Give a model's memory back once its requests have ended; new ones are refused from now on.

        If the caller goes away meanwhile, the model serves on.

        Args:
            model: Its name.
            cancel: End its requests at once instead of waiting for them.

        Raises:
            UnavailableError: The engine does not serve now, or ends before it answers.
            NotFoundError: No model has that name.
            FailedPreconditionError: It is not loaded.
        """
        async with self._one_at_a_time:
            self._supervisor.report_of(model)
            if model not in self.residency.loaded:
                raise FailedPreconditionError(f"model {model} is not loaded", field="name")
            self._supervisor.mark(model, "unloading")
            try:
                while not cancel and model in self._supervisor.busy_models():  # noqa: ASYNC110 - an operator's rare wait
                    await asyncio.sleep(_IDLE_CHECK_SECONDS)
            except BaseException:
                self._supervisor.mark(model, "")
                raise
            await _to_its_end(self._unload(model))

    async def _load(self, model: str, victims: tuple[str, ...]) -> None:
        self._supervisor.mark(model, "loading")  # from here on a request for it is worth sending again
        try:
            for victim in victims:
                await self._unload(victim)
            on_gpu = self._supervisor.report_of(model).device != "cpu"  # the others load in a thread
            _check(
                await self._supervisor.change(model, lambda query: LoadModel(query, model), in_loop=on_gpu)
            )
            self.residency.add(model)
        except BaseException as error:
            lost = isinstance(error, UnavailableError)  # whose words are for a request, not for a load
            why = "the engine ended meanwhile" if lost else str(error)
            self._supervisor.mark(model, "unloaded", why)
            _log.error("model not loaded", model=model, unloaded=victims, why=str(error))
            raise
        self._supervisor.mark(model, "")

    async def _unload(self, model: str) -> None:
        self._supervisor.mark(model, "unloading")
        self.residency.remove(model)  # also if the engine ends meanwhile: the next one does not load it
        try:
            _check(
                await self._supervisor.change(model, lambda query: UnloadModel(query, model), in_loop=True)
            )
        finally:
            self._supervisor.mark(model, "unloaded")
        _log.info("model unloaded", model=model)


async def _to_its_end(work: Coroutine[None, None, None]) -> None:
    """Wait for ``work``, which goes on where the caller is cancelled: the engine does what it was asked either way.

    The caller's cancellation comes out once the work is done, so that nothing else is begun before.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # looked at: it is in the log
        raise


def _check(answer: Answered) -> None:
    """Raise what the engine said."""
    if answer.code:
        raise from_code(answer.code, answer.message)
