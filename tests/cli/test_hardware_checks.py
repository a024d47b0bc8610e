"""What the doctor says of boards, drivers, credentials and the service, and the bundle that keeps secrets to itself."""

from __future__ import annotations

import json
import os
import tarfile

import pytest
from fixtures.boards import orin, write
from fixtures.pki import Authority

from edged.cli import hardware_checks, service_checks
from edged.cli.checks import FAILURE, NOTE, OK, WARNING
from edged.cli.main import main
from edged.cli.needs import Needs
from edged.cli.support_bundle import without_secrets
from edged.config import ListenConfig, SocketConfig, TlsConfig
from edged.errors import InvalidArgumentError
from edged.server.tokens import make_token, token_line


@pytest.fixture
def no_processes(monkeypatch):
    """What the probes of CUDA, TensorRT and PyCUDA say, without starting them."""
    said = {"cuda": ('{"code": 0, "version": 12060}', ""), "module": ("10.3.0", "")}

    def run(_code, *arguments):
        return said["module" if arguments else "cuda"]

    monkeypatch.setattr(hardware_checks, "_run", run)
    return said


def findings(root, *, wants_gpu=False):
    found = list(hardware_checks.check_hardware(Needs(gpu=wants_gpu), root=root))
    for finding in found:
        assert finding.remedy or finding.level in (OK, NOTE), finding
    return {(finding.check, finding.level): f"{finding.found} -> {finding.remedy}" for finding in found}


NODES = {f"dev/{name}": "" for name in ("nvmap", "nvgpu/igpu0/ctrl", "nvhost-gpu")}


def test_a_sound_orin(tmp_path, no_processes):
    found = findings(write(tmp_path, orin() | NODES), wants_gpu=True)
    assert {level for _, level in found} <= {OK, NOTE}
    assert "AGX Orin 64GB, L4T 36.4.3, JetPack 6.2" in found["board", OK]
    assert found["power mode", OK].startswith("MAXN")
    assert "jetson_clocks" in found["clocks", NOTE]
    assert "CUDA 12.6" in found["cuda", OK]


@pytest.mark.parametrize(
    ("files", "key", "words"),
    [
        (orin(jetpack="6.2.1"), ("board", WARNING), "drop_caches"),
        (orin(celsius=97), ("heat", WARNING), "2 °C below throttling"),
        (orin(mode=2), ("power mode", NOTE), "MODE_30W"),
        (orin(events=(4, 0, 9)), ("power", WARNING), "4 x under voltage"),
        (orin() | {"proc/swaps": "/dev/zram0 partition 1 0 5\n"}, ("swap", NOTE), "nvzramconfig"),
        (
            orin() | {"etc/nv_tegra_release": "# R35 (release), REVISION: 4.1, GCID: 1\n"},
            ("board", FAILURE),
            "JetPack 6 or later",
        ),
    ],
)
def test_what_is_wrong_with_a_board_has_a_remedy(tmp_path, no_processes, files, key, words):
    assert words in findings(write(tmp_path, files | NODES))[key]


def test_a_board_without_its_driver(tmp_path, no_processes):
    assert "/dev/nvmap is missing" in findings(write(tmp_path, orin()))["driver", FAILURE]


def test_a_desktop_without_uvm_and_one_without_a_driver(tmp_path, no_processes):
    files = {
        "dev/nvidia0": "",
        "dev/nvidiactl": "",
        "proc/driver/nvidia/version": "NVRM version: NVIDIA 580\n",
    }
    found = findings(write(tmp_path / "a", files), wants_gpu=True)
    assert "modprobe nvidia-uvm" in found["device nodes", FAILURE]
    assert "580" in found["driver", OK]
    assert "ubuntu-drivers" in findings(tmp_path / "b", wants_gpu=True)["driver", FAILURE]
    assert ("driver", NOTE) in findings(tmp_path / "b")


@pytest.mark.parametrize("code", [100, 304, 803, 999, 12345])
def test_every_way_that_cuda_fails_has_a_remedy(no_processes, code):
    no_processes["cuda"] = (json.dumps({"code": code, "version": 13020}), "")
    (finding,) = hardware_checks.check_cuda(wants_gpu=True)
    assert (finding.level, str(code) in finding.found) == (FAILURE, True)
    assert finding.remedy


