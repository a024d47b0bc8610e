"""gRPC's failures as typed errors."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc

from edged.client import Client
from edged.client.address import Address
from edged.client.failures import LATE, LATE_ANSWER, late_load, late_unload, read_failure
from edged.errors import CancelledError, UnavailableError
from edged.v1 import control_pb2, control_pb2_grpc


class Failure(grpc.RpcError):
    """What gRPC raises, with a status of one's choice."""

    def __init__(self, status: grpc.StatusCode, details: str) -> None:
        self._status, self._details = status, details

    def code(self):
        return self._status

    def details(self):
        return self._details

    def trailing_metadata(self):
        return ()


def test_a_call_that_the_stopping_daemon_ended_is_unavailable(tmp_path):
    address = Address(f"unix:{tmp_path}/s")
    ended = read_failure(Failure(grpc.StatusCode.CANCELLED, "CANCELLED"), address, None)
    assert isinstance(ended, UnavailableError)
    own = read_failure(Failure(grpc.StatusCode.CANCELLED, "Locally cancelled by application!"), address, None)
    assert isinstance(own, CancelledError)


def test_a_call_that_took_too_long_says_what_to_do_about_that_call(tmp_path):
    address = Address(f"unix:{tmp_path}/s")
    failure = Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
    said = {
        late: read_failure(failure, address, 1.5, late).message
        for late in (LATE, LATE_ANSWER, late_load("m"), late_unload("m", cancel=False))
    }
    assert all(f"within the timeout of 1.5 s: {late}" in message for late, message in said.items())
    assert [late for late in said if "fewer tokens" in said[late]] == [LATE_ANSWER]
    assert "--cancel" not in read_failure(failure, address, 1.5, late_unload("m", cancel=True)).message


class Control(control_pb2_grpc.ControlServicer):
    def GetStatus(self, request, context):  # noqa: N802 - its name in the protocol
        return control_pb2.GetStatusResponse(version="7")


def relay(source, target):
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def test_a_connection_that_takes_its_time_is_waited_for(tmp_path):
    """As one does over a slow network, and with a machine that has much else to do."""
    server = grpc.server(ThreadPoolExecutor(1))
    control_pb2_grpc.add_ControlServicer_to_server(Control(), server)
    server.add_insecure_port(f"unix:{tmp_path}/server")
    server.start()
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as behind:
        listener.bind(f"{tmp_path}/slow")
        listener.listen()

        def answer():
            with listener.accept()[0] as before:
                time.sleep(0.7)
                behind.connect(f"{tmp_path}/server")
                threading.Thread(target=relay, args=(behind, before), daemon=True).start()
                relay(before, behind)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with Client(f"unix:{tmp_path}/slow") as client:
            assert client.status(timeout=60).version == "7"
        thread.join(10)
    server.stop(None).wait()
