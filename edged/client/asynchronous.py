"""The client for asyncio."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from edged.client.address import Address, default_address
from edged.client.channel import open_channel
from edged.client.credentials import Credentials
from edged.client.events import Answer, AnswerBuilder, Event, read_event
from edged.client.failures import read_failure
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
from edged.errors import EdgedError
from edged.v1 import control_pb2, control_pb2_grpc, inference_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator

    from typing_extensions import Self, Unpack

    from edged.client.chat import ChatOptions


class AsyncGeneration:
    """One running generation: an asynchronous iterator of events.

    Raises (while iterating):
        EdgedError: The daemon refused or ended the request; the class says which code, the message why.
    """

    def __init__(self, call: Any, address: Address, timeout: float | None) -> None:  # noqa: ANN401 - gRPC's call
        self._call = call
        self._address = address
        self._timeout = timeout

    async def __aiter__(self) -> AsyncIterator[Event]:
        try:
            async for response in self._call:
                yield read_event(response)
        except grpc.RpcError as failure:
            raise read_failure(failure, self._address, self._timeout) from None
        finally:
            self._call.cancel()

    def cancel(self) -> None:
        """Stop the work; the daemon frees the request's pages at its next step."""
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
        call = self._inference.Generate(
            generate_request(prompt, options), timeout=timeout, wait_for_ready=self._wait
        )
        return AsyncGeneration(call, self.address, timeout)

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
        with self._failures(timeout):
            response = await self._inference.Embed(request, timeout=timeout, wait_for_ready=self._wait)
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
        with self._failures(timeout):
            response = await self._inference.Tokenize(request, timeout=timeout, wait_for_ready=self._wait)
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
        with self._failures(timeout):
            response = await self._inference.Detokenize(request, timeout=timeout, wait_for_ready=self._wait)
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

    @contextmanager
    def _failures(self, timeout: float | None) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as failure:
            raise read_failure(failure, self.address, timeout) from None
