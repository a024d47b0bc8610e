"""The client for asyncio."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from edged.client.address import Address, default_address
from edged.client.attempts import Attempts
from edged.client.channel import open_channel
from edged.client.credentials import Credentials
from edged.client.events import Answer, AnswerBuilder, Event, Started, read_event
from edged.client.failures import LATE, LATE_ANSWER, LATE_VECTORS, read_failure
from edged.client.readiness import POLL_SECONDS, Readiness
from edged.client.requests import (
    EmbedInputs,
    GenerateOptions,
    Prompt,
    detokenize_request,
    embed_request,
    generate_request,
    tokenize_request,
)
from edged.errors import CancelledError, EdgedError
from edged.v1 import control_pb2, control_pb2_grpc, inference_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator

    from google.protobuf.message import Message
    from typing_extensions import Self, Unpack

    from edged.client.chat import ChatOptions


class AsyncGeneration:
    """One running generation: an asynchronous iterator of events.

    Raises (while iterating):
        EdgedError: The daemon refused or ended the request; the class says which code, the message why.
    """

    def __init__(
        self,
        send: Callable[[float | None], Any],
        address: Address,
        timeout: float | None,
        attempts: Attempts,
    ) -> None:
        self.delivered = False
        """Whether anything of the answer has come; Started alone is none of it."""
        self._send = send
        self._address = address
        self._timeout = timeout
        self._attempts = attempts
        self._cancelled = asyncio.Event()
        self._call = send(attempts.left())

    async def __aiter__(self) -> AsyncIterator[Event]:
        try:
            while True:
                try:
                    async with aclosing(self._events()) as events:
                        async for event in events:
                            yield event
                except grpc.RpcError as failure:
                    error = read_failure(failure, self._address, self._timeout, LATE_ANSWER)
                else:
                    return
                if self.delivered:
                    raise error
                await self._send_again(error)
        finally:
            self._call.cancel()

    async def _events(self) -> AsyncGenerator[Event, None]:
        """The events of one try, as :class:`~edged.client.generation.Generation` has them."""
        started: list[Event] = []
        async for response in self._call:
            event = read_event(response)
            if isinstance(event, Started):
                if self._attempts.patient:
                    started = [event]
                else:
                    yield event
                continue
            self.delivered = True
            for held in started:
                yield held
            started = []
            yield event

    async def _send_again(self, error: EdgedError) -> None:
        """Send the request again, once it is time.

        Raises:
            EdgedError: That error, or that the time is over.
            CancelledError: Somebody has called ``cancel``.
        """
        pause = self._attempts.pause(error)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._cancelled.wait(), pause)
        if self._cancelled.is_set():
            raise CancelledError("the client cancelled the request")
        try:
            self._call = self._send(self._attempts.left())
        except grpc.aio.UsageError:  # the connection was closed meanwhile
            raise error from None

    def cancel(self) -> None:
        """Stop the work; the daemon frees the request's pages at its next step."""
        self._cancelled.set()
        self._call.cancel()

    async def answer(self) -> Answer:
        """Wait for the end and return everything in one piece."""
        return (await self.answers())[0]

    async def answers(self) -> tuple[Answer, ...]:
        """Wait for the end and return every answer, where ``n`` asked for several."""
        builder = AnswerBuilder()
        async for event in self:
            builder.add(event)
        return builder.build_all()


class AsyncClient:
    """A connection to the daemon, as :class:`~edged.client.blocking.Client`, for one event loop."""

    def __init__(
        self,
        address: str | None = None,
        *,
        wait_for_ready: bool = False,
        credentials: Credentials | None = None,
    ) -> None:
        self.address = Address(address or default_address())
        self._wait = wait_for_ready
        credentials = credentials or Credentials.from_environment()
        self._channel = open_channel(grpc.aio, self.address, credentials)
        # The generated stubs are typed for the channel of threads.
        self._inference: Any = inference_pb2_grpc.InferenceStub(self._channel)
        self._control: Any = control_pb2_grpc.ControlStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; running generations end."""
        await self._channel.close(None)

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGeneration:
        """Start a generation; see :meth:`edged.client.blocking.Client.generate`."""
        request = generate_request(prompt, options)

        def send(left: float | None) -> Any:  # noqa: ANN401 - gRPC's call
            return self._inference.Generate(request, timeout=left, wait_for_ready=self._wait)

        return AsyncGeneration(send, self.address, timeout, Attempts(timeout, patient=self._wait))

    async def embed(
        self,
        inputs: EmbedInputs,
        *,
        model: str = "",
        pooling: str = "",
        normalize: bool = True,
        priority: int = 0,
        timeout: float | None = None,
    ) -> tuple[tuple[float, ...], ...]:
        """Vectors of texts; see :meth:`edged.client.blocking.Client.embed`."""
        request = embed_request(inputs, model=model, pooling=pooling, normalize=normalize, priority=priority)
        response = await self._ask(self._inference.Embed, request, timeout, LATE_VECTORS)
        return tuple(tuple(embedding.values) for embedding in response.embeddings)

    async def tokenize(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        no_special_tokens: bool = False,
        timeout: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> tuple[int, ...]:
        """Token ids of a text or a chat, as ``generate`` makes them."""
        request = tokenize_request(prompt, model=model, no_special_tokens=no_special_tokens, options=options)
        response = await self._ask(self._inference.Tokenize, request, timeout)
        return tuple(response.token_ids)

    async def detokenize(
        self,
        token_ids: Iterable[int],
        *,
        model: str = "",
        keep_special_tokens: bool = False,
        timeout: float | None = None,
    ) -> str:
        """Text of token ids, as ``generate`` makes it."""
        request = detokenize_request(token_ids, model=model, keep_special_tokens=keep_special_tokens)
        response = await self._ask(self._inference.Detokenize, request, timeout)
        return str(response.text)

    async def status(
        self,
        *,
        timeout: float | None = 5.0,
    ) -> control_pb2.GetStatusResponse:
        """State of the daemon, its models and its memory."""
        with self._failures(timeout):
            response: control_pb2.GetStatusResponse = await self._control.GetStatus(
                control_pb2.GetStatusRequest(), timeout=timeout, wait_for_ready=self._wait
            )
        return response

    async def wait_ready(
        self,
        timeout: float = 60.0,
    ) -> control_pb2.GetStatusResponse:
        """Wait until the daemon serves, also if it is not there yet; return its state then."""
        loop = asyncio.get_running_loop()
        readiness = Readiness(self.address, timeout, loop.time())
        while True:
            left = readiness.left(loop.time())
            try:
                status = await self.status(timeout=left)
            except EdgedError as error:
                readiness.failed(error)
            else:
                if readiness.serves(status):
                    return status
            await asyncio.sleep(min(POLL_SECONDS, left))

    async def _ask(
        self,
        method: Any,  # noqa: ANN401 - of gRPC
        request: Message,
        timeout: float | None,
        late: str = LATE,
    ) -> Any:  # noqa: ANN401 - of gRPC
        """The answer to a question that changes nothing, asked again where it may be."""
        attempts = Attempts(timeout, patient=self._wait)
        while True:
            try:
                return await method(request, timeout=attempts.left(), wait_for_ready=self._wait)
            except grpc.RpcError as failure:
                error = read_failure(failure, self.address, timeout, late)
            await asyncio.sleep(attempts.pause(error))

    @contextmanager
    def _failures(self, timeout: float | None) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as failure:
            raise read_failure(failure, self.address, timeout) from None
