"""Sockets that are claimed, refused with the reason, and given up."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
import sys

import grpc
import pytest

from edged.config import ListenConfig
from edged.errors import ListenError
from edged.server import unix_listener
from edged.server.listeners import Listeners, TcpListener
from edged.server.unix_listener import UnixListener


def refused(call) -> ListenError:
    with pytest.raises(ListenError) as caught:
        call()
    return caught.value


def bind(*listeners) -> None:
    """Bind to a real server, look, and stop it."""

    async def serve():
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        for listener in listeners:
            listener.bind(server)
        await server.start()
        await server.stop(None)

    asyncio.run(serve())


def test_the_socket_belongs_to_owner_and_group_alone(tmp_path):
    listener = UnixListener(tmp_path / "a b%20#é.sock")
    listener.claim()
    modes = []

    class Spy:
        def add_insecure_port(self, address):
            assert "%25" in address
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(str(listener.path))
            modes.append(stat.S_IMODE(listener.path.lstat().st_mode))

    listener.bind(Spy())
    assert modes == [0]  # nobody's until it is whose it is to be
    listener.close()
    assert list(tmp_path.iterdir()) == []


def test_gRPC_binds_where_it_was_told(tmp_path):  # noqa: N802
    listener = UnixListener(tmp_path / "a b%20#.sock")
    listener.claim()
    bind(listener)
    listener.close()
    assert list(tmp_path.iterdir()) == []


def test_a_second_daemon_is_refused_and_told_the_first_ones_pid(tmp_path):
    first, second = UnixListener(tmp_path / "s"), UnixListener(tmp_path / "s")
    first.claim()
    error = refused(second.claim)
    assert str(os.getpid()) in error.message
    assert "in use" in error.message
    first.close()
    second.claim()
    second.close()


def test_a_lock_of_a_killed_process_is_no_hindrance(tmp_path):
    code = (
        "import os, pathlib, sys; from edged.server.unix_listener import UnixListener;"
        "UnixListener(pathlib.Path(sys.argv[1])).claim(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], check=False, timeout=60)
    assert (tmp_path / "s.lock").exists()
    listener = UnixListener(tmp_path / "s")
    listener.claim()
    listener.close()


def test_another_programs_living_socket_is_left_alone(tmp_path):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "s"))
        other.listen()
        error = refused(UnixListener(tmp_path / "s").claim)
        assert "in use by another process" in error.message
        assert (tmp_path / "s").is_socket()
        assert not (tmp_path / "s.lock").exists()


def test_a_dead_socket_is_removed(tmp_path):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "s"))
    listener = UnixListener(tmp_path / "s")
    listener.claim()
    assert not (tmp_path / "s").exists()
    listener.close()


def test_a_file_in_the_way_is_left_alone(tmp_path):
    (tmp_path / "s").write_text("mine")
    assert "is no socket" in refused(UnixListener(tmp_path / "s").claim).message
    assert (tmp_path / "s").read_text() == "mine"


def test_too_long_a_path_says_both_numbers(tmp_path):
    path = tmp_path / ("x" * 120)
    error = refused(UnixListener(path).claim)
    assert str(len(str(path))) in error.message
    assert "107" in error.message


def test_a_missing_folder_says_how_to_make_it(tmp_path):
    assert f"mkdir -p {tmp_path / 'no'}" in refused(UnixListener(tmp_path / "no" / "s").claim).message


def test_a_folder_without_rights(tmp_path, monkeypatch):
    monkeypatch.setattr(unix_listener.os, "access", lambda *_: False)  # tests may run as root
    assert "may not create files" in refused(UnixListener(tmp_path / "s").claim).message


def test_the_default_folder_is_made_private(tmp_path, monkeypatch):
    folder = tmp_path / f"edged-{os.getuid()}"
    monkeypatch.setattr(unix_listener, "default_socket", lambda: folder / "edged.sock")
    listener = UnixListener(None)
    listener.claim()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    listener.close()
    folder.chmod(0o755)
    listener.claim()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    listener.close()


def test_a_default_folder_of_somebody_else_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / f"edged-{os.getuid()}"
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(unix_listener, "default_socket", lambda: folder / "edged.sock")
    assert "not safe" in refused(UnixListener(None).claim).message


def test_close_leaves_the_socket_of_a_successor(tmp_path):
    listener = UnixListener(tmp_path / "s")
    listener.claim()
    bind(listener)
    with socket.socket(socket.AF_UNIX) as successor:
        successor.bind(str(tmp_path / "s"))
        listener.close()
        assert (tmp_path / "s").is_socket()


def test_tcp_takes_a_free_port_and_says_which():
    listener = TcpListener("127.0.0.1:0")
    bind(listener)
    assert listener.port > 0
    assert listener.address == f"127.0.0.1:{listener.port}"


def test_tcp_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        error = refused(TcpListener(f"127.0.0.1:{port}").check)
    assert "address already in use" in error.message
    assert str(port) in error.message


def test_tcp_ipv6_has_brackets():
    assert TcpListener("[::1]:5").address == "[::1]:5"
    assert TcpListener("[::1]:5").host == "::1"


def test_a_refused_port_gives_the_socket_back(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen = ListenConfig(unix=tmp_path / "s", tcp=f"127.0.0.1:{other.getsockname()[1]}")
        refused(Listeners(listen).claim)
    assert list(tmp_path.iterdir()) == []
