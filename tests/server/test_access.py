"""Who gets in: every listener, with every credential, at every method."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import grpc
import pytest
from fixtures.daemon import FAKE_MODEL_DAEMON, DaemonProcess, demo_configuration
from fixtures.pki import Authority
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from edged.client import Client, Credentials
from edged.errors import InvalidArgumentError, PermissionDeniedError, UnauthenticatedError, UnreachableError
from edged.server.tokens import make_token, token_line
from edged.v1 import control_pb2, inference_pb2

if TYPE_CHECKING:
    from pathlib import Path

ALL = {"infer", "control", "status"}
STATUS_METHODS = {"GetStatus", "WatchStatus", "ListModels"}
OWN_METHODS = {"ListSessions", "DropSession"}
"""Of Control, and about the caller's own things."""

SERVICES = [
    inference_pb2.DESCRIPTOR.services_by_name["Inference"],
    control_pb2.DESCRIPTOR.services_by_name["Control"],
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
]
METHODS = [f"/{service.full_name}/{method.name}" for service in SERVICES for method in service.methods] + [
    "/edged.v1.Control/NoSuchMethod",
    "/edged.v1.Inference/NoSuchMethod",
    "/no.such.Service/Method",
]
DENIED = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}

LISTENERS = {
    # listener: (scopes, asks for a token, asks for a certificate, speaks TLS)
    "unix": (ALL, False, False, False),
    "unix infer": ({"infer"}, False, False, False),
    "unix status": ({"status"}, False, False, False),
    "unix infer status": ({"infer", "status"}, False, False, False),
    "tcp": (ALL, False, False, False),
    "tcp off host": ({"infer", "status"}, False, False, False),
    "tcp token": (ALL, True, False, False),
    "tls token": (ALL, True, False, True),
    "tls token status": ({"status"}, True, False, True),
    "mtls": ({"infer", "status"}, False, True, True),
    "mtls token": (ALL, True, True, True),
}
TOKENS = {
    # credential: (the header's values, the scopes of the token or None where it is none)
    "nothing": ([], None),
    "all": (["Bearer {all}"], ALL),
    "infer": (["Bearer {infer}"], {"infer"}),
    "status": (["bearer  {status} "], {"status"}),
    "control": (["BEARER {control}"], {"control"}),
    "unknown": (["Bearer edged_unknown"], None),
    "almost": (["Bearer {all}x"], None),
    "name": (["Bearer all"], None),
    "digest": (["Bearer {digest}"], None),
    "basic": (["Basic {all}"], None),
    "bare": (["{all}"], None),
    "empty": (["Bearer "], None),
    "twice": (["Bearer {all}", "Bearer {all}"], None),
}
CERTIFICATES = ("none", "ours", "foreign")


def needed(method):
    """Scope of a method, written down once more and apart from the daemon."""
    service, name = method.strip("/").split("/")
    if service == "edged.v1.Inference" or name in OWN_METHODS:
        return "infer"
    if service == "edged.v1.Control":
        return "status" if name in STATUS_METHODS else "control"
    return None


def expected(listener, token, certificate, method):
    """`in`, `unreachable`, UNAUTHENTICATED or PERMISSION_DENIED."""
    scopes, asks_token, asks_certificate, tls = LISTENERS[listener]
    if tls and asks_certificate and certificate != "ours":
        return "unreachable"
    if asks_token:
        granted = TOKENS[token][1]
        if granted is None:
            return "UNAUTHENTICATED"
        scopes = scopes & granted
    scope = needed(method)
    return "in" if scope is None or scope in scopes else "PERMISSION_DENIED"


def start(folder: Path, listen: dict, **environment: str) -> DaemonProcess:
    configuration = demo_configuration(folder, listen=listen, limits={"concurrent_streams": 64})
    return DaemonProcess(
        configuration, {"FAKE_ENGINE": "{}", **environment}, (str(FAKE_MODEL_DAEMON),), forked=True
    )


