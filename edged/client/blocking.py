"""The client for threads."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc

from edged.client.address import Address, default_address
from edged.client.attempts import Attempts
from edged.client.channel import open_channel
from edged.client.credentials import Credentials
from edged.client.failures import LATE, LATE_VECTORS, late_load, late_unload, read_failure
from edged.client.generation import Generation
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
    from collections.abc import Generator, Iterable, Iterator

    from google.protobuf.message import Message
    from typing_extensions import Self, Unpack

    from edged.client.chat import ChatOptions


class Client:
    """A connection to the daemon. Methods may be called from several threads.

    Args:
        address: ``unix:PATH``, a path or ``HOST:PORT``; by default ``EDGED_ADDRESS`` or the default unix socket.
        wait_for_ready: Calls wait, within their timeout, for a daemon that is not there yet or starts again, or whose engine
            loads. A generation, embedding or tokenization of which nothing had come when its engine or daemon ended is
            sent once more; Started then comes with the first piece of the answer.
        credentials: TLS and a token; by default those of the environment
            (:meth:`~edged.client.credentials.Credentials.from_environment`).

    Raises:
        InvalidArgumentError: The address is malformed, or a file of the credentials cannot be used.
    """

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
        self._channel = open_channel(grpc, self.address, credentials)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._control = control_pb2_grpc.ControlStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; running generations end."""
        self._channel.close()

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """Start a generation and return the iterator of its events.

        Args:
            prompt: Text, token ids, or the messages of a chat.
            timeout: Deadline in seconds; the daemon stops the work when it passes.
            **options: See :class:`~edged.client.requests.GenerateOptions`.

        Raises:
            InvalidArgumentError: A value that cannot be sent. Refusals of the daemon come while iterating.
        """
        request = generate_request(prompt, options)

        def send(left: float | None) -> Any:  # noqa: ANN401 - gRPC's call
            return self._inference.Generate(request, timeout=left, wait_for_ready=self._wait)

        return Generation(send, self.address, timeout, Attempts(timeout, patient=self._wait))

    def embed(
        self,
        inputs: EmbedInputs,
        *,
        model: str = "",
        pooling: str = "",
        normalize: bool = True,
        priority: int = 0,
        timeout: float | None = None,
    ) -> tuple[tuple[float, ...], ...]:
        """Vectors of texts, one each, by a model that the daemon's configuration lets make some.

        Args:
            inputs: Texts, or the token ids of each.
            model: Name of the model.
            pooling: ``last`` or ``mean``; by default what the configuration says.
            normalize: Give vectors of length 1.
            priority: Higher goes first.
            timeout: Deadline in seconds.

        Raises:
            UnsupportedError: The model serves no embeddings.
            EdgedError: The daemon refused.
        """
        request = embed_request(inputs, model=model, pooling=pooling, normalize=normalize, priority=priority)
        response = self._ask(self._inference.Embed, request, timeout, LATE_VECTORS)
        return tuple(tuple(embedding.values) for embedding in response.embeddings)

    def tokenize(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        no_special_tokens: bool = False,
        timeout: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> tuple[int, ...]:
        """Token ids of a text or a chat, as ``generate`` makes them.

        Raises:
            EdgedError: The daemon refused.
        """
        request = tokenize_request(prompt, model=model, no_special_tokens=no_special_tokens, options=options)
        response = self._ask(self._inference.Tokenize, request, timeout)
        return tuple(response.token_ids)

    def detokenize(
        self,
        token_ids: Iterable[int],
        *,
        model: str = "",
        keep_special_tokens: bool = False,
        timeout: float | None = None,
    ) -> str:
        """Text of token ids, as ``generate`` makes it.

        Raises:
            EdgedError: The daemon refused.
        """
        request = detokenize_request(token_ids, model=model, keep_special_tokens=keep_special_tokens)
        return str(self._ask(self._inference.Detokenize, request, timeout).text)

    def status(self, *, timeout: float | None = 5.0) -> control_pb2.GetStatusResponse:
        """State of the daemon, its models and its memory.

        Raises:
            UnreachableError: Nobody answers at the address.
            EdgedError: The daemon refused.
        """
        with self._failures(timeout):
            response: control_pb2.GetStatusResponse = self._control.GetStatus(
                control_pb2.GetStatusRequest(), timeout=timeout, wait_for_ready=self._wait
            )
        return response

    def watch_status(self, interval: float = 1.0) -> Generator[control_pb2.GetStatusResponse, None, None]:
        """The state now, at every change and every ``interval`` seconds, until the iterator is closed.

        Raises (while iterating):
            UnreachableError: Nobody answers at the address, or the daemon is gone.
            EdgedError: The daemon refused or ended the call.
        """
        request = control_pb2.WatchStatusRequest(interval_seconds=interval)
        with self._failures(None):
            call = self._control.WatchStatus(request, wait_for_ready=self._wait)
            try:
                yield from call
            finally:
                call.cancel()

    def sessions(self, model: str = "", *, timeout: float | None = 5.0) -> tuple[control_pb2.Session, ...]:
        """This client's sessions, of one model or of all.

        Raises:
            EdgedError: The daemon refused.
        """
        with self._failures(timeout):
            response: control_pb2.ListSessionsResponse = self._control.ListSessions(
                control_pb2.ListSessionsRequest(model=model), timeout=timeout, wait_for_ready=self._wait
            )
        return tuple(response.sessions)

    def drop_session(self, name: str, model: str = "", *, timeout: float | None = 5.0) -> None:
        """Let the pages of a session go.

        Raises:
            NotFoundError: There is none of that name.
            EdgedError: The daemon refused.
        """
        request = control_pb2.DropSessionRequest(name=name, model=model)
        with self._failures(timeout):
            self._control.DropSession(request, timeout=timeout, wait_for_ready=self._wait)

    def models(self, *, timeout: float | None = 5.0) -> tuple[control_pb2.Model, ...]:
        """Every model of the daemon's configuration.

        Raises:
            EdgedError: The daemon refused.
        """
        with self._failures(timeout):
            response: control_pb2.ListModelsResponse = self._control.ListModels(
                control_pb2.ListModelsRequest(), timeout=timeout, wait_for_ready=self._wait
            )
        return tuple(response.models)

    def load_model(self, name: str, *, timeout: float | None = None) -> control_pb2.LoadModelResponse:
        """Load a model; back when it serves.

        Raises:
            ResourceExhaustedError: It does not fit beside models that answer requests.
            FailedPreconditionError: It is loaded, or its folder is damaged.
            DeadlineError: It does not serve within ``timeout``; a load that has begun goes on.
            EdgedError: The daemon refused.
        """
        with self._failures(timeout, late_load(name)):
            response: control_pb2.LoadModelResponse = self._control.LoadModel(
                control_pb2.LoadModelRequest(name=name), timeout=timeout, wait_for_ready=self._wait
            )
        return response

    def unload_model(self, name: str, *, cancel_requests: bool = False, timeout: float | None = None) -> None:
        """Give a model's memory back once its requests have ended; back when that is done.

        Raises:
            FailedPreconditionError: It is not loaded.
            DeadlineError: Its requests have not ended within ``timeout``; it serves on.
            EdgedError: The daemon refused.
        """
        request = control_pb2.UnloadModelRequest(name=name, cancel_requests=cancel_requests)
        with self._failures(timeout, late_unload(name, cancel=cancel_requests)):
            self._control.UnloadModel(request, timeout=timeout, wait_for_ready=self._wait)

    def wait_ready(self, timeout: float = 60.0) -> control_pb2.GetStatusResponse:
        """Wait until the daemon serves, also if it is not there yet; return its state then.

        Raises:
            DeadlineError: It does not serve after ``timeout`` seconds; the message says how far it came.
            UnauthenticatedError, PermissionDeniedError: It is there and turns this caller away.
        """
        readiness = Readiness(self.address, timeout, time.monotonic())
        while True:
            left = readiness.left(time.monotonic())
            try:
                status = self.status(timeout=left)
            except EdgedError as error:
                readiness.failed(error)
            else:
                if readiness.serves(status):
                    return status
            time.sleep(min(POLL_SECONDS, left))

    def _ask(
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
                return method(request, timeout=attempts.left(), wait_for_ready=self._wait)
            except grpc.RpcError as failure:
                error = read_failure(failure, self.address, timeout, late)
            time.sleep(attempts.pause(error))

    @contextmanager
    def _failures(self, timeout: float | None, late: str = LATE) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as failure:
            raise read_failure(failure, self.address, timeout, late) from None
