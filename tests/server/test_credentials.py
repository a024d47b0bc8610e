"""Tokens and certificates that change while the daemon runs, and files that are at fault."""

from __future__ import annotations

import grp
import json
import os
import shutil
import stat
import time

import grpc
import pytest
from fixtures.pki import Authority
from hypothesis import given
from hypothesis import strategies as st

from edged.cli.exit_codes import ExitCode
from edged.cli.main import main
from edged.client import Chunk, Client, Credentials
from edged.config import ListenConfig, TlsConfig
from edged.errors import EdgedError, ListenError, PermissionDeniedError, UnauthenticatedError
from edged.server.certificates import Certificates
from edged.server.listeners import Listeners
from edged.server.tokens import TokenFile, make_token, parse_tokens, token_line
from edged.server.unix_listener import UnixListener

LONG = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("pki"))


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.05)


@pytest.fixture
def impatient(monkeypatch):
    """Files are looked at in every call."""
    monkeypatch.setattr("edged.server.tokens._LOOK_SECONDS", 0.0)
    monkeypatch.setattr("edged.server.certificates._LOOK_SECONDS", 0.0)


@pytest.fixture
def tokens(tmp_path, impatient):
    secret = make_token()
    path = tmp_path / "tokens"
    path.write_text(token_line("robot", ("infer",), secret) + "\n")
    path.chmod(0o600)
    file = TokenFile(path)
    file.check()
    return file, path, secret


def test_a_token_file_is_read_again_when_it_changes(tokens):
    file, path, secret = tokens
    assert file.find(secret).name == "robot"
    second = make_token()
    path.write_text(token_line("arm", ("status", "infer"), second) + "\n")
    assert file.find(secret) is None
    assert file.find(second).scopes == {"status", "infer"}


@pytest.mark.parametrize(
    "content", ["", "# nothing\n", "nonsense\n", "robot infer sha256:00\n", "\0" * 50, None]
)
def test_a_file_that_is_emptied_broken_or_gone_lets_nobody_in_until_it_is_back(tokens, content):
    file, path, secret = tokens
    good = path.read_text()
    assert file.find(secret)
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    assert file.find(secret) is None
    assert file.find(secret) is None
    path.write_text(good)
    assert file.find(secret).name == "robot"


def others_may_write(path):
    path.chmod(0o620)
    return lambda: path.chmod(0o600)


def it_belongs_to_another(path):
    os.chown(path, 4321, -1)
    return lambda: os.chown(path, 0, -1)


def it_is_replaced_by_one_of_another(path):
    new = path.with_name("new")
    new.write_text(token_line("intruder", ("control",), make_token()) + "\n")
    os.chown(new, 4321, -1)
    old = path.with_name("old")
    path.rename(old)
    new.rename(path)
    return lambda: old.rename(path)


WAYS = {
    "chmod go-w": others_may_write,
    "user 4321": it_belongs_to_another,
    "chown root": it_is_replaced_by_one_of_another,
}


@pytest.mark.parametrize("words", WAYS)
def test_a_file_that_others_could_have_written_is_refused_whenever_it_comes(tokens, words):
    file, path, secret = tokens
    if "chmod" not in words and os.geteuid():
        pytest.skip("only root gives files away")
    good = path.read_text()
    put_right = WAYS[words](path)
    with pytest.raises(ListenError, match=words):
        TokenFile(path).check()
    assert file.find(secret).name == "robot", "the tokens that were known stay"
    assert words in file.fault
    assert str(path) in file.fault
    second = make_token()
    path.write_text(token_line("intruder", ("control",), second) + "\n")  # and so it is after each change
    assert file.find(second) is None
    assert file.find(secret).name == "robot"
    put_right()
    path.write_text(good)
    assert file.find(secret).name == "robot"
    assert file.fault == ""
    path.write_text(token_line("arm", ("infer",), second) + "\n")
    assert file.find(secret) is None
    assert file.find(second).name == "arm"


def test_a_pipe_in_the_place_of_the_file_holds_nobody_up(tokens):
    file, path, secret = tokens
    path.unlink()
    os.mkfifo(path, 0o600)
    assert file.find(secret) is None
    with pytest.raises(ListenError, match="it is no file"):
        TokenFile(path).check()


