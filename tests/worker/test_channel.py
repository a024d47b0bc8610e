from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edged.config import AttentionConfig, Config, ListenConfig, ModelConfig
from edged.worker import channel
from edged.worker.channel import (
    ChannelClosedError,
    ChannelError,
    DaemonChannel,
    EngineChannel,
    FrameReader,
    append_frame,
)
from edged.worker.messages import (
    Cancel,
    Configure,
    Drain,
    Finished,
    Sampling,
    Stops,
    Submit,
    Timings,
    ToEngine,
    Tokens,
)


def reader():
    return FrameReader(channel._TO_ENGINE)


def submit(name="a", tokens=(1, 2, 3)):
    return Submit(
        name, "m", tokens, Sampling(0.5, 3, 0.9, 2**64 - 1), Stops(7, ("ü",), (1,), (1,)), 12.5, -3, False
    )


@given(
    st.lists(st.sampled_from([Cancel("a", "why"), Drain(), submit(), submit("b", ())]), max_size=8), st.data()
)
def test_messages_survive_any_cut_of_the_byte_stream(messages, data):
    frames = bytearray()
    for message in messages:
        append_frame(frames, message)
    frames, got, frame_reader = bytes(frames), [], reader()
    while frames:
        size = data.draw(st.integers(1, len(frames)))
        got += frame_reader.feed(frames[:size])
        frames = frames[size:]
    assert got == messages


def test_a_configuration_crosses_with_its_paths():
    config = Config(
        models=(ModelConfig(name="m", path=Path("/models/ü"), attention=AttentionConfig(mode="sparse")),),
        listen=ListenConfig(unix=Path("/run/x.sock")),
        drain_timeout=1.5,
    )
    frames = bytearray()
    append_frame(frames, Configure(config))
    (message,) = reader().feed(bytes(frames))
    assert message == Configure(config)
    assert isinstance(message.config.models[0].path, Path)


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"\xc1", "is no message"),
        (msgspec.msgpack.encode({"type": "Tokens", "request_id": "a"}), "is no message"),
        (msgspec.msgpack.encode({"type": "Cancel", "request_id": 5}), "is no message"),
        (msgspec.msgpack.encode({"type": "Cancel"}), "is no message"),
        (b"", "is no message"),
    ],
)
def test_what_is_no_message_of_this_direction_is_refused(payload, words):
    with pytest.raises(ChannelError, match=words):
        reader().feed(len(payload).to_bytes(4, "big") + payload)


def test_a_frame_over_the_bound_is_refused_before_it_is_read(monkeypatch):
    monkeypatch.setattr(channel, "MAX_FRAME", 100)
    with pytest.raises(ChannelError, match="a frame of 101 bytes is larger than 100"):
        reader().feed((101).to_bytes(4, "big"))
    frames = bytearray(b"before")
    with pytest.raises(ChannelError, match="is larger than 100"):
        append_frame(frames, submit("x" * 200))
    assert frames == b"before"


def test_every_message_has_a_direction_and_decodes_to_itself():
    assert msgspec.msgpack.Decoder(ToEngine).decode(channel._ENCODER.encode(Drain())) == Drain()
    finished = Finished("a", "length", "x", 1, 2, timings=Timings(0.1, 0.2, 0.3, 4))
    assert channel._TO_DAEMON.decode(channel._ENCODER.encode(finished)) == finished


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    engine = EngineChannel(theirs)
    yield ours, engine
    ours.close()
    engine.close(0.1)


def test_the_engine_looks_without_waiting_and_waits_when_told(pair):
    ours, engine = pair
    assert engine.receive(0.0) == []
    assert engine.receive(0.01) == []
    frame = bytearray()
    append_frame(frame, Drain())
    ours.sendall(frame[:3])
    assert engine.receive(None) == []
    ours.sendall(frame[3:])
    assert engine.receive(None) == [Drain()]


def test_the_engine_never_blocks_on_a_daemon_that_does_not_read(pair):
    ours, engine = pair
    message = Tokens("a", (1,), "x" * 1000)
    for _ in range(5000):  # far more than a socket's buffer
        engine.send(message)
        engine.flush()
    frame_reader, got = FrameReader(channel._TO_DAEMON), []
    ours.settimeout(5)
    while len(got) < 5000:
        engine.receive(0.001)  # also sends what is left
        got += frame_reader.feed(ours.recv(1 << 20))
    assert got == [message] * 5000


def test_the_engine_learns_that_the_daemon_is_gone(pair):
    ours, engine = pair
    ours.close()
    with pytest.raises(ChannelClosedError):
        engine.receive(None)
    engine.send(Drain())
    with pytest.raises(ChannelClosedError):
        engine.flush()


def test_closing_sends_what_is_queued(pair):
    ours, engine = pair
    engine.send(Tokens("a", (1,), "x"))
    engine.close()
    assert FrameReader(channel._TO_DAEMON).feed(ours.recv(1000)) == [Tokens("a", (1,), "x")]
    assert ours.recv(1) == b""


def test_the_daemons_side_hands_on_messages_and_the_reason_of_the_end():
    async def main():
        ours, theirs = socket.socketpair()
        got, ends = asyncio.Queue(), asyncio.Queue()
        daemon = await DaemonChannel.connect(ours, got.put_nowait, ends.put_nowait)
        engine = EngineChannel(theirs)
        daemon.send(Drain())
        assert engine.receive(5) == [Drain()]
        engine.send(Tokens("a", (1,), "x"))
        engine.flush()
        assert await got.get() == Tokens("a", (1,), "x")
        theirs.setblocking(True)
        theirs.sendall(b"\0\0\0\1\xc1")
        assert "a frame of 1 bytes is no message" in await ends.get()
        daemon.send(Drain())  # without effect
        await asyncio.sleep(0)
        assert ends.empty()
        engine.close()

    asyncio.run(main())
