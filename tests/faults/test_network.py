"""What comes through the port that is no client: garbage, other protocols, connections that never speak."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import time

import grpc
import pytest
from attacked import IDS, SAMPLED, Target
from fixtures.pki import Authority
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from edged import errors
from edged.client import Client, Credentials
from edged.v1 import control_pb2, inference_pb2

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
EMPTY_SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
MESSAGE = 2**20 - 1024
GROWTH = 48 * 2**20
"""Bytes that the daemon may keep of an attack: gRPC's buffers and arenas, which it uses again."""


def send(place, data, *, seconds=10.0):
    """Send bytes for as long as the other side takes them; return what it said."""
    said = b""
    with socket.create_connection(place, timeout=seconds) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(data)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            said = connection.recv(65536)
    return said


def frames(numbers, size):
    """HTTP/2 frames of any type, flags, stream and content, ``size`` bytes or a little more."""
    parts = [PREFACE, EMPTY_SETTINGS]
    while size > 0:
        length = numbers.randrange(16384)
        head = length.to_bytes(3, "big") + bytes([numbers.randrange(12), numbers.randrange(256)])
        parts.append(head + numbers.randrange(64).to_bytes(4, "big") + numbers.randbytes(length))
        size -= length + 9
    return b"".join(parts)


def pour(place, data):
    """Send bytes until the other side takes no more; return how many it, or the kernel for it, has taken."""
    taken = 0
    with contextlib.suppress(OSError), socket.create_connection(place, timeout=10) as connection:
        view = memoryview(data)
        while taken < len(data):
            taken += connection.send(view[taken:])
    return taken


def attack_with_garbage(target, total, seed):
    numbers = random.Random(seed)
    noise = numbers.randbytes(2**20)
    kinds = [
        lambda: noise[numbers.randrange(2**19) :],
        lambda: PREFACE + noise[numbers.randrange(2**19) :],
        lambda: frames(numbers, 2**18),
        # a header that announces the largest frame and a body of it, over and over
        lambda: PREFACE + EMPTY_SETTINGS + (b"\x00\x40\x00\x00\x00\x00\x00\x00\x01" + noise[:16384]) * 32,
    ]
    for kind in kinds:  # what the daemon keeps, it keeps from the first ones on
        pour(target.place, kind())
    before = target.memory()
    taken = 0
    while taken < total:
        taken += pour(target.place, numbers.choice(kinds)())
    # Most of that the daemon sends away unread. A message of a call it has to read: it is garbage all the same.
    with grpc.insecure_channel(target.address) as channel:
        call = channel.unary_unary("/edged.v1.Inference/Tokenize")
        for number in range(total // MESSAGE):
            garbage = noise[number % 1000 :][:MESSAGE]
            with pytest.raises(grpc.RpcError) as caught:
                call(garbage, timeout=30)
            assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL)
    target.answer()
    assert target.memory() - before < GROWTH


def test_garbage_on_the_port(target):
    attack_with_garbage(target, 16 * 2**20, seed=1)


@pytest.mark.soak
def test_a_gigabyte_of_garbage_on_the_port(target):
    attack_with_garbage(target, 2**30, seed=2)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\nHost: robot\r\n\r\n",
        b"POST /edged.v1.Inference/Generate HTTP/1.1\r\nContent-Length: 1000000000\r\n\r\n",
        b"CONNECT evil:443 HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\0" * 1000,
        PREFACE + EMPTY_SETTINGS + b"\xff" * 100,
    ],
)
def test_another_protocol_is_sent_away(target, request_bytes):
    began = time.monotonic()
    send(target.place, request_bytes, seconds=20)
    assert time.monotonic() - began < 15
    target.answer()


def hold_slow_connections(target, beginnings):
    """Five hundred connections that say a little and then next to nothing; others are served meanwhile."""
    descriptors, memory = target.descriptors(), target.memory()
    slow = []
    try:
        for index in range(500):
            connection = socket.create_connection(target.place, timeout=10)
            beginning = beginnings[index % len(beginnings)]
            with contextlib.suppress(OSError):
                connection.sendall(beginning[: 1 + index % len(beginning)])
            slow.append(connection)
        began = time.monotonic()
        with Client(target.address, credentials=target.credentials) as client:
            for _ in range(5):
                for connection in random.Random(3).sample(slow, 50):
                    with contextlib.suppress(OSError):
                        connection.send(b"P")
                answer = client.generate(IDS, max_tokens=4, timeout=30, **SAMPLED).answer()
                assert answer.finished.usage.generated_tokens == 4
        assert time.monotonic() - began < 60
        assert target.memory() - memory < 2 * GROWTH
        # When the time for a handshake is over, the daemon lets go by itself.
        end = time.monotonic() + 60
        while target.descriptors() > descriptors + 20:
            assert time.monotonic() < end, f"{target.descriptors()} descriptors are open, {descriptors} were"
            time.sleep(0.1)
    finally:
        for connection in slow:
            connection.close()
    target.answer()


