"""``edgectl doctor``: what it finds on this machine and in a broken configuration, each with its remedy."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from edged.cli import checks, machine
from edged.cli import requirements as packages
from edged.cli.exit_codes import ExitCode
from edged.cli.machine import TorchProbe, meminfo, probe_torch
from edged.cli.needs import Needs
from edged.config import ModelConfig


def findings(edgectl, *arguments, **options):
    result = edgectl("doctor", "--json", *arguments, **options)
    content = json.loads(result.out)
    assert content["ok"] == (result.code == 0)
    assert result.code in (0, ExitCode.NO)
    for finding in content["findings"]:
        assert finding["level"] in ("ok", "note", "warn", "FAIL")
        assert finding["remedy"] or finding["level"] in ("ok", "note")
    return {finding["check"]: finding for finding in content["findings"]}


def test_this_machine_is_well(edgectl):
    found = findings(edgectl)
    assert found["python"]["level"] == found["packages"]["level"] == found["torch"]["level"] == "ok"
    assert metadata.version("torch") in found["torch"]["found"]
    assert found["daemon"]["level"] == "note"
    assert found["socket"]["level"] == "ok"


def test_the_verdict_is_the_last_line(well):
    result = well("doctor")
    assert result.code == 0
    assert result.out.splitlines()[-1] in (
        "all is well",
        *(f"nothing failed; {n} warnings" for n in range(9)),
    )


@pytest.fixture
def well(edgectl_here, monkeypatch):
    """edgectl where torch is well, which takes seconds to find out."""
    monkeypatch.setattr(checks, "probe_torch", lambda: TorchProbe(facts()))
    return edgectl_here


def facts(**changes):
    """What the probe of a healthy torch on a machine without a GPU says."""
    return {
        "version": "2.13.0",
        "built_for_cuda": "13.0",
        "gpus": [],
        "cpu": "AVX2",
        "threads": 2,
        "right": True,
        **changes,
    }


def test_an_address_that_was_named_has_to_answer(well, tmp_path):
    found = findings(well, "--address", tmp_path / "none.sock")
    assert found["daemon"]["level"] == "FAIL"
    assert "there is no such socket" in found["daemon"]["found"]


def test_the_daemon_is_looked_for_at_the_socket_of_the_configuration(well, daemon, demo_model, tmp_path):
    text = f"models: [{{name: a, path: {demo_model}}}]\nlisten: {{unix: %s}}\n"
    (tmp_path / "edged.yaml").write_text(text % daemon.socket)
    found = findings(well, "--config", "edged.yaml")
    assert found["daemon"]["level"] == "ok"
    assert str(daemon.socket) in found["daemon"]["found"]
    (tmp_path / "edged.yaml").write_text(text % (tmp_path / "none.sock"))
    found = findings(well, "--config", "edged.yaml")
    assert found["daemon"]["level"] == "note"
    assert f"{tmp_path}/none.sock: there is no such socket" in found["daemon"]["found"]


def test_a_refused_configuration_has_a_finding_for_each_fault(well, tmp_path):
    (tmp_path / "edged.yaml").write_text("models: [{name: a, path: b, dtype: f8}]\nmemory: {budget: 1}\n")
    result = well("doctor", "--config", "edged.yaml")
    assert result.code == ExitCode.NO
    assert "edged.yaml:1:36: models[0].dtype: found 'f8'" in result.out
    assert "-> write one of float32, bfloat16, float16" in result.out
    assert "-> write it with a unit, such as 1MiB" in result.out
    assert result.out.splitlines()[-1].startswith("2 of ")


def test_a_model_folder_that_is_not_there_or_empty(well, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "edged.yaml").write_text("models: [{name: a, path: none}, {name: b, path: empty}]\n")
    found = findings(well, "--config", "edged.yaml")
    assert found["configuration"]["level"] == "ok"
    assert found["model a"]["level"] == found["model b"]["level"] == "FAIL"
    assert f"there is no folder {tmp_path}/none" in found["model a"]["found"]
    assert "edgectl import" in found["model a"]["remedy"]
    assert "config.json" in found["model b"]["found"]


def test_budget_and_context_of_the_demo_model(well, demo_model, tmp_path):
    model = f"{{name: a, path: {demo_model}, context_length: 16384}}"
    (tmp_path / "edged.yaml").write_text(f"models: [{model}]\nmemory: {{budget: 1GiB}}\n")
    found = findings(well, "--config", "edged.yaml")
    assert found["model a"]["level"] == "warn"
    assert "16384 is above the 8192 it was trained for" in found["model a"]["found"]
    assert found["budget"]["level"] == "FAIL"
    assert "more than the budget" in found["budget"]["found"]


def test_a_model_on_a_gpu_needs_one(well, demo_model, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "has_nvidia_device", lambda: False)
    (tmp_path / "edged.yaml").write_text(f"models: [{{name: a, path: {demo_model}, device: cuda}}]\n")
    found = findings(well, "--config", "edged.yaml")
    assert found["gpu"]["level"] == "FAIL"
    assert "device: cpu" in found["gpu"]["remedy"]


# What no test machine has: the checks on facts that are given to them.


GPU = ["NVIDIA RTX A4000", [8, 6], 16 * 2**30]


@pytest.mark.parametrize(
    ("probe", "device", "wants_gpu", "expected"),
    [
        (TorchProbe({}, "ImportError: libtorch.so"), False, False, (["FAIL"], "ImportError: libtorch.so")),
        (TorchProbe(facts(right=False)), False, False, (["FAIL"], "a matrix product is wrong")),
        (TorchProbe(facts()), False, False, (["ok", "note"], "none; models run on the CPU")),
        (TorchProbe(facts()), True, False, (["ok", "warn"], "torch (CUDA 13.0) cannot use it")),
        (TorchProbe(facts()), True, True, (["ok", "FAIL"], "torch (CUDA 13.0) cannot use it")),
        (TorchProbe(facts(built_for_cuda=None)), True, False, (["ok", "warn"], "built for the CPU alone")),
        (TorchProbe(facts(gpus=[GPU])), True, True, (["ok", "ok"], "NVIDIA RTX A4000 (sm_86, 16.00 GiB)")),
        (TorchProbe(facts(gpus=[["GTX 1080", [6, 1], 8 * 2**30]])), True, True, (["ok", "FAIL"], "sm_61")),
    ],
)
def test_torch_and_gpu(monkeypatch, probe, device, wants_gpu, expected):
    monkeypatch.setattr(checks, "probe_torch", lambda: probe)
    monkeypatch.setattr(checks, "has_nvidia_device", lambda: device)
    levels, text = expected
    found = list(checks.check_torch(Needs(gpu=wants_gpu, torch=True, torch_gpu=wants_gpu, known=True)))
    assert [finding.level for finding in found] == levels
    assert text in found[-1].found


TORCH_MODEL = ModelConfig(name="a", path=Path("a"))
ENGINE = ModelConfig(name="b", path=Path("b"), executor="tensorrt", device="cuda")


@pytest.mark.parametrize(
    ("models", "tensorrt", "level", "text"),
    [
        ([TORCH_MODEL], True, "FAIL", "a model runs on it"),
        ([TORCH_MODEL, ENGINE], True, "FAIL", "a model runs on it"),
        ([ENGINE], True, "ok", "needs none"),
        (None, True, "note", "models need executor: tensorrt"),
        (None, False, "FAIL", "no model can run"),
    ],
)
def test_torch_may_be_missing_where_no_model_needs_it(monkeypatch, models, tensorrt, level, text):
    monkeypatch.setattr(checks, "probe_torch", lambda: TorchProbe({}, "No module named 'torch'"))
    monkeypatch.setattr(checks, "find_spec", lambda _name: object() if tensorrt else None)
    (found,) = checks.check_torch(Needs() if models is None else Needs.of(models))
    assert found.level == level
    assert text in found.found
    assert found.remedy or level != "FAIL"


def test_a_torch_for_the_cpu_alone_does_not_matter_to_tensorrt(monkeypatch):
    monkeypatch.setattr(checks, "probe_torch", lambda: TorchProbe(facts(built_for_cuda=None)))
    monkeypatch.setattr(checks, "has_nvidia_device", lambda: True)
    assert [found.level for found in checks.check_torch(Needs.of([ENGINE]))] == ["ok"]
    assert [found.level for found in checks.check_torch(Needs.of([TORCH_MODEL]))] == ["ok", "warn"]
    monkeypatch.setattr(checks, "probe_torch", lambda: TorchProbe({}, "ImportError: libtorch.so"))
    assert [found.level for found in checks.check_torch(Needs.of([ENGINE]))] == ["warn"]


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("import os; os.kill(os.getpid(), 4)", "ends the process with signal 4"),
        ("raise ImportError('libtorch.so: cannot open')", "ImportError: libtorch.so: cannot open"),
        ("print('Welcome!')", "it says nothing that can be read"),
        ("pass", "it says nothing that can be read"),
        ("import time; time.sleep(60)", "longer than 1 s"),
    ],
)
def test_a_torch_that_does_not_run(monkeypatch, script, problem):
    monkeypatch.setattr(machine, "_TORCH_PROBE", script)
    monkeypatch.setattr(machine, "_TORCH_SECONDS", 1.0 if "sleep" in script else 60.0)
    assert problem in probe_torch().problem


@pytest.mark.parametrize(
    ("installed", "wanted", "satisfied"),
    [
        ("2.4.0", ">=2.4", True),
        ("2.13.0+cpu", ">=2.4", True),
        ("2.3.9", ">=2.4", False),
        ("", ">=2.4", False),
        ("", "", False),
        ("1", "", True),
        ("3.0", ">=2,<3", False),
        ("2.9rc1", ">=2,<3", True),
        ("0.1.2", "==0.1.2", True),
        ("0.1.3", "==0.1.2", False),
        ("1.5", "!=1.5", False),
        ("1.5", "~=1.4", True),  # a comparison that edged does not use is not judged
    ],
)
def test_versions(installed, wanted, satisfied):
    assert packages.Requirement("x", wanted, "", installed).satisfied is satisfied


def test_missing_packages_are_named(monkeypatch):
    lines = ["grpcio>=1.66", "nonsuch-package >=2", "gguf>=999", "pytest>=8; extra == 'test'"]
    monkeypatch.setattr(metadata, "requires", lambda _name: lines)
    found = list(checks.check_packages())
    assert [finding.level for finding in found] == ["FAIL", "FAIL"]
    assert "nonsuch-package is not installed, edged wants >=2" in found[0].found
    assert found[0].remedy == "run: pip install 'nonsuch-package>=2'"
    assert "edged wants >=999" in found[1].found


def test_meminfo(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(
        "MemTotal:  100 kB\nHugePages_Total:  3\nbroken\nEmpty:\nX: y kB\n"
    )
    assert meminfo(tmp_path) == {"MemTotal": 102400, "HugePages_Total": 3}
    assert meminfo(tmp_path / "nowhere") == {}