def test_missing_packages_are_notes_until_a_model_needs_them(no_processes):
    no_processes["module"] = ("", "ModuleNotFoundError: No module named 'pycuda'")
    assert hardware_checks.check_module("pycuda", "x", wanted=False).level == NOTE
    assert hardware_checks.check_module("pycuda", "x", wanted=True).level == FAILURE
    no_processes["module"] = ("", "ImportError: libcudart.so.12: cannot open")
    assert hardware_checks.check_module("pycuda", "x", wanted=False).level == WARNING


@pytest.mark.parametrize("other", ["", "No module named 'tensorrt_rtx'", "OSError: libtensorrt_rtx.so.1"])
def test_tensorrt_for_rtx_is_a_tensorrt(monkeypatch, other):
    said = {"tensorrt": "No module named 'tensorrt'", "tensorrt_rtx": other}
    monkeypatch.setattr(hardware_checks, "_run", lambda _code, module: ("1.7", said[module]))
    found = hardware_checks.check_module("tensorrt", "x", wanted=True)
    assert found.level == (FAILURE if other else OK)
    assert found.check == ("tensorrt" if "No module" in other else "tensorrt_rtx")


def test_the_probes_end_well_on_this_machine():
    assert list(hardware_checks.check_cuda(wants_gpu=False))
    assert hardware_checks.check_module("json", "x", wanted=False).level == OK


@pytest.mark.skipif(os.geteuid() == 0, reason="root may use every node")
def test_closed_nodes_name_the_groups(tmp_path, no_processes):
    root = write(tmp_path, orin() | NODES)
    (root / "dev/nvmap").chmod(0)
    assert "usermod -aG" in findings(root)["device nodes", WARNING]


@pytest.mark.parametrize(("days", "level"), [(90, OK), (10, WARNING), (-1, FAILURE)])
def test_certificates_that_end(tmp_path, days, level):
    certificate, key = Authority(tmp_path).issue("server", days=days)
    (finding,) = service_checks.check_listen(ListenConfig(tcp="127.0.0.1:1", tls=TlsConfig(certificate, key)))
    assert finding.level == level
    key.chmod(0o644)
    assert (
        "chmod o-rwx"
        in list(
            service_checks.check_listen(ListenConfig(tcp="127.0.0.1:1", tls=TlsConfig(certificate, key)))
        )[-1].remedy
    )


def test_faulty_credentials_and_sockets(tmp_path):
    listen = ListenConfig(
        tcp="0.0.0.0:1",
        tls=TlsConfig(tmp_path / "none", tmp_path / "none"),
        tokens=tmp_path / "none",
        sockets=(SocketConfig(tmp_path / "no" / "s", owner="nobody-here", group="no-group"),),
        i_accept_off_host_access_without_tls_and_authentication=True,
    )
    found = list(service_checks.check_listen(listen))
    assert [finding.check for finding in found] == [
        "certificate", "tokens", "access", "socket", "socket", "socket",
    ]  # fmt: skip
    assert all(finding.remedy for finding in found)


@pytest.mark.parametrize(
    ("properties", "level"),
    [
        (
            "LoadState=loaded\nActiveState=failed\nSubState=failed\nResult=exit-code\nStatusText=the engine ended\n",
            FAILURE,
        ),
        (
            "LoadState=loaded\nActiveState=active\nSubState=running\nNRestarts=3\nUnitFileState=enabled\n",
            WARNING,
        ),
        (
            "LoadState=loaded\nActiveState=active\nSubState=running\nNRestarts=0\nUnitFileState=disabled\n",
            NOTE,
        ),
        ("LoadState=loaded\nActiveState=active\nSubState=running\nNRestarts=0\nUnitFileState=enabled\n", OK),
        ("LoadState=not-found\nActiveState=inactive\n", NOTE),
    ],
)
def test_the_service_as_systemd_has_it(tmp_path, monkeypatch, properties, level):
    program = tmp_path / "systemctl"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{properties}END\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (finding,) = service_checks.check_unit()
    assert finding.level == level
    assert finding.remedy or level == OK