def test_five_hundred_slow_connections_hold_up_nobody(target):
    hold_slow_connections(target, [PREFACE])


@pytest.mark.soak
def test_five_hundred_slow_handshakes_of_tls_hold_up_nobody(start_daemon, tmp_path):
    authority = Authority(tmp_path)
    certificate, key = authority.issue("server")
    tls = {"certificate": str(certificate), "key": str(key)}
    daemon = start_daemon(fake={}, listen={"tcp": "127.0.0.1:0", "tls": tls})
    hello = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(
            ssl.MemoryBIO(), hello, server_hostname="localhost"
        ).do_handshake()
    target = Target(daemon, Credentials(ca=authority.ca))
    hold_slow_connections(target, [hello.read(), PREFACE, b"\x16\x03\x01\xff\xff" + bytes(2000)])
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log()


def test_a_listener_whose_connections_are_taken_leaves_the_others_alone(start_daemon):
    daemon = start_daemon(fake={}, listen={"tcp": "127.0.0.1:0"}, limits={"connections": 5})
    target = Target(daemon)
    taken = []
    try:
        for _ in range(20):
            connection = socket.create_connection(target.place, timeout=10)
            with contextlib.suppress(OSError):
                connection.sendall(PREFACE + EMPTY_SETTINGS)
            taken.append(connection)
        with Client(target.address) as client, pytest.raises(errors.EdgedError):
            client.status(timeout=1)
        target.answer()  # through the unix socket
    finally:
        for connection in taken:
            connection.close()
    with Client(target.address, wait_for_ready=True) as client:
        assert client.status(timeout=30).version
    assert daemon.stop() == 0


def test_a_client_that_pings_without_end_is_let_go(target):
    ping = b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + b"12345678"
    with socket.create_connection(target.place, timeout=20) as connection:
        connection.sendall(PREFACE + EMPTY_SETTINGS)
        said = b""
        with contextlib.suppress(OSError):
            for _ in range(200):
                connection.sendall(ping * 10)
                time.sleep(0.001)
        with contextlib.suppress(OSError):
            while True:
                piece = connection.recv(65536)
                if not piece:
                    break
                said += piece
        assert b"too_many_pings" in said
    target.answer()


def test_headers_without_end_are_refused(target):
    with grpc.insecure_channel(target.address) as channel:
        call = channel.unary_unary("/edged.v1.Control/GetStatus")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"", metadata=[(f"x-{index}", "y" * 1000) for index in range(100)], timeout=20)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert control_pb2.GetStatusResponse.FromString(call(b"", timeout=20)).version


def test_a_compressed_message_is_measured_by_what_it_becomes(target):
    memory = target.memory()
    with grpc.insecure_channel(target.address) as channel:
        call = channel.unary_unary("/edged.v1.Inference/Tokenize")
        for _ in range(3):
            with pytest.raises(grpc.RpcError) as caught:
                call(bytes(32 * 2**20), timeout=30, compression=grpc.Compression.Gzip)  # 32 KiB on the wire
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    target.answer()
    assert target.memory() - memory < 32 * 2**20


def test_more_streams_than_allowed_wait_and_are_answered(target):
    with grpc.insecure_channel(target.address) as channel:
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
        watches = [watch(b"") for _ in range(128)]  # limits.concurrent_streams
        for each in watches:
            next(each)
        check = channel.unary_unary("/grpc.health.v1.Health/Check").future(b"", timeout=30)
        time.sleep(0.3)
        assert not check.done(), "the connection is full"
        for each in watches:
            each.cancel()
        assert health_pb2.HealthCheckResponse.FromString(check.result(30)).status == 1
    target.answer()


def mutate(numbers, data):
    """``data`` with a few bytes changed, removed, added or repeated."""
    content = bytearray(data)
    for _ in range(numbers.randint(1, 8)):
        place = numbers.randint(0, len(content))
        kind = numbers.randrange(4)
        if kind == 0 and content:
            content[min(place, len(content) - 1)] = numbers.randrange(256)
        elif kind == 1:
            del content[place : place + numbers.randint(1, 4)]
        elif kind == 2:
            content[place:place] = numbers.randbytes(numbers.randint(1, 6))
        else:
            content += content[place : place + 40]
    return bytes(content[:4000])