@pytest.fixture(scope="module")
def house(demo_model, tmp_path_factory):
    """Addresses of all listeners, the secrets, the authority."""
    folder = tmp_path_factory.mktemp("access")
    ours, foreign = Authority(folder / "ours"), Authority(folder / "foreign", "somebody else")
    certificate, key = ours.issue("server")
    clients = {"ours": ours.issue("robot"), "foreign": foreign.issue("robot")}
    secrets = {name: make_token() for name in ("all", "infer", "status", "control")}
    tokens = folder / "tokens"
    lines = [token_line(name, tuple(sorted(TOKENS[name][1])), secret) for name, secret in secrets.items()]
    tokens.write_text("# tokens\n\n" + "\n".join(lines) + "\n")
    tokens.chmod(0o600)
    secrets["digest"] = lines[0].rsplit(":", 1)[1]
    tls = {"certificate": str(certificate), "key": str(key)}
    mtls = {**tls, "client_ca": str(ours.ca)}
    loopback = {"tcp": "127.0.0.1:0"}
    sockets = [
        {"path": str(folder / name.replace(" ", "-")), "scopes": name.split()[1:]}
        for name in LISTENERS
        if name.startswith("unix ")
    ]
    daemons = {
        "tcp": start(demo_model, {**loopback, "sockets": sockets}),
        "tcp off host": start(
            demo_model,
            {**loopback, "i_accept_off_host_access_without_tls_and_authentication": True},
            FAKE_OFF_HOST="1",
        ),
        "tcp token": start(demo_model, {**loopback, "tokens": str(tokens)}),
        "tls token": start(demo_model, {**loopback, "tokens": str(tokens), "tls": tls}),
        "tls token status": start(
            demo_model, {**loopback, "tokens": str(tokens), "tls": tls, "tcp_scopes": ["status"]}
        ),
        "mtls": start(demo_model, {**loopback, "tls": mtls, "tcp_scopes": ["infer", "status"]}),
        "mtls token": start(demo_model, {**loopback, "tokens": str(tokens), "tls": mtls}),
    }
    try:
        addresses = {}
        for name, daemon in daemons.items():
            daemon.wait_ready()
            with daemon.client() as client:
                addresses[name] = client.status().addresses[-1]
        first = daemons["tcp"]
        addresses["unix"] = first.address
        addresses |= {f"unix {' '.join(s['scopes'])}": f"unix:{s['path']}" for s in sockets}
        yield {
            "addresses": addresses,
            "secrets": secrets,
            "clients": clients,
            "ca": ours.ca,
            "tokens": tokens,
        }
        for daemon in daemons.values():
            assert daemon.stop() == 0, daemon.log()
            log = daemon.log()
            assert "Traceback" not in log, log[max(0, log.index("Traceback") - 500) :][:4000]
            for secret in secrets.values():
                assert secret not in daemon.log()
    finally:
        for daemon in daemons.values():
            daemon.close()


def channel_of(house, listener, certificate):
    address = house["addresses"][listener]
    if not LISTENERS[listener][3]:
        return grpc.insecure_channel(address)
    pair = house["clients"].get(certificate)
    credentials = grpc.ssl_channel_credentials(
        house["ca"].read_bytes(),
        *((pair[1].read_bytes(), pair[0].read_bytes()) if pair else (None, None)),
    )
    return grpc.secure_channel(address, credentials)


def outcome(channel, method, metadata):
    """What a call with an empty request comes to."""
    call = channel.unary_stream(method)(b"", metadata=metadata, timeout=20)
    try:
        next(iter(call))
    except StopIteration:
        return "in"
    except grpc.RpcError as error:
        if error.code() in DENIED:
            return error.code().name
        # Before any call is looked at, the handshake has failed.
        return "unreachable" if error.code() is grpc.StatusCode.UNAVAILABLE else "in"
    finally:
        call.cancel()
    return "in"


@pytest.mark.parametrize("listener", LISTENERS)
def test_every_cell_of_the_matrix(house, listener):
    certificates = CERTIFICATES if LISTENERS[listener][3] else ("none",)
    seen = set()
    for certificate in certificates:
        with channel_of(house, listener, certificate) as channel:
            if expected(listener, "all", certificate, METHODS[0]) == "unreachable":
                with pytest.raises(grpc.FutureTimeoutError):
                    grpc.channel_ready_future(channel).result(0.5)
                seen.add("unreachable")
                continue
            for (token, (headers, _)), method in itertools.product(TOKENS.items(), METHODS):
                metadata = [("authorization", header.format(**house["secrets"])) for header in headers]
                cell = outcome(channel, method, metadata)
                want = expected(listener, token, certificate, method)
                assert cell == want, (listener, certificate, token, method)
                seen.add(cell)
    if LISTENERS[listener][1]:
        assert {"in", "UNAUTHENTICATED", "PERMISSION_DENIED"} <= seen


