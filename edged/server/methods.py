"""Registers a servicer's methods so that every call reads, fails and logs the same way.

The generated ``add_…_to_server`` would answer an unreadable request with gRPC's own text; here the request's bytes come
through :mod:`edged.server.wire`, typed errors become statuses, and an unexpected exception is logged and answered with
INTERNAL without its text, which could quote a prompt.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from edged.errors import EdgedError, InternalError
from edged.log import get_logger
from edged.server.errors import abort
from edged.server.wire import read_message

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

    AnyContext = grpc.aio.ServicerContext[Any, Any]

log = get_logger("server")


def service_handler(service: ServiceDescriptor, servicer: object) -> grpc.GenericRpcHandler[Any, Any]:
    """Handler, for gRPC, of all methods of ``service``, answered by ``servicer``'s methods of the same names.

    Each is a coroutine method ``(request, context)``. A streaming one writes its responses with ``context.write`` and
    returns None.
    """
    handlers = {
        method.name: _method_handler(method, getattr(servicer, method.name)) for method in service.methods
    }
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _method_handler(
    method: MethodDescriptor, answer: Callable[[Any, AnyContext], Awaitable[Any]]
) -> grpc.RpcMethodHandler[Any, Any]:
    """One method: bytes in, message to ``answer``, errors to statuses."""
    kind = GetMessageClass(method.input_type)
    response = GetMessageClass(method.output_type)
    name = method.full_name

    async def call(data: bytes, context: AnyContext) -> Any:  # noqa: ANN401 - any response message
        try:
            return await answer(read_message(kind, data), context)
        except EdgedError as error:
            # At debug: refusals are the client's news. The server's own faults are logged where they happen.
            log.debug("call refused", method=name, code=error.code.name, reason=error.message)
            failure = error
        except grpc.aio.AbortError:
            raise
        except Exception:
            if context.cancelled():  # the client went away while something was being sent to it
                raise asyncio.CancelledError from None
            log.exception("call failed", method=name)
            failure = InternalError(
                f"{name} failed inside the daemon; its log has the reason. Please report it with that log"
            )
        return await abort(context, failure)

    make = (
        grpc.unary_stream_rpc_method_handler
        if method.server_streaming
        else grpc.unary_unary_rpc_method_handler
    )
    return make(call, request_deserializer=None, response_serializer=response.SerializeToString)