def test_a_reload_looks_at_the_tokens_and_says_what_is_wrong(tmp_path):
    path, secret = tmp_path / "tokens", make_token()
    path.write_text(token_line("robot", ("infer",), secret) + "\n")
    path.chmod(0o600)
    listeners = Listeners(ListenConfig(unix=tmp_path / "s", tcp="127.0.0.1:0", tokens=path))
    assert listeners.look() == ""
    path.chmod(0o666)
    assert "chmod go-w" in listeners.look()
    assert "the tokens that were known stay" in listeners.look()
    path.chmod(0o600)
    path.write_text("")
    assert "it lets nobody in" in listeners.look()
    assert Listeners(ListenConfig(unix=tmp_path / "s")).look() == ""


def test_a_wrong_line_takes_only_its_own_token_away(tokens):
    file, path, secret = tokens
    path.write_text("broken " + path.read_text() + path.read_text())
    assert file.find(secret).name == "robot"


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (None, 0o600, "cannot be read"),
        ("", 0o600, "it holds no token"),
        ("robot root sha256:" + "0" * 64, 0o600, "line 1 has a scope that is none of infer"),
        ("robot infer " + "0" * 64, 0o600, "line 1 is not NAME SCOPES sha256:DIGEST"),
        (
            f"a infer sha256:{'0' * 64}\na infer sha256:{'1' * 64}\n",
            0o600,
            "line 2 has the name of an earlier line",
        ),
        ("robot infer sha256:" + "0" * 64, 0o622, "chmod go-w"),
        (b"\xff\xfe", 0o600, "no UTF-8"),
    ],
)
def test_a_faulty_file_is_refused_at_the_start_without_quoting_it(tmp_path, content, mode, words):
    path = tmp_path / "tokens"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        path.chmod(mode)
    with pytest.raises(ListenError, match=words) as caught:
        TokenFile(path).check()
    assert "0000" not in caught.value.message


@given(st.text())
def test_any_text_is_read(text):
    tokens, faults = parse_tokens(text)
    assert len(tokens) + len(faults) <= len(text.splitlines())


def test_tokens_are_unlike():
    assert len({make_token() for _ in range(100)}) == 100
    assert len(make_token()) > 40


def test_a_pair_that_does_not_fit_is_refused(authority, tmp_path):
    certificate, key = authority.issue("first")
    other = authority.issue("second")[1]
    garbage = tmp_path / "garbage"
    garbage.write_text("-----BEGIN CERTIFICATE-----\nno\n-----END CERTIFICATE-----\n")
    Certificates(TlsConfig(certificate, key, authority.ca)).check()
    for tls, words in [
        (TlsConfig(certificate, other), "do not make a pair"),
        (TlsConfig(garbage, key), "do not make a pair"),
        (TlsConfig(certificate, garbage), "do not make a pair"),
        (TlsConfig(tmp_path / "none", key), "cannot be read"),
        (TlsConfig(certificate, key, garbage), "holds no certificate"),
    ]:
        with pytest.raises(ListenError, match=words):
            Certificates(tls).check()


def test_a_bad_change_is_not_taken_and_a_good_one_is(authority, tmp_path, impatient):
    certificate, key = (tmp_path / "c.pem", tmp_path / "k.pem")
    for name, other in (("one", (certificate, key)),):
        for source, target in zip(authority.issue(name), other, strict=True):
            shutil.copy(source, target)
    certificates = Certificates(TlsConfig(certificate, key))
    certificates.check()
    assert certificates._fetch() is None, "nothing has changed"
    until_one = certificates.expires_at()
    new, new_key = authority.issue("two", days=60)
    shutil.copy(new, certificate)
    assert certificates._fetch() is None, "the key is still the old one"
    assert certificates.expires_at() == until_one
    shutil.copy(new_key, key)
    assert certificates._fetch() is not None
    assert certificates.expires_at() > until_one
    key.unlink()
    assert certificates._fetch() is None


def serial_of(address):
    import ssl

    host, port = address.rsplit(":", 1)
    return ssl.get_server_certificate((host, int(port)))


