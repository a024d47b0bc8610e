"""``edgectl build`` and ``edgectl engines``, from a model folder to an engine in the cache."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fixtures.children import run_where_nothing_can_be_written
from small_models import model_folder
from tensorrt_case import fake_module, tensorrt_rtx

from edged.cli.exit_codes import ExitCode
from edged.cli.main import main
from edged.config import ModelConfig
from edged.engine import provision, targets
from edged.engine.entries import PLAN
from edged.engine.planned import planned_context_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    Edgectl = Callable[..., tuple[int, str, str]]


HERE = Path(__file__).resolve().parent
RUN = "from edged.cli.main import main; raise SystemExit(main())"


@pytest.fixture
def edgectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Edgectl:
    monkeypatch.setenv("EDGED_CACHE", str(tmp_path / "cache"))
    for module in (provision, targets):
        monkeypatch.setattr(module, "find_gpu", lambda: None)

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


def test_an_engine_from_the_command_line_to_its_removal(edgectl: Edgectl, tmp_path: Path) -> None:
    tensorrt_rtx()
    model = model_folder(tmp_path / "model")
    code, out, _ = edgectl("build", model, "--target", "sm89", "-t", "86", "--json")
    assert code == ExitCode.DONE
    (engine,) = json.loads(out)["engines"]
    assert engine["built"]
    assert engine["key"]["targets"] == "sm86 sm89"
    assert engine["key"]["driver"] == "none"
    assert engine["activation_bytes"]["prefill"] > 0

    config = ModelConfig("model", model, dtype="bfloat16", executor="tensorrt", device="cuda")
    cache = tmp_path / "cache" / "engines"
    assert planned_context_bytes(config, cache) == engine["activation_bytes"]["prefill"]
    assert planned_context_bytes(replace(config, dtype="float16"), cache) is None

    # A part of it is there already.
    code, out, _ = edgectl("build", model, "--target", "sm89")
    assert (code, out.splitlines()[0].startswith("model: found, nothing to build")) == (0, True)
    assert out.splitlines()[1] == engine["folder"]

    code, out, _ = edgectl("engines", "--json")
    (listed,) = json.loads(out)["engines"]
    assert (listed["label"], listed["state"], listed["fault"]) == ("model", "unchecked", "")
    code, out, _ = edgectl("engines", "list")
    assert "sm86 sm89" in out
    assert edgectl("engines", "verify")[0] == ExitCode.DONE

    plan = tmp_path / "cache" / "engines" / listed["engine"] / PLAN
    plan.write_bytes(plan.read_bytes()[:-1] + b"?")
    code, out, _ = edgectl("engines", "verify")
    assert code == ExitCode.NO
    assert "1 damaged" in out
    code, out, _ = edgectl("build", model, "--target", "sm89", "--json")
    assert json.loads(out)["engines"][0]["built"]

    code, out, _ = edgectl("engines", "prune", "--limit", "1B", "--json")
    assert len(json.loads(out)["removed"]) >= 1
    assert json.loads(edgectl("engines", "--json")[1])["engines"] == []


def test_the_models_of_a_configuration_that_run_on_tensorrt_are_built(
    edgectl: Edgectl, tmp_path: Path
) -> None:
    tensorrt_rtx()
    model_folder(tmp_path / "one")
    (tmp_path / "edged.yaml").write_text(
        "models:\n"
        "  - {name: first, path: one, executor: tensorrt, device: cuda, dtype: float16, prefill_chunk: 128}\n"
        "  - {name: second, path: one}\n"
    )
    code, out, _ = edgectl("build", "--config", tmp_path / "edged.yaml", "-t", "sm120", "--json")
    assert code == ExitCode.DONE
    (engine,) = json.loads(out)["engines"]
    assert (engine["model"], engine["key"]["dtype"]) == ("first", "float16")
    assert "tokens=(1, 144, 144)" in engine["key"]["shapes"]

    code, _, err = edgectl("build", "--config", tmp_path / "edged.yaml", "-t", "sm120", "-m", "second")
    assert code == ExitCode.FILE
    assert "model second: dtype float32: executor tensorrt takes float16 or bfloat16" in err
    code, _, err = edgectl("build", "--config", tmp_path / "edged.yaml", "-t", "sm120", "-m", "third")
    assert "there is no model 'third' in the configuration; it has first, second" in err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["MODEL"], ExitCode.NO, "so name what to build for: --target with one of sm80, sm86, sm89"),
        (["MODEL", "-t", "orin"], ExitCode.USAGE, "target 'orin': write a compute capability"),
        (["MODEL", "-t", "sm89", "--refit"], ExitCode.NO, "built on the machine whose GPU is to run it"),
        (["MODEL", "-t", "sm87"], ExitCode.NO, "build there on the machine itself with plain TensorRT"),
        (
            ["MODEL", "-t", "sm89", "-d", "float32"],
            ExitCode.USAGE,
            "'float32' is not one of bfloat16, float16",
        ),
        (
            ["MODEL", "-t", "sm89", "--attention", "x"],
            ExitCode.USAGE,
            "'x' is not one of auto, dense, sparse",
        ),
        (
            ["MODEL", "-t", "sm89", "--max-sequences", "999"],
            ExitCode.USAGE,
            "'--max-sequences': max_sequences 999",
        ),
        (
            ["MODEL", "-t", "sm89", "--prefill-chunk", "0"],
            ExitCode.USAGE,
            "'--prefill-chunk': prefill_chunk 0: with",
        ),
        (
            ["MODEL", "-t", "sm89", "--prefill-chunk", "99999"],
            ExitCode.USAGE,
            "'--prefill-chunk': prefill_chunk 99999",
        ),
        (
            ["MODEL", "-t", "sm75"],
            ExitCode.NO,
            "no engine runs on sm75: the kernels of its nodes are for sm80 and later",
        ),
        (
            ["MODEL", "-t", "sm89", "--cache", "/proc/edged"],
            ExitCode.NO,
            "/proc/edged cannot be used (No such file or",
        ),
        (["MODEL", "-f", "x.yaml"], ExitCode.USAGE, "give either a model folder or --config FILE"),
        ([], ExitCode.USAGE, "give either a model folder or --config FILE"),
        (["nowhere", "-t", "sm89"], ExitCode.FILE, "config.json: this file is missing"),
    ],
)
def test_what_cannot_be_built_is_refused_before_anything_is_made(
    arguments: list[str], code: int, said: str, edgectl: Edgectl, tmp_path: Path
) -> None:
    tensorrt_rtx()
    model = str(model_folder(tmp_path / "model"))
    found, _, err = edgectl("build", *(model if each == "MODEL" else each for each in arguments))
    assert (found, said in err) == (code, True), err
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("version", "packages", "said"),
    [
        ("10.2.0", (), "tensorrt 10.2.0 is too old: edged needs 10.3 or later (JetPack 6.1 brings 10.3)"),
        (
            "10.9.0",
            ("tensorrt_cu12_libs", "tensorrt_cu13_bindings"),
            "tensorrt is installed for several CUDA majors at once, and which libraries a process gets is chance: tensorrt_cu12",
        ),
    ],
)
def test_a_tensorrt_that_cannot_be_used_is_refused_by_the_command(
    version: str, packages: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    """On a machine with a GPU, where plain TensorRT is asked first."""
    site = tmp_path / "site"
    site.mkdir()
    fake_module(site, version)
    for package in packages:
        info = site / f"{package}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    done = subprocess.run(
        [sys.executable, "-c", RUN, "build", str(model_folder(tmp_path / "model"))],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": f"{HERE / 'gpu_machine'}:{site}",
            "EDGED_CACHE": str(tmp_path / "cache"),
        },
    )
    assert done.returncode == ExitCode.NO
    assert f"edgectl: cannot build for sm89: {said}" in done.stderr
    assert not (tmp_path / "cache").exists()


def test_heads_that_no_kernel_takes_are_refused(edgectl: Edgectl, tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", head_dim=80)
    code, _, err = edgectl("build", model, "-t", "sm89")
    assert code == ExitCode.FILE
    assert "no kernel takes this model's heads: head_dim: 80, must be one of (64, 128)" in err


def test_commands_on_a_read_only_cache_find_what_it_has_and_say_what_to_do() -> None:
    tensorrt_rtx()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        cache, model = folder / "engines", model_folder(folder / "model")
        options = ["--target", "sm89", "--cache", str(cache)]
        assert main(["build", str(model), *options]) == 0

        def serve() -> None:
            assert main(["build", str(model), *options]) == 0  # found
            for command in (
                ["build", str(model), *options, "--rebuild"],
                ["build", str(model), *options, "--dtype", "float16"],
                ["engines", "prune", "--all", "--cache", str(cache)],
            ):
                with contextlib.redirect_stderr(io.StringIO()) as error:
                    assert main(command) == 1
                assert "cannot be written (Permission denied)" in error.getvalue()
                assert "name another folder with --cache or EDGED_CACHE" in error.getvalue()
            assert main(["engines", "verify", "--cache", str(cache)]) == 0

        assert run_where_nothing_can_be_written(folder, serve) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["delete"], "'delete' is not one of list, verify, prune"),
        (["list", "--all"], "goes with prune"),
        (["prune", "--limit", "much"], "'much' is no size"),
    ],
)
def test_wrong_engines_commands(arguments: list[str], said: str, edgectl: Edgectl) -> None:
    code, _, err = edgectl("engines", *arguments)
    assert (code, said in err) == (ExitCode.USAGE, True), err


def test_an_empty_cache_is_no_error(edgectl: Edgectl) -> None:
    for action in ("list", "verify", "prune"):
        code, out, _ = edgectl("engines", action)
        assert (code, "0 engines" in out) == (0, True), out