def samples():
    """Requests to begin with, by method: filled ones of our own, an empty one of every other method that there is."""
    generate = inference_pb2.GenerateRequest(text="Hello there", priority=3)
    generate.stops.max_tokens = 2
    generate.sampling.temperature = 0.5
    generate.sampling.seed = 7
    chat = inference_pb2.GenerateRequest()
    chat.chat.messages.add(role="user", content="What is a robot?")
    chat.stops.max_tokens = 1
    ids = inference_pb2.GenerateRequest()
    ids.token_ids.ids.extend([1, 2, 3])
    ids.stops.max_tokens = 1
    services = [
        inference_pb2.DESCRIPTOR.services_by_name["Inference"],
        control_pb2.DESCRIPTOR.services_by_name["Control"],
        health_pb2.DESCRIPTOR.services_by_name["Health"],
        reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
    ]
    found = {
        f"/{service.full_name}/{method.name}": [GetMessageClass(method.input_type)()]
        for service in services
        for method in service.methods
    }
    return found | {
        "/edged.v1.Inference/Generate": [generate, chat, ids],
        "/edged.v1.Inference/Tokenize": [inference_pb2.TokenizeRequest(text="Hello")],
        "/edged.v1.Inference/Detokenize": [inference_pb2.DetokenizeRequest(token_ids=[1, 2])],
        "/edged.v1.Control/ListSessions": [control_pb2.ListSessionsRequest(model="smollm")],
        "/edged.v1.Control/DropSession": [control_pb2.DropSessionRequest(model="smollm", name="a")],
        "/edged.v1.Control/WatchStatus": [control_pb2.WatchStatusRequest(interval_seconds=1)],
        "/edged.v1.Control/LoadModel": [control_pb2.LoadModelRequest(name="another")],
        "/edged.v1.Control/UnloadModel": [control_pb2.UnloadModelRequest(name="another")],
        "/grpc.health.v1.Health/Check": [health_pb2.HealthCheckRequest(service="model/smollm")],
        "/grpc.health.v1.Health/Watch": [health_pb2.HealthCheckRequest(service="model/smollm")],
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": [
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="edged.v1.Inference")
        ],
    }


def fuzz(target, count, seed):
    """Send mutated requests to every method; return the codes that came back."""
    numbers = random.Random(seed)
    beginnings = samples()
    names = list(beginnings)
    codes = {}
    with grpc.insecure_channel(target.address) as channel:
        methods = {name: channel.unary_stream(name) for name in names}
        done = 0
        while done < count:
            batch = []
            for _ in range(min(48, count - done)):
                name = numbers.choice(names)
                data = mutate(numbers, numbers.choice(beginnings[name]).SerializeToString())
                batch.append((name, methods[name](data, timeout=30)))
            for name, call in batch:
                # A mutated request may ask for a whole context of tokens, or to be told for ever: the beginning is enough.
                with contextlib.suppress(StopIteration, grpc.RpcError):
                    for _ in range(4 if name.endswith("/Generate") else 1):
                        next(call)
                call.cancel()
                code = call.code()
                codes[code] = codes.get(code, 0) + 1
            done += len(batch)
    return codes


def hold_to(target, codes, count):
    assert sum(codes.values()) == count
    allowed = {
        grpc.StatusCode.OK,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,  # vectors, of a model that gives none
    }
    assert set(codes) <= allowed, codes
    assert codes[grpc.StatusCode.INVALID_ARGUMENT] > count // 20
    with target.daemon.client() as client:
        status = client.status()
        assert (status.daemon_pid, status.engine_restarts) == (target.pid, 0)
        end = time.monotonic() + 60
        while (
            (model := client.status().models[0]).running or model.waiting or model.pages_free != model.pages
        ):
            assert time.monotonic() < end, model
            time.sleep(0.1)
    target.answer()


def test_fuzzed_messages(target):
    fuzz(target, 500, seed=4)  # what the daemon keeps, it keeps from the first ones on
    before, count = target.memory(), 4000
    hold_to(target, fuzz(target, count, seed=5), count)
    assert target.memory() - before < GROWTH


@pytest.mark.soak
def test_two_hundred_thousand_fuzzed_messages(target):
    fuzz(target, 20_000, seed=6)
    before, count = target.memory(), 200_000
    hold_to(target, fuzz(target, count, seed=7), count)
    assert target.memory() - before < GROWTH
