"""Real builds with TensorRT-RTX, which needs no GPU for them."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import onnx
import pytest
from tensorrt_case import small_spec, tensorrt_rtx

from edged.engine import builder, graph
from edged.engine.builder import Plan, build
from edged.engine.gpu import find_gpu
from edged.engine.shapes import EngineShapes
from edged.errors import CancelledError, InternalError
from plugins_trt.tensorrt.registration import register

if TYPE_CHECKING:
    from pathlib import Path

SHAPES = EngineShapes(prefill_tokens=256, max_sequences=4)


def built(model: onnx.ModelProto | None = None, targets: tuple[str, ...] = ("sm89",), **options: Any) -> Plan:
    spec = options.pop("spec", None) or small_spec()
    data = graph.serialize(graph.emit(spec) if model is None else model)
    return build(tensorrt_rtx(), data, spec, options.pop("shapes", SHAPES), targets, **options)


def test_a_plan_for_three_targets_is_built_without_weights_and_says_its_memory() -> None:
    seen: list[tuple[str, int, int]] = []
    plan = built(targets=("sm86", "sm89", "sm120"), progress=lambda *each: seen.append(each))
    assert len(plan.data) > 100_000
    assert set(plan.activation_bytes) == {"decode", "prefill"}
    assert 0 < plan.activation_bytes["decode"] < plan.activation_bytes["prefill"] < 2**30
    done = [each[1] for each in seen]
    assert done == sorted(done)
    assert seen[-1] == ("building", 1000, 1000)
    assert len(done) > 20


def test_activations_grow_with_the_chunk() -> None:
    small = built(shapes=EngineShapes(prefill_tokens=256))
    large = built(shapes=EngineShapes(prefill_tokens=2048))
    assert large.activation_bytes["prefill"] > small.activation_bytes["prefill"]
    assert large.activation_bytes["decode"] == small.activation_bytes["decode"]


def test_a_build_that_is_cancelled_ends_at_its_next_step() -> None:
    stop = threading.Event()
    with pytest.raises(CancelledError):
        built(progress=lambda _, done, __: stop.set() if done > 100 else None, cancelled=stop)
    # And the next one is not affected.
    assert len(built().data) > 100_000


def test_what_the_progress_function_raises_ends_the_build() -> None:
    def fail(*_: object) -> None:
        raise OSError("the terminal is gone")

    with pytest.raises(OSError, match="the terminal is gone"):
        built(progress=fail)


def changed(**attributes: object) -> onnx.ModelProto:
    """The small graph with other attributes on its first attention node; None removes one."""
    model = graph.emit(small_spec())
    node = next(each for each in model.graph.node if each.op_type == "Attention")
    kept = [each for each in node.attribute if each.name not in attributes]
    del node.attribute[:]
    node.attribute.extend(kept)
    node.attribute.extend(
        onnx.helper.make_attribute(name, value) for name, value in attributes.items() if value is not None
    )
    return model


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (
            {"epsilon": None},
            r"edged::Attention \(layers.0.attention\): lacks epsilon: the graph or plan was made by",
        ),
        ({"epsilon": 3}, r"edged::Attention \(layers.0.attention\): field epsilon is 3, must be a number"),
        ({"lse": 1}, "field lse is 1, must be a text"),
        ({"lse": "guess"}, "lse: 'guess', must be 'approximate' or 'exact'"),
        ({"head_dim": 80}, r"head_dim: 80, must be one of \(64, 128\)"),
        ({"heads": 3}, "heads: 3, must be a multiple of kv_heads 2"),
        ({"qk_norm": 0}, r"edged::Attention \(layer 0\): 10 inputs, must be 8: qkv, positions"),
        ({"kv_heads": 4}, r"input qkv has shape \[-1, 512\], must be \[T, 768\]"),
    ],
)
def test_a_node_that_is_not_what_the_plugin_takes_is_refused_by_name(
    attributes: dict[str, object], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InternalError, match=message):
        built(changed(**attributes))
    capfd.readouterr()


def test_a_tensor_of_another_type_is_refused_by_name(capfd: pytest.CaptureFixture[str]) -> None:
    spec = small_spec("float32")
    with pytest.raises(InternalError, match="input qkv is float32, must be float16 or bfloat16"):
        built(spec=spec)
    capfd.readouterr()


def test_bytes_that_are_no_graph_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InternalError, match="tensorrt_rtx cannot read the graph"):
        build(tensorrt_rtx(), b"no model", small_spec(), SHAPES, ("sm89",))
    capfd.readouterr()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dense_attention_builds_in_both_types(dtype: str) -> None:
    spec = small_spec(dtype)
    dense = graph.GraphSpec(spec.architecture, dtype, None)
    assert len(built(spec=dense).data) > 100_000


@pytest.mark.filterwarnings("ignore:.*Timing cache operations are no-ops")
def test_the_settings_for_plain_tensorrt_are_taken_by_real_bindings_and_its_timings_are_handed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TensorRT-RTX under the other's name: it has the same builder, and times nothing."""
    register(tensorrt_rtx())
    monkeypatch.setattr(builder, "register", lambda _: None)  # one registry is behind both names
    plain = replace(tensorrt_rtx(), name="tensorrt")
    spec = small_spec()
    data = graph.serialize(graph.emit(spec))
    first = build(plain, data, spec, SHAPES, ("sm89",))
    assert first.timing_cache
    # What another version wrote, or nobody, is no reason to fail.
    for given in (first.timing_cache, first.timing_cache[:50], b"nonsense"):
        again = build(plain, data, spec, SHAPES, ("sm89",), timing_cache=given)
        assert again.timing_cache
        assert again.activation_bytes == first.activation_bytes


def test_a_stripped_plan_asks_the_driver_and_its_graph_is_read_and_marked_before(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if find_gpu() is not None:
        pytest.skip("there is a driver")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    spec = replace(small_spec(), refitted=True)
    # TensorRT-RTX's compiler gives up; provision refuses before it is asked.
    with pytest.raises(InternalError, match=r"tensorrt_rtx cannot build the engine: .*CUDA_SUCCESS"):
        built(spec=spec)
    capfd.readouterr()
    assert list(tmp_path.iterdir()) == []


class _WithoutStripping:
    """The bindings, to which both flags of a stripped plan are one that changes nothing."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.BuilderFlag = SimpleNamespace(
            REFIT_INDIVIDUAL=module.BuilderFlag.TF32, STRIP_PLAN=module.BuilderFlag.TF32
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def test_constant_weights_are_built_from_a_file_without_content(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tensorrt = tensorrt_rtx()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    bindings = replace(tensorrt, module=_WithoutStripping(tensorrt.module))
    spec = replace(small_spec(), refitted=True)
    plan = build(bindings, graph.serialize(graph.emit(spec)), spec, SHAPES, ("sm89",))
    assert plan.refitted
    assert not built().refitted
    assert len(plan.data) > 100_000
    assert list(tmp_path.iterdir()) == []


def test_a_tied_table_is_not_copied_in_every_step() -> None:
    spec = small_spec(tie_word_embeddings=True, hidden_size=512, vocab_size=20_000, layers=1)
    table_bytes = 20_000 * 512 * 2
    assert built(spec=spec).activation_bytes["decode"] < 0.6 * table_bytes
