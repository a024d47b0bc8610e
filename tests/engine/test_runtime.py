"""Loading and running plans: what is asked of TensorRT, on bindings that keep what they are asked; and the real runtime's
refusal where there is no driver.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tensorrt_case import small_spec, tensorrt_rtx

from edged.engine.gpu import Gpu, find_gpu
from edged.engine.provision import provide
from edged.engine.shapes import EngineShapes
from edged.engine.store import EngineStore
from edged.errors import FailedPreconditionError, InternalError
from edged.executor import tensorrt_runtime
from edged.executor.tensorrt_refit import HostWeight
from edged.executor.tensorrt_runtime import TensorRTRuntime
from plugins_trt.tensorrt import adapter
from plugins_trt.tensorrt.adapter import TensorRT, TensorRTError
from plugins_trt.tensorrt.logger import record

if TYPE_CHECKING:
    from edged.engine.entries import StoredEngine


class Bindings:
    """As much of TensorRT as the runtime uses. What is in `refused` answers with an empty result and logs why."""

    def __init__(self, *, refused: str = "", rtx: bool = False) -> None:
        self.refused, self.calls = refused, []
        self.ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="user managed")
        self.DynamicShapesKernelSpecializationStrategy = SimpleNamespace(EAGER="eager", NONE="none")
        self.rtx = rtx
        self.DataType = SimpleNamespace(BF16="bf16", HALF="half")
        self.Weights = lambda *each: each

    def _call(self, name: str, *arguments: Any) -> bool:
        self.calls.append((name, *arguments))
        if name == self.refused:
            record.add_error(f"{name} went wrong")
        return name != self.refused

    # -- TensorRT's names

    def Runtime(self, logger: Any) -> Any:  # noqa: N802
        assert logger == "logger"
        return SimpleNamespace(
            deserialize_cuda_engine=lambda plan: self if self._call("load", len(plan)) else None
        )

    num_optimization_profiles = 2
    num_io_tensors = 2

    def get_device_memory_size_for_profile_v2(self, index: int) -> int:
        return (4096, 8192)[index]

    def get_tensor_name(self, index: int) -> str:
        return ("token_ids", "logits")[index]

    def Refitter(self, engine: Any, logger: Any) -> Any:  # noqa: N802
        assert (engine, logger) == (self, "logger")
        return SimpleNamespace(
            get_all_weights=lambda: ["layers.0.output", "head"],
            set_named_weights=lambda *each: self._call("weight", *each),
            refit_cuda_engine=lambda: self._call("refit"),
        )

    def create_runtime_config(self) -> Any:
        assert self.rtx
        config = SimpleNamespace()
        config.set_execution_context_allocation_strategy = lambda each: self._call("strategy", each)
        return config

    def create_execution_context(self, how: Any) -> Any:
        how = getattr(how, "dynamic_shapes_kernel_specialization_strategy", how)
        if not self._call("context", how):
            return None
        return SimpleNamespace(
            set_device_memory=lambda *each: self._call("memory", *each),
            set_optimization_profile_async=lambda *each: self._call("profile", *each),
            set_tensor_address=lambda *each: self._call("address", *each),
            set_input_shape=lambda *each: self._call("shape", *each),
            execute_async_v3=lambda *each: self._call("execute", *each),
        )


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> StoredEngine:
    tensorrt_rtx()
    store = EngineStore(tmp_path_factory.mktemp("engines"))
    shapes = EngineShapes(prefill_tokens=256, max_sequences=2)
    return provide(small_spec(), shapes, store, label="small", targets=("sm89",))[0]


def loaded(
    engine: StoredEngine, bindings: Bindings, monkeypatch: pytest.MonkeyPatch, version: str = "1.7.1.116"
) -> Any:
    name = "tensorrt_rtx" if bindings.rtx else "tensorrt"
    key = replace(engine.manifest.key, tensorrt=f"{name} 1.7.1.116")
    mine = replace(engine, manifest=replace(engine.manifest, key=key))
    tensorrt = TensorRT(name, version, bindings, "logger", 13)
    monkeypatch.setattr(adapter, "load", lambda asked: tensorrt if asked == name else pytest.fail(asked))
    monkeypatch.setattr(tensorrt_runtime, "register", lambda _: bindings.calls.append(("register",)))
    return TensorRTRuntime(mine).load(mine, 7)


POINTERS = {"token_ids": 0x100, "logits": 0x200, "another": 0x300}


@pytest.mark.parametrize(("rtx", "captured"), [(False, True), (True, True), (True, False)])
def test_a_context_gets_its_memory_its_profile_and_every_address(
    rtx: bool, captured: bool, engine: StoredEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    bindings = Bindings(rtx=rtx)
    made = loaded(engine, bindings, monkeypatch)
    assert made.memory_bytes == 8192
    context = made.context(1, 0x7F00, POINTERS, captured=captured)
    context.set_shapes({"token_ids": (64,)})
    context.enqueue(7)
    how = "eager" if captured else "none"
    strategy = [("strategy", "user managed"), ("context", how)] if rtx else [("context", "user managed")]
    assert bindings.calls == [
        ("register",),
        ("load", len(engine.plan)),
        *strategy,
        ("memory", 0x7F00, 8192),
        ("profile", 1, 7),
        ("address", "token_ids", 0x100),
        ("address", "logits", 0x200),
        ("shape", "token_ids", (64,)),
        ("execute", 7),
    ]
    made.close()


@pytest.mark.parametrize(
    ("refused", "error", "message"),
    [
        (
            "load",
            FailedPreconditionError,
            "cannot load the engine .* of small: load went wrong; build it again",
        ),
        ("context", InternalError, "tensorrt makes no execution context: context went wrong"),
        ("profile", InternalError, "tensorrt refuses profile 0: profile went wrong"),
        ("address", InternalError, "tensorrt refuses the address of token_ids: address went wrong"),
        ("shape", InternalError, r"tensorrt refuses shape \(65,\) of token_ids: shape went wrong"),
        ("execute", InternalError, "tensorrt cannot run the engine: execute went wrong"),
    ],
)
def test_what_tensorrt_refuses_is_said_with_its_reason(
    refused: str, error: type[Exception], message: str, engine: StoredEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> None:
        context = loaded(engine, Bindings(refused=refused), monkeypatch).context(
            0, 256, POINTERS, captured=True
        )
        context.set_shapes({"token_ids": (65,)})
        context.enqueue(7)

    with pytest.raises(error, match=message):
        run()


WEIGHTS = {"head": HostWeight("bfloat16", 0x500, 640), "layers.0.output": HostWeight("float16", 0x900, 64)}


def test_weights_are_put_into_a_stripped_engine(
    engine: StoredEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    bindings = Bindings()
    loaded(engine, bindings, monkeypatch).refit(WEIGHTS)
    assert bindings.calls[2:] == [
        ("weight", "head", ("bf16", 0x500, 640)),
        ("weight", "layers.0.output", ("half", 0x900, 64)),
        ("refit",),
    ]


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        ("weight", "tensorrt refuses the weight head: weight went wrong"),
        ("refit", "tensorrt cannot put the weights into the engine: refit went wrong"),
    ],
)
def test_weights_that_tensorrt_refuses_are_named(
    refused: str, message: str, engine: StoredEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InternalError, match=message):
        loaded(engine, Bindings(refused=refused), monkeypatch).refit(WEIGHTS)


def test_an_engine_that_wants_other_weights_is_another_models(
    engine: StoredEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    bindings = Bindings()
    with pytest.raises(
        InternalError, match=r"wants the weights head, layers\.0\.output .* there are head: it is"
    ):
        loaded(engine, bindings, monkeypatch).refit({"head": WEIGHTS["head"]})
    assert len(bindings.calls) == 2


def test_a_tensor_that_nothing_is_bound_to_is_named(
    engine: StoredEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = loaded(engine, Bindings(), monkeypatch)
    with pytest.raises(InternalError, match="nothing is bound to the engine's logits: it is another model's"):
        made.context(0, 256, {"token_ids": 256}, captured=True)


def test_an_address_that_tensorrt_does_not_take_is_named(
    engine: StoredEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = loaded(engine, Bindings(), monkeypatch)
    with pytest.raises(InternalError, match="the addresses of logits are no multiples of 256"):
        made.context(0, 256, {**POINTERS, "logits": 0x210}, captured=True)


def test_another_version_is_refused_before_its_library_reads_the_plan(
    engine: StoredEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    bindings = Bindings()
    with pytest.raises(
        FailedPreconditionError,
        match=r"of small does not fit here: TensorRT is tensorrt 1.7.1.116, needed is tensorrt 1.8; build it again",
    ):
        loaded(engine, bindings, monkeypatch, version="1.8")
    assert bindings.calls == []


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("targets", "sm86 sm120", "the GPU is sm86 sm120, needed is sm89"),
        ("driver", "12.6", "the driver is 12.6, needed is 13.0"),
        ("plugins", "0" * 64, "the hash of the plugins' sources is 000000000000..., needed is"),
        ("edged", "0.0.1", "edged's version is 0.0.1, needed is"),
    ],
)
def test_a_plan_of_another_machine_or_of_other_plugins_is_refused_before_its_library_reads_it(
    part: str, value: str, said: str, engine: StoredEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    bindings = Bindings()
    monkeypatch.setattr(tensorrt_runtime, "find_gpu", lambda: Gpu((8, 9), 13000))
    other = replace(
        engine, manifest=replace(engine.manifest, key=replace(engine.manifest.key, **{part: value}))
    )
    with pytest.raises(FailedPreconditionError) as error:
        loaded(other, bindings, monkeypatch)
    assert said in error.value.message
    assert error.value.message.endswith("build it again with `edgectl build`")
    assert bindings.calls == []


def test_a_tensorrt_that_is_too_old_or_gone_is_refused(
    engine: StoredEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def old(name: str) -> TensorRT:
        adapter.check_version("tensorrt", "10.2.0.19")
        raise AssertionError(name)

    monkeypatch.setattr(adapter, "load", old)
    with pytest.raises(FailedPreconditionError, match=r"tensorrt 10.2.0.19 is too old: edged needs 10.3"):
        TensorRTRuntime(engine)

    def gone(name: str) -> TensorRT:
        raise TensorRTError(f"no TensorRT can be imported ({name})")

    monkeypatch.setattr(adapter, "load", gone)
    with pytest.raises(FailedPreconditionError, match=r"no TensorRT can be imported \(tensorrt_rtx\)"):
        TensorRTRuntime(engine)


@pytest.mark.skipif(find_gpu() is not None, reason="there is a driver")
def test_the_real_runtime_says_that_there_is_no_driver(
    engine: StoredEngine, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        FailedPreconditionError, match=r"cannot load the engine .*CUDA driver version is insufficient"
    ):
        TensorRTRuntime(engine).load(engine, 0)
    capfd.readouterr()