def test_a_certificate_is_swapped_and_the_token_file_emptied_in_mid_stream(start_daemon, authority, tmp_path):
    certificate, key = authority.issue("swapped")
    secret = make_token()
    tokens = tmp_path / "tokens"
    tokens.write_text(token_line("robot", ("infer", "status"), secret) + "\n")
    tokens.chmod(0o600)
    daemon = start_daemon(
        fake={"step_seconds": 0.01},
        listen={
            "tcp": "127.0.0.1:0",
            "tls": {"certificate": str(certificate), "key": str(key)},
            "tokens": str(tokens),
        },
    )
    with daemon.client() as local:
        address = local.status().addresses[-1]
    shown = Credentials(ca=authority.ca, token=secret)
    before = serial_of(address)
    with Client(address, credentials=shown) as client:
        stream = iter(client.generate([5, 6], max_tokens=400, **LONG))
        next(event for event in stream if isinstance(event, Chunk))
        authority.issue("swapped", days=90)
        until(lambda: serial_of(address) != before)
        tokens.write_text("")

        def refused():
            try:
                client.status()
            except UnauthenticatedError:
                return True
            return False

        until(refused)
        assert list(stream)[-1].usage.generated_tokens == 400, "what had begun goes on"
    tokens.write_text(token_line("robot", ("infer", "status"), secret) + "\n")
    with Client(address, credentials=shown) as client:

        def served():
            try:
                return client.status().version
            except EdgedError:
                return False

        until(served)
    assert secret not in daemon.log()
    assert daemon.stop() == 0


def test_a_denied_call_does_not_fill_the_log(start_daemon, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text(token_line("robot", ("infer",), make_token()) + "\n")
    tokens.chmod(0o600)
    daemon = start_daemon(fake={}, listen={"tcp": "127.0.0.1:0", "tokens": str(tokens)})
    with daemon.client() as client:
        address = client.status().addresses[-1]
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary("/edged.v1.Inference/Generate")
        for _ in range(300):
            with pytest.raises(grpc.RpcError) as caught:
                call(b"\0" * 1000, metadata=[("authorization", "Bearer wrong")])
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    denied = [line for line in daemon.log_lines() if line["message"] == "call denied"]
    assert 1 <= len(denied) <= 20
    assert "wrong" not in str(denied)


def test_status_tells_a_daemon_that_refuses_from_one_that_is_not_there(start_daemon, tmp_path, capsys):
    known, tokens = make_token(), tmp_path / "tokens"
    tokens.write_text(token_line("robot", ("infer",), known) + "\n")
    tokens.chmod(0o600)
    daemon = start_daemon(fake={}, listen={"tcp": "127.0.0.1:0", "tokens": str(tokens)})
    with daemon.client() as client:
        address = client.status().addresses[-1]
    for secret in (known, make_token()):  # without the scope `status`; unknown
        shown = tmp_path / "shown"
        shown.write_text(secret)
        shown.chmod(0o600)
        code = main(["-a", address, "status", "--json", "--token-file", str(shown)])
        assert code == ExitCode.REFUSED
        assert json.loads(capsys.readouterr().out)["state"] == "refused"
        began = time.monotonic()
        refused = pytest.raises((UnauthenticatedError, PermissionDeniedError))
        with Client(address, credentials=Credentials(token=secret)) as client, refused:
            client.wait_ready(60)  # waiting would mend nothing
        assert time.monotonic() - began < 30
    assert daemon.stop() == 0
    assert main(["-a", address, "status", "--json"]) == ExitCode.UNREACHABLE
    assert json.loads(capsys.readouterr().out)["state"] == "unreachable"


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a socket away needs root")
def test_a_socket_has_its_owner_group_and_mode(tmp_path):
    import asyncio

    group = grp.getgrgid(1).gr_name

    async def serve():
        server = grpc.aio.server()
        listener = UnixListener(
            tmp_path / "s", owner="1", group=group, mode=0o640, field="listen.sockets[0].path"
        )
        listener.claim()
        listener.bind(server)
        status = (tmp_path / "s").stat()
        assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (1, 1, 0o640)
        listener.close()
        assert not (tmp_path / "s").exists()

    asyncio.run(serve())


@pytest.mark.parametrize(
    ("key", "text"), [("owner", "nobody-here"), ("group", "no-group"), ("group", "4294967296")]
)
def test_an_unknown_owner_or_group_is_named(tmp_path, key, text):
    listener = UnixListener(tmp_path / "s", field="listen.sockets[2].path", **{key: text})
    listener.claim()
    with pytest.raises(ListenError, match=rf"listen\.sockets\[2\]\.{key}: there is no") as caught:
        listener.bind(None)
    assert caught.value.field == f"listen.sockets[2].{key}"
    listener.close()


def test_a_refused_token_file_gives_the_sockets_back(tmp_path):
    listeners = Listeners(ListenConfig(unix=tmp_path / "s", tcp="127.0.0.1:0", tokens=tmp_path / "none"))
    with pytest.raises(ListenError, match="edgectl token"):
        listeners.claim()
    assert list(tmp_path.iterdir()) == []
