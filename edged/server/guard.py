"""Lets calls in: which methods a listener has, which credential a caller showed, and what it may do with it.

Each listener has a gRPC server of its own with a guard of its own, because gRPC's Python does not say through which
listener a call came.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio

from edged.errors import EdgedError, PermissionDeniedError, UnauthenticatedError
from edged.log import get_logger
from edged.server.errors import abort

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from edged.server.tokens import TokenFile

    _Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    _Interceptor = grpc.aio.ServerInterceptor

INFER, CONTROL, STATUS = "infer", "control", "status"
_SERVICES = {"edged.v1.Inference": INFER, "edged.v1.Control": CONTROL}
_METHODS = {
    "/edged.v1.Control/GetStatus": STATUS,
    "/edged.v1.Control/WatchStatus": STATUS,
    "/edged.v1.Control/ListModels": STATUS,
    # A caller's own sessions, no others.
    "/edged.v1.Control/ListSessions": INFER,
    "/edged.v1.Control/DropSession": INFER,
}
_HEADER = "authorization"
_LOG_SECONDS = 1.0

log = get_logger("server")
_caller: ContextVar[str] = ContextVar("edged_caller", default="")


def scope_of(method: str) -> str:
    """The scope that a method needs; empty for health and reflection, which any scope gives.

    Args:
        method: As gRPC names it: ``/package.Service/Method``. What is unknown in a service of edged's needs the most
            that the service asks for.
    """
    service = method.strip("/").rpartition("/")[0]
    return _METHODS.get(method) or _SERVICES.get(service, "")


def caller_name() -> str:
    """Name of the token that the call being answered has shown; empty without one."""
    return _caller.get()


class Guard(_Interceptor):
    """The guard of one listener.

    Args:
        place: Name of the listener, for the log.
        scopes: What callers may do here.
        tokens: Known tokens; None where no token is asked for.
        demand_token: Whether a call without a token is refused. A token that is shown must be right in any case.
        on_denied: Is told of each refusal, with the code's name.
    """

    def __init__(
        self,
        place: str,
        scopes: Iterable[str],
        tokens: TokenFile | None,
        *,
        demand_token: bool,
        on_denied: Callable[[str], None] | None = None,
    ) -> None:
        self._place = place
        self._scopes = frozenset(scopes)
        self._tokens = tokens
        self._demand_token = demand_token
        self._on_denied = on_denied
        self._logged = float("-inf")
        self._quiet = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """GRPC: find the handler of a call."""
        try:
            self._admit(handler_call_details)
        except EdgedError as error:
            return self._refuse(error, handler_call_details.method)
        return await continuation(handler_call_details)

    def _admit(self, details: grpc.HandlerCallDetails) -> None:
        """Set who calls.

        Raises:
            UnauthenticatedError: No token, or one that is not known.
            PermissionDeniedError: The listener or the token has not the scope.
        """
        scopes, name = self._scopes, ""
        if self._tokens is not None:
            shown = [value for key, value in details.invocation_metadata or () if key == _HEADER]
            if shown or self._demand_token:
                token = self._tokens.find(_bearer(shown))
                if token is None:
                    raise UnauthenticatedError(
                        "the token is not known here; ask who runs the daemon for one, and that it stands in listen.tokens"
                    )
                scopes, name = scopes & token.scopes, token.name
        needed = scope_of(details.method)
        if needed and needed not in scopes:
            who = f"the token {name}" if name else "this listener"
            have = ", ".join(sorted(scopes)) or "none"
            raise PermissionDeniedError(
                f"{details.method} needs the scope {needed}, and {who} gives {have} here"
            )
        _caller.set(name)

    def _refuse(self, error: EdgedError, method: str) -> grpc.RpcMethodHandler[Any, Any]:
        """A handler that ends the call without having read its request."""
        if self._on_denied is not None:
            self._on_denied(error.code.name)

        async def answer(_requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
            self._log(error, method, context)
            await abort(context, error)

        return grpc.stream_stream_rpc_method_handler(answer)

    def _log(self, error: EdgedError, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """One line a second: who is refused could otherwise fill the disk."""
        now = time.monotonic()
        if now - self._logged < _LOG_SECONDS:
            self._quiet += 1
            return
        log.warning(
            "call denied",
            code=error.code.name,
            method=method[:100],
            peer=context.peer(),
            listener=self._place,
            not_logged=self._quiet,
        )
        self._logged, self._quiet = now, 0


def _bearer(headers: list[Any]) -> str:
    """The token of the one authorization header.

    Raises:
        UnauthenticatedError: There is none, another kind, or more than one.
    """
    if len(headers) != 1:
        raise UnauthenticatedError(
            "this listener asks for a token: send the header `authorization: Bearer TOKEN` once "
            "(edgectl --token-file FILE)"
        )
    value = headers[0] if isinstance(headers[0], str) else ""
    kind, _, token = value.partition(" ")
    if kind.lower() != "bearer" or not token.strip():
        raise UnauthenticatedError("the authorization header is not `Bearer TOKEN`")
    return token.strip()
