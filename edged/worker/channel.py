"""The channel between the daemon and the engine process: framed messages over a unix socket pair.

A frame is its length in four bytes (big-endian) and one msgpack message. Both sides check every message against its
type. The engine's side is synchronous and never blocks a step: sending appends to a buffer that one system call a step
empties, and what the socket does not take stays for the next. The daemon's side is an asyncio protocol that hands every
message to a callback.
"""

from __future__ import annotations

import asyncio
import select
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from edged.worker.messages import Message, ToDaemon, ToEngine

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

MAX_FRAME = 64 * 2**20
"""Largest message in bytes: the longest context's token ids fit."""
_HEADER = struct.Struct(">I")
_READ_SIZE = 256 * 2**10

T = TypeVar("T")


class ChannelError(Exception):
    """The other side sent what is no message; the connection is of no more use."""


class ChannelClosedError(ChannelError):
    """The other side is gone."""


def _encode_path(value: Any) -> str:  # noqa: ANN401 - msgspec's hook
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} cannot cross the channel")


def _decode_path(kind: type, value: Any) -> Any:  # noqa: ANN401 - msgspec's hook
    if issubclass(kind, Path):
        return kind(value)
    raise NotImplementedError(f"{kind.__name__} cannot cross the channel")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_path)
_TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine, dec_hook=_decode_path)
_TO_DAEMON: msgspec.msgpack.Decoder[ToDaemon] = msgspec.msgpack.Decoder(ToDaemon, dec_hook=_decode_path)


def append_frame(buffer: bytearray, message: Message) -> None:
    """Append the frame of ``message`` to ``buffer``.

    Raises:
        ChannelError: The message is larger than ``MAX_FRAME``; the buffer is as before.
    """
    start = len(buffer)
    buffer += b"\0\0\0\0"
    _ENCODER.encode_into(message, buffer, start + _HEADER.size)
    size = len(buffer) - start - _HEADER.size
    if size > MAX_FRAME:
        del buffer[start:]
        raise ChannelError(f"a message of {size} bytes is larger than {MAX_FRAME}")
    _HEADER.pack_into(buffer, start, size)


class FrameReader(Generic[T]):
    """Cuts a byte stream into messages.

    Args:
        decoder: Decodes and checks one message.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[T]:
        """Take more bytes; return the messages that are complete now.

        Raises:
            ChannelError: A frame is too long or is no message of this direction.
        """
        buffer = self._buffer
        buffer += data
        messages = []
        position = 0
        with memoryview(buffer) as view:
            while len(buffer) - position >= _HEADER.size:
                (size,) = _HEADER.unpack_from(view, position)
                if size > MAX_FRAME:
                    raise ChannelError(f"a frame of {size} bytes is larger than {MAX_FRAME}")
                end = position + _HEADER.size + size
                if end > len(buffer):
                    break
                try:
                    messages.append(self._decoder.decode(view[position + _HEADER.size : end]))
                except msgspec.MsgspecError as error:
                    raise ChannelError(f"a frame of {size} bytes is no message: {error}") from error
                position = end
        if position:
            del buffer[:position]
        return messages


class EngineChannel:
    """The engine's side.

    Args:
        connection: Its end of the socket pair; the channel closes it.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._reader = FrameReader(_TO_ENGINE)
        self._outgoing = bytearray()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def receive(self, timeout: float | None = 0.0) -> list[ToEngine]:
        """Messages that have arrived.

        Args:
            timeout: Seconds to wait for the first one; None waits for ever, 0 only looks. Waiting also sends what
                :meth:`flush` left.

        Raises:
            ChannelClosedError: The daemon is gone.
            ChannelError: What came is no message.
        """
        if timeout != 0.0:
            self._wait(timeout)
        try:
            data = self._socket.recv(_READ_SIZE)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ChannelClosedError(f"the daemon is gone: {error}") from error
        if not data:
            raise ChannelClosedError("the daemon closed the channel")
        return self._reader.feed(data)

    def send(self, message: Message) -> None:
        """Queue a message; :meth:`flush` sends it."""
        append_frame(self._outgoing, message)

    def flush(self) -> None:
        """Send what is queued, as much as the socket takes without blocking.

        Raises:
            ChannelClosedError: The daemon is gone.
        """
        while self._outgoing:
            try:
                sent = self._socket.send(self._outgoing)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosedError(f"the daemon is gone: {error}") from error
            del self._outgoing[:sent]

    def close(self, timeout: float = 1.0) -> None:
        """Send what is queued within ``timeout`` seconds and close; without effect the second time."""
        try:
            self._socket.settimeout(timeout)
            self._socket.sendall(self._outgoing)
        except OSError:
            pass  # the daemon is gone or does not read; it sees the engine's end all the same
        finally:
            self._socket.close()

    def _wait(self, timeout: float | None) -> None:
        """Wait for bytes to read, sending what is queued meanwhile."""
        writing = select.POLLOUT if self._outgoing else 0
        self._poll.modify(self._socket, select.POLLIN | writing)
        events = self._poll.poll(None if timeout is None else max(0.0, timeout) * 1000)
        if writing and any(event & select.POLLOUT for _, event in events):
            self.flush()


class DaemonChannel(asyncio.Protocol):
    """The daemon's side.

    Args:
        on_message: Called with every message, on the event loop.
        on_close: Called once when the engine's end is closed or sent what is no message, with the reason.
    """

    def __init__(self, on_message: Callable[[ToDaemon], None], on_close: Callable[[str], None]) -> None:
        self._on_message = on_message
        self._on_close = on_close
        self._reader = FrameReader(_TO_DAEMON)
        self._transport: asyncio.Transport | None = None
        self._reason = "the engine closed the channel"

    @classmethod
    async def connect(
        cls,
        connection: socket.socket,
        on_message: Callable[[ToDaemon], None],
        on_close: Callable[[str], None],
    ) -> DaemonChannel:
        """Attach the daemon's end of the socket pair to the running event loop."""
        _, channel = await asyncio.get_running_loop().create_connection(
            lambda: cls(on_message, on_close), sock=connection
        )
        return channel

    def send(self, message: Message) -> None:
        """Send a message; without effect once the channel is closed.

        Raises:
            ChannelError: The message is larger than ``MAX_FRAME``.
        """
        frame = bytearray()
        append_frame(frame, message)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def close(self) -> None:
        """Close at once; ``on_close`` follows."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio: the socket is attached."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - a socket's transport is one
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Asyncio: bytes came."""
        try:
            messages = self._reader.feed(data)
        except ChannelError as error:
            self._reason = str(error)
            self.close()
            return
        for message in messages:
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """Asyncio: the socket is closed."""
        self._on_close(self._reason if exc is None else f"{self._reason}: {exc}")