def test_the_bundle_has_everything_but_secrets_and_prompts(start_daemon, tmp_path, capsys):
    secret, prompt = make_token(), "zebra-crossing-prompt"
    tokens = tmp_path / "tokens"
    tokens.write_text(token_line("robot", ("infer", "status"), secret) + "\n")
    tokens.chmod(0o600)
    certificate, key = Authority(tmp_path / "pki").issue("server")
    daemon = start_daemon(
        fake={},
        listen={
            "tcp": "127.0.0.1:0",
            "tokens": str(tokens),
            "tls": {"certificate": str(certificate), "key": str(key)},
        },
        metrics={"listen": "127.0.0.1:0"},
    )
    with daemon.client() as client:
        with pytest.raises(
            InvalidArgumentError
        ):  # the fake model has few tokens; the prompt was there all the same
            client.generate(prompt, max_tokens=2).answer()
        client.generate([5, 6], max_tokens=2, temperature=0.0, ignore_eos=True).answer()
    place = tmp_path / "bundle.tar.gz"
    words = ["support-bundle", "-o", str(place), "-f", str(daemon.config_file), "--address", daemon.address]
    assert main(words) == 0
    assert str(place) in capsys.readouterr().out
    assert place.stat().st_mode & 0o777 == 0o600
    with tarfile.open(place) as archive:
        files = {
            member.name.removeprefix("edged-support/"): archive.extractfile(member).read().decode()
            for member in archive.getmembers()
        }
    assert json.loads(files["status.json"])["state"] == "serving"
    assert json.loads(files["configuration.json"])["listen"]["tokens"] == str(tokens)
    assert "weights" in files["ledger.txt"]
    assert "edged_requests_finished_total" in files["metrics.txt"]
    assert isinstance(json.loads(files["doctor.json"]), list)
    digest = tokens.read_text().rsplit(":", 1)[1].strip()
    for name, text in files.items():
        for hidden in (secret, digest, prompt, key.read_text().splitlines()[1]):
            assert hidden not in text, name
    assert daemon.stop() == 0


def test_a_bundle_without_a_daemon_says_what_it_lacks(tmp_path, monkeypatch, capsys):
    place = tmp_path / "b.tgz"
    monkeypatch.setattr("edged.cli.doctor.examine", lambda *_: [])
    words = ["-o", str(place), "-f", str(tmp_path / "none"), "--address", f"unix:{tmp_path}/s"]
    assert main(["support-bundle", *words]) == 0
    with tarfile.open(place) as archive:
        text = archive.extractfile("edged-support/status.json").read().decode()
    assert "not available: UnreachableError" in text


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("authorization: Bearer abc.def-ghi", "abc.def"),
        ("HF_TOKEN=hf_abcdefgh1234", "hf_abc"),
        ('"api_key": "sk-12345678"', "sk-1234"),
        ("password: hunter22", "hunter22"),
        ("-----BEGIN EC PRIVATE KEY-----\nMHcCAQEE\n-----END EC PRIVATE KEY-----", "MHcCAQEE"),
        ("-----BEGIN PRIVATE KEY-----\nMHcCAQEE", "MHcCAQEE"),
        ("robot infer sha256:" + "a" * 64, "a" * 64),
        ("proxy http://user:secret@host:3128", "secret"),
    ],
)
def test_secrets_are_cut_out(text, hidden):
    assert hidden not in without_secrets(text)


def test_every_token_is_cut_out():
    for _ in range(100):
        assert "edged_" not in without_secrets(f"it was {make_token()}")


def test_paths_and_counts_stay():
    assert (
        without_secrets("edged_certificate_expiry_timestamp_seconds 1.0")
        == "edged_certificate_expiry_timestamp_seconds 1.0"
    )
    text = '{"tokens": "/etc/edged/tokens", "generated_tokens": 12345678, "key": "/etc/edged/tls.key"}'
    assert without_secrets(text) == text
