"""An engine's memory in the ledger: what its build said, an estimate before; found without loading TensorRT."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from packed_inputs import MODELS
from small_models import CONFIGS, model_folder
from tensorrt_case import tensorrt_rtx

from edged.config import AttentionConfig, Config, MemoryConfig, ModelConfig
from edged.engine.builder import build
from edged.engine.graph import GraphSpec, emit, serialize
from edged.engine.planned import planned_context_bytes
from edged.engine.provision import provide_model
from edged.engine.shapes import EngineShapes
from edged.engine.store import EngineStore
from edged.memory.buffers import ModelPlan, step_buffers
from edged.memory.ledger import compute_ledger
from edged.memory.model_rows import model_rows
from edged.memory.specs import ENGINE
from edged.memory.tensorrt_buffers import estimated_context_bytes
from edged.models.architecture import Architecture
from plugins_trt.contract import round_up

if TYPE_CHECKING:
    from pathlib import Path


def model_of(folder: Path, **settings: Any) -> ModelConfig:
    return ModelConfig(
        "m",
        model_folder(folder / "model"),
        executor="tensorrt",
        device="cuda",
        dtype="bfloat16",
        **{"context_length": 1024, "prefill_chunk": 256, **settings},
    )


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "engines"


def engine_row(model: ModelConfig) -> tuple[int, str]:
    config = Config((model,), memory=MemoryConfig(budget=1 << 34, host=1 << 27))
    (row,) = [each for each in compute_ledger(config).rows if each.name == ENGINE]
    assert row.place == "device"
    return row.bytes, row.note


def test_the_ledger_estimates_until_the_engine_is_built_and_then_knows(tmp_path: Path, cache: Path) -> None:
    tensorrt_rtx()
    model = model_of(tmp_path)
    assert planned_context_bytes(model) is None
    estimated, note = engine_row(model)
    assert "estimated until it is built (edgectl build)" in note
    engine, _ = provide_model(model, EngineStore(cache), targets=("sm86", "sm89"))
    known, note = engine_row(model)
    assert "as its build said" in note
    said = engine.manifest.context_bytes
    assert said is not None
    assert said <= known < said + 256
    assert known <= estimated
    # Of other steps, another dtype or another attention this engine says nothing.
    for other in (
        replace(model, prefill_chunk=512),
        replace(model, dtype="float16"),
        replace(model, attention=AttentionConfig(mode="sparse")),
    ):
        assert planned_context_bytes(other) is None
    assert planned_context_bytes(replace(model, context_length=512)) == said


def test_plan_shows_the_engines_memory_and_loads_no_tensorrt(tmp_path: Path, cache: Path) -> None:
    tensorrt_rtx()
    model = model_of(tmp_path)
    file = tmp_path / "edged.yaml"
    file.write_text(
        "memory: {budget: 16GiB}\nmodels:\n- {name: m, path: "
        f"{model.path}, executor: tensorrt, device: cuda, dtype: bfloat16, context_length: 1024, prefill_chunk: 256}}\n"
    )
    code = (
        "import sys\n"
        "from edged.cli.main import main\n"
        f"sys.argv = ['edgectl', 'plan', '--config', {str(file)!r}, '--json']\n"
        "try:\n    status = main()\n"
        "except SystemExit as end:\n    status = end.code\n"
        "loaded = {'torch', 'tensorrt', 'tensorrt_rtx', 'pycuda'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "raise SystemExit(status)\n"
    )

    def planned_row() -> dict[str, Any]:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        (row,) = [each for each in json.loads(done.stdout)["rows"] if each["name"] == ENGINE]
        return dict(row)

    estimated = planned_row()
    assert estimated["bytes"] > 1 << 20
    assert "estimated until it is built (edgectl build)" in estimated["note"]
    engine, _ = provide_model(model, EngineStore(cache), targets=("sm89",))
    known = planned_row()
    assert "as its build said" in known["note"]
    assert known["bytes"] == round_up(engine.manifest.context_bytes or 0, 256) <= estimated["bytes"]


def test_what_the_build_said_is_what_is_allocated(tmp_path: Path, cache: Path) -> None:
    assert not cache.exists()
    model = model_of(tmp_path)
    plan = replace(ModelPlan.of(model, Architecture.of(model)), engine_bytes=1_000_001)
    (block,) = [each for each in step_buffers(plan) if each.row == ENGINE]
    assert block.nbytes == 1_000_192
    (row,) = [each for each in model_rows(plan) if each.name == ENGINE]
    assert row.bytes == block.nbytes
    activations = {each.name for each in step_buffers(plan)}
    assert not {"hidden", "gate_up", "packed_wide"} & activations


@pytest.mark.parametrize("name", ["gptq", "ternary", "dense"])
def test_the_estimate_is_above_what_builds_say_and_not_far(name: str) -> None:
    config = MODELS[name] if name != "dense" else {**CONFIGS["qwen3"], "head_dim": 64, "hidden_size": 256}
    architecture = Architecture.from_config({**config, "intermediate_size": 1024})
    spec, shapes = GraphSpec(architecture, "float16"), EngineShapes(prefill_tokens=1024, max_sequences=4)
    said = build(tensorrt_rtx(), serialize(emit(spec)), spec, shapes, ("sm89",)).activation_bytes
    plan = ModelPlan(
        architecture,
        "float16",
        context_length=4096,
        max_sequences=4,
        prefill_chunk=1020,
        executor="tensorrt",
        device="cuda",
    )
    assert max(said.values()) <= estimated_context_bytes(plan) <= 2 * max(said.values())
