"""Addresses that people write, and where the daemon is looked for."""

from __future__ import annotations

import socket

import pytest

from edged.client import address as address_module
from edged.client.address import Address, default_address
from edged.errors import InvalidArgumentError, UnreachableError


@pytest.mark.parametrize(
    ("text", "shown", "target"),
    [
        ("unix:/run/edged/edged.sock", "unix:/run/edged/edged.sock", "unix:/run/edged/edged.sock"),
        ("unix:///run/e.sock", "unix:/run/e.sock", "unix:/run/e.sock"),
        ("/run/e d%.sock", "unix:/run/e d%.sock", "unix:/run/e%20d%25.sock"),
        ("127.0.0.1:50051", "127.0.0.1:50051", "127.0.0.1:50051"),
        ("localhost:1", "localhost:1", "localhost:1"),
        ("[::1]:50051", "[::1]:50051", "[::1]:50051"),
    ],
)
def test_forms(text, shown, target):
    assert str(Address(text)) == shown
    assert Address(text).target == target


def test_a_relative_path_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(Address("./s")) == f"unix:{tmp_path}/s"


@pytest.mark.parametrize(
    "text",
    ["", "unix:", "localhost", "localhost:", ":50051", "host:port", "h:0", "h:65536", "h:" + "9" * 5000],
)
def test_malformed(text):
    with pytest.raises(InvalidArgumentError, match="neither unix:PATH nor HOST:PORT"):
        Address(text)


def test_the_environment_goes_first(monkeypatch):
    monkeypatch.setenv("EDGED_ADDRESS", "127.0.0.1:7")
    assert default_address() == "127.0.0.1:7"


def test_an_existing_socket_goes_before_a_writable_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("EDGED_ADDRESS", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(address_module, "DEFAULT_SOCKET", tmp_path / "system.sock")
    assert default_address() != f"unix:{tmp_path / 'system.sock'}"
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(tmp_path / "system.sock"))
        assert default_address() == f"unix:{tmp_path / 'system.sock'}"


def test_why_nobody_answers(tmp_path):
    assert "no such socket" in Address(str(tmp_path / "s")).unreachable().message
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(tmp_path / "s"))
        assert "no daemon listens" in Address(str(tmp_path / "s")).unreachable().message
        daemon.listen()
        assert Address(str(tmp_path / "s")).unreachable() is None
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert Address(f"127.0.0.1:{port}").unreachable() is None
    assert isinstance(Address(f"127.0.0.1:{port}").unreachable(), UnreachableError)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "http://localhost:50051",
            "speaks gRPC, not HTTP); write HOST:PORT, such as localhost:50051, or unix:PATH",
        ),
        (
            "https://robot:50051/v1",
            "begins with https:// (edged speaks gRPC, not HTTP); write HOST:PORT, such as robot:50051",
        ),
        ("grpc://[::1]:5", "begins with grpc://; write HOST:PORT, such as [::1]:5"),
    ],
)
def test_addresses_of_other_protocols_say_what_to_write(text, said):
    with pytest.raises(InvalidArgumentError) as caught:
        Address(text)
    assert said in caught.value.message
    assert caught.value.field == "address"
