"""``grpc.health.v1``: Check, List and Watch for the daemon, the inference service and each model.

The library's own servicer has no List and sends to watchers while it holds the lock that setting a status needs, so one
stuck watcher would hold up the rest. The messages are the library's.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from grpc_health.v1 import health_pb2

from edged.errors import NotFoundError, UnavailableError
from edged.server.errors import clip

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edged.server.methods import AnyContext

WHOLE_DAEMON = ""
INFERENCE = "edged.v1.Inference"

_Status = health_pb2.HealthCheckResponse


def model_service(name: str) -> str:
    """Service name under which the health of the model ``name`` is asked."""
    return f"model/{name}"


class Health:
    """The health service. All methods run in the event loop.

    Args:
        models: Names of the configured models; everything is NOT_SERVING at first.
    """

    def __init__(self, models: tuple[str, ...]) -> None:
        services = (WHOLE_DAEMON, INFERENCE, *map(model_service, models))
        self._statuses = dict.fromkeys(services, _Status.NOT_SERVING)
        self._changed = asyncio.Event()
        self._closed = False

    def set_serving(self, serving: Mapping[str, bool]) -> None:
        """Set the status of the services named by the keys and wake the watchers."""
        for service, is_serving in serving.items():
            self._statuses[service] = _Status.SERVING if is_serving else _Status.NOT_SERVING
        self._wake()

    def close(self) -> None:
        """Turn everything to NOT_SERVING for good and end the watches after they have said so."""
        self._statuses = dict.fromkeys(self._statuses, _Status.NOT_SERVING)
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(  # noqa: N802 - the service's name
        self, request: health_pb2.HealthCheckRequest, _context: AnyContext
    ) -> health_pb2.HealthCheckResponse:
        """Status of one service now."""
        status = self._statuses.get(request.service)
        if status is None:
            known = ", ".join(repr(name) for name in self._statuses)
            raise NotFoundError(
                f"there is no service {clip(request.service, 200)!r}; ask for one of {known}", field="service"
            )
        return _Status(status=status)

    async def List(  # noqa: N802 - the service's name
        self, _request: health_pb2.HealthListRequest, _context: AnyContext
    ) -> health_pb2.HealthListResponse:
        """Status of every service now."""
        return health_pb2.HealthListResponse(
            statuses={service: _Status(status=status) for service, status in self._statuses.items()}
        )

    async def Watch(  # noqa: N802 - the service's name
        self, request: health_pb2.HealthCheckRequest, context: AnyContext
    ) -> None:
        """Status of one service now and at every change, until the client or the daemon ends it.

        A service that does not exist is SERVICE_UNKNOWN and stays watched, as the protocol asks.
        """
        last = None
        while True:
            changed = self._changed  # taken before the status is read: no change falls between the two
            status = self._statuses.get(request.service, _Status.SERVICE_UNKNOWN)
            if status != last:
                await context.write(_Status(status=status))
                last = status
            elif self._closed:
                raise UnavailableError("the daemon is ending; watch again", retry_seconds=1.0)
            else:
                await changed.wait()
