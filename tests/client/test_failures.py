"""gRPC's failures as typed errors."""

from __future__ import annotations

import grpc

from edged.client.address import Address
from edged.client.failures import read_failure
from edged.errors import CancelledError, UnavailableError


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
