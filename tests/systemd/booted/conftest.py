"""The service as the Debian package installs it, under the systemd of a booted container (run_booted.sh)."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import time
from pathlib import Path

import pytest
import yaml

if "EDGED_BOOTED" not in os.environ:
    collect_ignore_glob = ["test_*.py"]

LOAD_SECONDS = 6.0
SOURCE = Path("/srv/edged")
MODEL = SOURCE / ".cache/booted/model"
CONFIG = Path("/etc/edged/edged.yaml")
TORCH = Path("/opt/edged/lib/python3.11/site-packages/zz-torch.pth")
"""The tested package has no torch; this shows it the environment's."""


def run(*words, check=True, timeout=300):
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, check=False)
    if check and done.returncode:
        raise AssertionError(f"{' '.join(map(str, words))}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done


class Service:
    """The service, asked through systemctl and its own client."""

    def show(self, name):
        return run("systemctl", "show", "--property", name, "--value", "edged").stdout.strip()

    slowness = 0.0
    """Seconds that this machine takes longer than an idle one to load the model."""

    def start(self):
        self.configure()
        run("systemctl", "reset-failed", "edged", check=False)
        began = time.monotonic()
        run("systemctl", "start", "edged")
        self.slowness = max(self.slowness, time.monotonic() - began - LOAD_SECONDS)

    @property
    def back_seconds(self):
        """Within this time a service that was ended is back: 20 s, where loading takes a few of them."""
        return 20 + 2 * max(0.0, self.slowness)

    def wait_status(self, text, seconds=20):
        """Wait until systemd's status line holds ``text`` and the unit is active."""
        end = time.monotonic() + seconds + self.back_seconds
        while text not in self.show("StatusText") or self.show("ActiveState") != "active":
            assert time.monotonic() < end, (self.show("StatusText"), self.show("ActiveState"))
            time.sleep(0.1)

    def stop(self, **options):
        return run("systemctl", "stop", "edged", **options)

    def configure(self, **changes):
        configuration = {
            "listen": {"unix": "/run/edged/edged.sock", "tcp": "127.0.0.1:50051"},
            "models": [
                {
                    "name": "smollm",
                    "path": str(MODEL),
                    "context_length": 512,
                    "max_sequences": 2,
                    "threads": 1,
                }
            ],
            "drain_timeout": "5min",
            **changes,
        }
        CONFIG.write_text(yaml.safe_dump(configuration))

    def edgectl(self, *words, user="root", check=True):
        return run("runuser", "-u", user, "--", "edgectl", *words, check=check)

    def status(self):
        return json.loads(self.edgectl("status", "--json").stdout)

    def journal(self):
        lines = run("journalctl", "--unit", "edged", "--output", "json", "--no-pager").stdout.splitlines()
        return [json.loads(line).get("MESSAGE") or "" for line in lines]

    def wait_serving(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            done = self.edgectl("status", check=False)
            if done.returncode == 0 and self.show("ActiveState") == "active":
                return
            time.sleep(0.1)
        raise AssertionError(
            f"not serving after {seconds} s: {done.stdout}{done.stderr}{self.journal()[-20:]}"
        )


@pytest.fixture(scope="session")
def package():
    """The package, installed as an administrator would."""
    (file,) = (SOURCE / ".cache/booted").glob("*.deb")
    run("dpkg", "--install", file)
    site = next(Path("/opt/edged/lib").glob("python3.*")) / "site-packages"
    global TORCH  # noqa: PLW0603 - the interpreter's version is known here
    TORCH = site / "zz-torch.pth"
    TORCH.write_text(f"{SOURCE}/.venv/lib/{site.parent.name}/site-packages\n")
    run("useradd", "--create-home", "stranger")
    run("useradd", "--create-home", "--groups", "edged", "friend")
    assert pwd.getpwnam("edged").pw_uid
    return file


@pytest.fixture
def torch_file():
    return TORCH


@pytest.fixture(scope="session")
def service(package):
    return Service()


@pytest.fixture
def running(service):
    """The service, serving."""
    if service.show("ActiveState") != "active":
        service.start()
    service.wait_serving(30 + service.back_seconds)
    return service
