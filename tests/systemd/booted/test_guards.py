"""Keys, groups and time limits that only systemd can give, as the Debian package's unit has them."""

from __future__ import annotations

import stat
import tarfile
from pathlib import Path

import pytest
from conftest import run
from fixtures.pki import Authority

from edged.client import Client, Credentials
from edged.errors import UnauthenticatedError
from edged.server.tokens import make_token, token_line

ADDRESS = "127.0.0.1:50051"
STORE = Path("/etc/credstore")
GIVEN = Path("/run/credentials/edged.service")


@pytest.fixture
def robots():
    """A group of its own that the service belongs to, and a user of it who is not in the service's."""
    run("groupadd", "robots")
    run("useradd", "--create-home", "--groups", "robots", "robot")
    run("usermod", "--append", "--groups", "robots", "edged")
    yield "robots"
    run("gpasswd", "--delete", "edged", "robots")


def test_keys_come_from_the_credential_store_and_a_socket_goes_to_another_group(service, robots, tmp_path):
    authority, secret = Authority(tmp_path / "pki"), make_token()
    certificate, key = authority.issue("server")
    STORE.mkdir(mode=0o700, exist_ok=True)
    for name, content in (
        ("edged.tls.key", key.read_text()),
        ("edged.tokens", token_line("robot", ("infer", "status"), secret) + "\n"),
    ):
        (STORE / name).touch(mode=0o600)
        (STORE / name).write_text(content)
    shown = Path("/etc/edged/tls.crt")
    shown.write_bytes(certificate.read_bytes())
    shown.chmod(0o644)
    path = "/run/edged/robots.sock"
    service.stop()
    service.configure(
        listen={
            "unix": "/run/edged/edged.sock",
            "tcp": ADDRESS,
            "tls": {"certificate": str(shown), "key": str(GIVEN / "edged.tls.key")},
            "tokens": str(GIVEN / "edged.tokens"),
            "sockets": [{"path": path, "group": robots, "scopes": ["infer"]}],
        }
    )
    run("systemctl", "start", "edged")
    for name in ("edged.tls.key", "edged.tokens"):
        assert stat.S_IMODE((GIVEN / name).stat().st_mode) & 0o077 == 0
        assert run("runuser", "-u", "friend", "--", "cat", GIVEN / name, check=False).returncode
    with Client(ADDRESS, credentials=Credentials(ca=authority.ca, token=secret)) as client:
        assert client.generate("Hello", max_tokens=2, temperature=0.0, ignore_eos=True).answer().finished
    with (
        Client(ADDRESS, credentials=Credentials(ca=authority.ca)) as client,
        pytest.raises(UnauthenticatedError),
    ):
        client.status()
    socket = Path(path)
    assert (socket.owner(), socket.group(), stat.S_IMODE(socket.stat().st_mode)) == ("edged", robots, 0o660)
    words = ["generate", "Hello", "-n", "2", "-t", "0", "--address", f"unix:{path}"]
    assert service.edgectl(*words, user="robot").stdout
    assert service.edgectl(*words, user="stranger", check=False).returncode
    refused = service.edgectl("status", "--address", f"unix:{path}", user="robot", check=False)
    assert "needs the scope status" in refused.stderr
    main = service.edgectl("status", "--address", "unix:/run/edged/edged.sock", user="robot", check=False)
    assert "join the group" in main.stderr
    for name in ("edged.tls.key", "edged.tokens"):
        (STORE / name).unlink()
    service.stop()
    service.configure()


def test_the_support_bundle_has_the_unit_and_its_journal_and_no_secret(service, tmp_path):
    tokens, secret, prompt = Path("/etc/edged/tokens"), make_token(), "zebra-crossing"
    tokens.write_text(token_line("robot", ("infer",), secret) + "\n")
    tokens.chmod(0o640)
    run("chgrp", "edged", tokens)
    service.stop()
    service.configure(
        listen={"unix": "/run/edged/edged.sock", "tcp": ADDRESS, "tokens": str(tokens)},
        metrics={"listen": "unix:/run/edged/metrics.sock"},
        log={"level": "debug"},
    )
    run("systemctl", "start", "edged")
    with Client(ADDRESS, credentials=Credentials(token=secret)) as client:
        assert client.generate(prompt, max_tokens=2, temperature=0.0).answer().finished
    place = tmp_path / "bundle.tar.gz"
    service.edgectl("support-bundle", "-o", place)
    with tarfile.open(place) as archive:
        files = {member.name: archive.extractfile(member).read().decode() for member in archive.getmembers()}
    text = "\n".join(files.values())
    for wanted in (
        "ExecStart=/opt/edged/bin/edged",
        "first_token_seconds",
        "edged_state",
        '"state": "serving"',
    ):
        assert wanted in text, wanted
    for hidden in (secret, prompt, tokens.read_text().rsplit(":", 1)[1].strip()):
        assert hidden not in text
    tokens.unlink()
    service.stop()
    service.configure()


def test_a_load_longer_than_the_units_start_timeout_is_waited_for(service):
    drop_in = Path("/etc/systemd/system/edged.service.d/99-impatient.conf")
    drop_in.parent.mkdir(parents=True, exist_ok=True)
    drop_in.write_text("[Service]\nTimeoutStartSec=2s\n")  # the interpreter alone takes one
    service.stop()
    try:
        run("systemctl", "daemon-reload")
        service.start()
        assert service.show("TimeoutStartUSec") == "2s"
        assert service.show("Result") == "success"
        taken = int(service.show("ActiveEnterTimestampMonotonic")) - int(
            service.show("InactiveExitTimestampMonotonic")
        )
        assert taken > 2_000_000, "the load was too short to show anything"
    finally:
        drop_in.unlink()
        run("systemctl", "daemon-reload")
        service.stop()
