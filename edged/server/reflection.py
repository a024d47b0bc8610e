"""Server reflection, which lets ``grpcurl`` and its like do without proto files.

The library answers; its requests are read as those of every other service are. Left to itself it answers garbage with
UNKNOWN and writes a traceback into the log for each, which anybody who may connect could fill.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection, reflection_pb2

from edged.errors import EdgedError, InternalError
from edged.log import get_logger
from edged.server.errors import abort
from edged.server.wire import read_message

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

log = get_logger("server")

_SERVICE = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]


def reflection_handler(services: Iterable[str]) -> grpc.GenericRpcHandler[Any, Any]:
    """Handler, for gRPC, of reflection.

    Args:
        services: Full names of what the server offers; reflection itself is added.
    """
    library = reflection.aio.ReflectionServicer(  # type: ignore[attr-defined]
        [*services, _SERVICE.full_name]
    )

    async def answer(
        requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[reflection_pb2.ServerReflectionResponse]:
        async def messages() -> AsyncIterator[Any]:
            async for data in requests:
                yield read_message(reflection_pb2.ServerReflectionRequest, data)

        failure: EdgedError
        try:
            async for response in library.ServerReflectionInfo(messages(), context):
                yield response
        except EdgedError as error:
            failure = error
        except Exception:
            log.exception("call failed", method=_SERVICE.full_name)
            failure = InternalError("reflection failed inside the daemon; its log has the reason")
        else:
            return
        await abort(context, failure)

    method = grpc.stream_stream_rpc_method_handler(
        answer,
        request_deserializer=None,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(_SERVICE.full_name, {_SERVICE.methods[0].name: method})
