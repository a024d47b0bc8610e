"""The check of an engine's logits before it serves: what passes, what is refused with which figures, what is kept of it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from cuda_models import MODELS as DENSE
from cuda_models import write_model
from tensorrt_models import config_of, open_executor, references, write_folder, write_reference
from tensorrt_stand_in import StandInDevice, StandInRuntime, provide

from edged.engine.store import EngineStore
from edged.errors import CheckpointError, FailedPreconditionError
from edged.executor.engine_check import compare_engine, read_reference, verdict
from edged.executor.tensorrt_executor import TensorRTExecutor

if TYPE_CHECKING:
    from pathlib import Path

    from edged.config import ModelConfig


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_folder(root / name, name) for name in ("4-bit", "biased")}


@pytest.mark.parametrize("place", ["references", pytest.param("kernels", marks=pytest.mark.gpu)])
def test_an_engine_whose_logits_are_the_references_passes_on_both_roads(
    place: str, folders: dict[str, Path]
) -> None:
    open_executor(folders["4-bit"], place)[0].close()
    check = json.loads((folders["4-bit"] / "engines" / "engine" / "check.json").read_text())
    assert check["passed"] is True
    assert 0 < check["relative_rms"] < 0.02
    assert check["divergence"] < 1e-3
    assert "same first token in 100%" in check["decoded"]
    assert check["prefilled"] != check["decoded"]


def test_a_cache_that_cannot_be_written_keeps_no_verdict_and_serves(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise FailedPreconditionError("the cache cannot be written")

    monkeypatch.setattr(EngineStore, "record_check", refuse)
    executor, _, _ = open_executor(folders["biased"])
    executor.close()


def test_a_verdict_that_stands_is_not_written_again(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(folders["biased"])
    monkeypatch.setattr(EngineStore, "record_check", lambda *_, **__: pytest.fail("it is known"))

    def passed(config: ModelConfig, progress: Any) -> Any:
        return replace(provide(config, progress), check={"passed": True})

    executor = TensorRTExecutor(
        config,
        provide=passed,
        open_device=lambda: StandInDevice(references),
        open_runtime=lambda _: StandInRuntime(config),
    )
    executor.load(lambda *_: None)
    executor.close()


class Wrong(StandInRuntime):
    """Engines that are wrong for a batch of one token alone, as TensorRT's have been."""

    def load(self, engine: Any, stream: int) -> Any:
        loaded = super().load(engine, stream)
        evaluator, run = loaded.evaluator, loaded.evaluator.run

        def spoiled(names: Any, feeds: Any) -> Any:
            (logits,) = run(names, feeds)
            return [logits[:, ::-1] if len(feeds["token_ids"]) == 1 else logits]

        evaluator.run = spoiled
        return loaded


def test_an_engine_that_is_wrong_for_one_token_alone_is_refused_with_the_numbers(tmp_path: Path) -> None:
    write_model(tmp_path, DENSE["small"])
    write_reference(tmp_path)
    config = config_of(tmp_path)
    device = StandInDevice(references)
    executor = TensorRTExecutor(
        config, provide=provide, open_device=lambda: device, open_runtime=lambda _: Wrong(config)
    )
    with pytest.raises(FailedPreconditionError) as error:
        executor.load(lambda *_: None)
    assert "prefilled: relative RMS difference 0.00" in error.value.message
    assert "decoded: relative RMS difference 1." in error.value.message
    assert "edgectl build --rebuild" in error.value.message
    assert device.closed
    check = json.loads((tmp_path / "engines" / "engine" / "check.json").read_text())
    assert check["passed"] is False
    assert check["relative_rms"] > 1


def test_a_model_without_reference_logits_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    write_model(tmp_path, DENSE["small"])
    executor = TensorRTExecutor(config_of(tmp_path), provide=lambda *_: pytest.fail("a build"))
    with pytest.raises(FailedPreconditionError, match=r"edgectl models reference"):
        executor.load(lambda *_: None)


def test_a_reference_of_other_weights_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, DENSE["small"])
    reference = write_reference(tmp_path)
    replace(reference, key="another").write(tmp_path)
    executor = TensorRTExecutor(config_of(tmp_path), provide=lambda *_: pytest.fail("a build"))
    with pytest.raises(CheckpointError, match="belongs to other weights"):
        executor.load(lambda *_: None)


def test_a_prompt_longer_than_a_step_or_the_context_is_compared_as_far_as_it_goes(
    folders: dict[str, Path],
) -> None:
    executor, _, runtime = open_executor(
        folders["biased"], context_length=64, prefill_chunk=16, max_sequences=1
    )
    reference = read_reference(folders["biased"], 64)
    assert reference.positions.tolist() == [59, 63]
    assert len(reference.token_ids) == 64
    compared = compare_engine(executor, reference)
    assert verdict(compared)
    assert {context.runs[-1] for context in runtime.engine.contexts[1:]} == {1, 2, 4, 8, 16, 32}
    executor.close()