def test_clear_text_at_a_tls_port_is_nothing(house):
    for listener in ("tls token", "mtls"):
        with grpc.insecure_channel(house["addresses"][listener]) as channel:
            assert outcome(channel, "/grpc.health.v1.Health/Check", []) == "unreachable"


def test_methods_of_all_services_are_known():
    names = {service.full_name for service in SERVICES}
    assert {"edged.v1.Inference", "edged.v1.Control"} <= names
    pool = descriptor_pool.Default()
    assert pool.FindServiceByName("edged.v1.Control") is not None


def test_the_python_client_shows_its_token_and_certificate(house):
    certificate, key = house["clients"]["ours"]
    address = house["addresses"]["mtls token"]
    full = Credentials(
        ca=str(house["ca"]), certificate=certificate, key=str(key), token=house["secrets"]["all"]
    )
    with Client(address, credentials=full) as client:
        assert client.status().version
        assert client.generate([5, 6], max_tokens=2, temperature=0.0, ignore_eos=True).answer().finished
        assert client.wait_ready(10).version
    with (
        Client(address, credentials=Credentials(ca=house["ca"], certificate=certificate, key=key)) as client,
        pytest.raises(UnauthenticatedError, match="authorization: Bearer"),
    ):
        client.status()
    with (
        Client(house["addresses"]["unix infer"]) as client,
        pytest.raises(PermissionDeniedError, match="needs the scope status, and this listener gives infer"),
    ):
        client.status()
    foreign = Credentials(ca=house["clients"]["foreign"][0].parent / "ca.pem", token="x")
    with (
        Client(house["addresses"]["tls token"], credentials=foreign) as client,
        pytest.raises(UnreachableError, match="do not agree on TLS"),
    ):
        client.status()


def test_a_token_never_goes_through_the_network_in_clear_text():
    with pytest.raises(InvalidArgumentError, match="in clear text"):
        Client("192.0.2.1:50051", credentials=Credentials(token="x"))
    Client("127.0.0.1:50051", credentials=Credentials(token="x")).close()


def test_edgectl_takes_them_from_its_command_line(house, tmp_path, monkeypatch, capsys):
    from edged.cli.main import main

    for name in ("EDGED_TLS_CA", "EDGED_TOKEN_FILE", "EDGED_TLS_CERTIFICATE", "EDGED_TLS_KEY"):
        monkeypatch.setenv(name, "")
    token = tmp_path / "token"
    token.write_text(house["secrets"]["all"] + "\n")
    address = house["addresses"]["tls token"]
    words = ["status", "--address", address, "--tls-ca", str(house["ca"])]
    assert main(words) == 3
    assert "authorization" in capsys.readouterr().err
    assert main([*words, "--token-file", str(token)]) == 0
    assert "serving" in capsys.readouterr().out
    token.write_text("two tokens\n")
    assert main([*words, "--token-file", str(token)]) != 0
    assert "one token and nothing else" in capsys.readouterr().err


def test_edgectl_makes_tokens(tmp_path, capsys):
    from edged.cli.main import main
    from edged.server.tokens import TokenFile

    assert main(["token", "robot", "--scopes", "infer", "-o", str(tmp_path / "t")]) == 0
    line = capsys.readouterr().out
    assert (tmp_path / "t").stat().st_mode & 0o777 == 0o600
    file = tmp_path / "tokens"
    file.write_text(line)
    tokens = TokenFile(file)
    tokens.check()
    found = tokens.find((tmp_path / "t").read_text().strip())
    assert (found.name, found.scopes) == ("robot", frozenset({"infer"}))
    assert main(["token", "robot", "--scopes", "all"]) == 64
    assert main(["token", "a b"]) == 64
