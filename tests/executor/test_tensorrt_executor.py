"""The TensorRT executor held to the torch executor's fp32 logits: on stand-ins for TensorRT and the GPU everywhere; on a GPU
with PyCUDA, captured graphs and our kernels, where torch stands in for TensorRT alone.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from executor_runner import Runner, load
from fixtures.children import exit_of, in_child
from packed_models import MODELS as PACKED
from packed_models import write_packed
from tensorrt_models import (
    FEW,
    MODELS,
    SETTINGS,
    config_of,
    open_executor,
    prompt,
    references,
    write_folder,
    write_reference,
)
from tensorrt_stand_in import (
    CONTEXT_BYTES,
    StandInDevice,
    StandInRuntime,
    provide,
    with_engine_bytes,
)

from edged.config import AttentionConfig, ModelConfig
from edged.engine.provision import spec_of
from edged.errors import FailedPreconditionError, LedgerError, ResourceExhaustedError, UnsupportedError
from edged.executor.base import SamplingRow
from edged.executor.host_sampler import HostOptions, HostSampler
from edged.executor.tensorrt_executor import TensorRTExecutor
from edged.executor.tensorrt_refit import HostWeights
from edged.memory.buffers import step_buffers, weight_buffers
from edged.memory.cuda_buffers import captured_sizes
from plugins_trt.sample.reference import sample

ERROR = 0.012
"""Mean difference of float16 from fp32 over the spread of the logits."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_folder(root / str(index), name) for index, name in enumerate(MODELS)}


@pytest.fixture(scope="module", params=["references", pytest.param("kernels", marks=pytest.mark.gpu)])
def executors(folders: dict[str, Path], request: pytest.FixtureRequest) -> Any:
    made: dict[Any, Any] = {}

    def get(name: str, attention: AttentionConfig = AttentionConfig()) -> Any:  # noqa: B008 - frozen
        if (name, attention) not in made:
            made[name, attention] = open_executor(folders[name], request.param, attention=attention)
        return made[name, attention]

    yield get
    for executor, _, _ in made.values():
        executor.close()


@pytest.fixture(scope="module")
def fp32(folders: dict[str, Path]) -> Any:
    made: dict[Any, Any] = {}

    def get(name: str, attention: AttentionConfig = AttentionConfig()) -> Any:  # noqa: B008 - frozen
        if (name, attention) not in made:
            made[name, attention] = load(folders[name], attention=attention, **SETTINGS)
        return made[name, attention]

    yield get
    for executor in made.values():
        executor.close()


def assert_close(found: Any, expected: Any) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).mean() / expected.std() < ERROR


def ragged(runner: Runner) -> list[Any]:
    """Prompts of several lengths in pieces beside each other, then steps of every bucket: the needed rows' logits."""
    first, second, third = (runner.sequence(prompt(count, count), room=8) for count in (190, 70, 9))
    found = [
        runner.logits([(first, 128)]),  # a chunk
        runner.logits([(first, 40), (second, 70), (third, 5)]),  # pieces beside each other
        runner.logits([(first, 22), (third, 4)]),
    ]
    for sequence in (first, second, third):
        sequence.tokens += prompt(6, len(sequence.tokens))
    found += [
        runner.logits([(first, 1), (second, 1), (third, 1)]),
        runner.logits([(second, 1)]),
        runner.logits([(third, 3), (first, 2)], "all"),
    ]
    return found


@pytest.mark.parametrize(
    ("name", "attention"),
    [*((name, AttentionConfig()) for name in MODELS), ("biased", FEW)],
    ids=[*MODELS, "biased, sparse"],
)
def test_ragged_steps_give_the_logits_of_the_torch_executor(
    name: str, attention: AttentionConfig, executors: Any, fp32: Any
) -> None:
    executor, device, runtime = executors(name, attention)
    for found, expected in zip(ragged(Runner(executor)), ragged(Runner(fp32(name, attention))), strict=True):
        assert_close(found, expected)
    decode, prefill = runtime.engine.contexts[1:], runtime.engine.contexts[0]
    assert set(prefill.runs) == {80, 128}  # the check's prompt of 72 tokens, and 128, 115 and 100 of these
    assert (
        [context.runs[0] for context in decode]
        == list(captured_sizes(executor.plan))
        == [1, 2, 4, 8, 16, 32, 64]
    )
    captured = device.captured if isinstance(device, StandInDevice) else len(device._graphs)
    draws = 2 * 3  # of 1, 2 and 4 rows, with options and without
    assert captured == len(decode) * (2 if attention.mode == "sparse" else 1) + draws


@pytest.mark.parametrize("name", ["dense, tied", "4-bit"])
def test_greedy_tokens_of_sequences_that_share_steps_are_the_torch_executors(
    name: str, executors: Any, fp32: Any
) -> None:
    runner = Runner(executors(name)[0])
    sequences = [runner.sequence(prompt(count, count), room=16) for count in (100, 65, 3)]
    drawn = runner.generate(sequences, 12, chunk=128)
    checker = Runner(fp32(name))
    for sequence, tokens, count in zip(sequences, drawn, (100, 65, 3), strict=True):
        whole = checker.sequence(sequence.tokens)
        logits = checker.prefill(whole, 128)[count - 1 : -1]
        best = logits.argmax(1)
        assert len(tokens) == len(best) == 12
        for row, (token, wanted) in enumerate(zip(tokens, best.tolist(), strict=True)):
            # float16 may swap what fp32 holds nearly equal.
            assert token == wanted or logits[row, wanted] - logits[row, token] < 0.02 * logits[row].std()
        assert (np.array(tokens) == best).mean() > 0.8
        checker = Runner(fp32(name))


def test_seeded_draws_are_the_samplers_whatever_shares_the_step(executors: Any) -> None:
    executor = executors("biased")[0]
    runner = Runner(executor)
    sequences = [runner.sequence(prompt(count, count), room=4) for count in (20, 30, 5)]
    batch = runner.batch([(each, len(each.tokens)) for each in sequences])
    rows = [
        SamplingRow(temperature=1.1, seed=7, position=20, top_k=40),
        SamplingRow(),
        SamplingRow(temperature=0.7, seed=2**63 + 5, position=5, top_p=0.8),
    ]
    batch = type(batch)(**{**vars(batch), "sampling": tuple(rows)})
    logits = torch.from_numpy(executor.logits(batch))
    wanted = sample(
        logits,
        temperatures=[row.temperature for row in rows],
        top_ks=[row.top_k for row in rows],
        top_ps=[row.top_p for row in rows],
        seeds=[row.seed for row in rows],
        positions=[row.position for row in rows],
    )
    assert executor.step(batch).tolist() == wanted.tolist()
    # A row that only the host can draw, beside them.
    host = HostSampler(HostOptions(logit_bias=((3, 1e4),)), [])
    mixed = type(batch)(**{**vars(batch), "sampling": (rows[0], SamplingRow(host=host), rows[2])})
    assert executor.step(mixed).tolist() == [int(wanted[0]), 3, int(wanted[2])]


def test_pages_survive_the_way_to_the_host_and_back(executors: Any) -> None:
    executor = executors("biased", FEW)[0]
    runner = Runner(executor)
    sequence = runner.sequence(prompt(100), room=40)
    runner.logits([(sequence, 100)])
    sequence.tokens += prompt(2, 1)
    pages = sequence.table[:2]
    kept = np.empty((2, executor.page_bytes), np.uint8)
    executor.read_pages(pages, kept)
    batch = runner.batch([(sequence, 1)])
    expected = executor.logits(batch)
    executor.write_pages(pages, np.zeros_like(kept))
    assert np.abs(executor.logits(batch) - expected).max() > 1e-3
    moved = np.array([20, 21], np.int32)
    executor.write_pages(moved, kept)
    elsewhere = type(batch)(**{**vars(batch), "page_tables": [moved]})
    assert np.array_equal(executor.logits(elsewhere), expected)


def test_what_is_allocated_is_what_the_ledger_planned_and_close_gives_it_back(
    folders: dict[str, Path],
) -> None:
    executor, device, runtime = open_executor(folders["4-bit"])
    planned = sum(spec.nbytes for spec in (*weight_buffers(executor.plan), *step_buffers(executor.plan)))
    assert device.allocated == planned
    executor.close()
    assert (device.closed, runtime.engine.closed, executor.pointers) == (True, True, {})
    open_executor(folders["4-bit"])[0].close()  # the stream's session was closed


def test_the_nodes_hear_which_weights_are_symmetric(tmp_path: Path) -> None:
    config, quantization = PACKED["marlin, group 128"]
    write_packed(tmp_path, config, quantization)
    write_reference(tmp_path)
    products: list[Any] = []

    def recording(plan: Any) -> Any:
        kernels = references(plan)

        def multiply(product: Any, stream: Any) -> None:
            products.append(product.symmetric)
            kernels.multiply(product, stream)

        return replace(kernels, multiply=multiply)

    config = config_of(tmp_path)
    executor = TensorRTExecutor(
        config,
        provide=provide,
        open_device=lambda: StandInDevice(recording),
        open_runtime=lambda _: StandInRuntime(config),
    )
    executor.load(lambda *_: None)
    executor.close()
    assert set(products) == {True}


@pytest.mark.parametrize("place", ["references", pytest.param("kernels", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["biased", "4-bit"])
def test_an_engine_stripped_of_its_weights_gets_them_and_gives_the_same(
    name: str, place: str, folders: dict[str, Path]
) -> None:
    held = spec_of(config_of(folders[name]), refitted=True).held
    dense = ["qkv", "output", "gate_up", "down"] if name == "biased" else []
    assert [each.name for each in held] == [f"layers.{i}.{part}" for i in (0, 1) for part in dense] + ["head"]
    found, allocated = [], []
    for refitted in (False, True):
        executor, device, _ = open_executor(folders[name], place, refitted=refitted)
        found.append(ragged(Runner(executor)))
        allocated.append(device.allocated if isinstance(device, StandInDevice) else 0)
        assert ("head" in executor.pointers) is not refitted
        executor.close()
    assert all(np.array_equal(mine, other) for mine, other in zip(*found, strict=True))
    if place == "references":
        assert allocated[0] - allocated[1] == sum(each.nbytes for each in held)


def test_weights_for_which_there_is_no_room_are_refused_and_nothing_stays(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    held = spec_of(config_of(folders["biased"]), refitted=True).held

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        with pytest.raises(ResourceExhaustedError, match=f"KiB of weights in {tmp_path} .*without --refit"):
            HostWeights(held, tmp_path)

    assert exit_of(in_child(fill)) == 0
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_needs_more_than_was_planned_is_refused(folders: dict[str, Path]) -> None:
    config = config_of(folders["biased"])

    def larger(config: ModelConfig, progress: Any) -> Any:
        return with_engine_bytes(provide(config, progress), 1 << 40)

    executor = TensorRTExecutor(
        config,
        provide=larger,
        open_device=lambda: pytest.fail("nothing is allocated"),
        open_runtime=lambda _: StandInRuntime(config),
    )
    with pytest.raises(LedgerError, match=r"its engine needs 1099511627776 bytes .*start again"):
        executor.load(lambda *_: None)
    assert CONTEXT_BYTES < 1 << 40


def test_parts_of_two_cuda_majors_are_refused_and_nothing_stays(folders: dict[str, Path]) -> None:
    config = config_of(folders["biased"])
    device, runtime = StandInDevice(references), StandInRuntime(config)
    runtime.cuda_major = 12
    executor = TensorRTExecutor(
        config, provide=provide, open_device=lambda: device, open_runtime=lambda _: runtime
    )
    with pytest.raises(FailedPreconditionError, match="TensorRT for CUDA 12, PyCUDA for CUDA 13"):
        executor.load(lambda *_: None)
    assert device.closed


def test_trees_and_quantized_pages_are_refused(folders: dict[str, Path], executors: Any) -> None:
    executor = executors("biased")[0]
    runner = Runner(executor)
    batch = runner.batch([(runner.sequence([1, 2]), 1)])
    tree = type(batch)(**{**vars(batch), "tree_masks": np.array([1], np.uint64)})
    with pytest.raises(UnsupportedError, match="verifies no trees"):
        executor.logits(tree)


SERVING = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import numpy as np
from numpy_kernels import kernels
from tensorrt_stand_in import StandInDevice, StandInRuntime, provide
from edged.config import ModelConfig
import edged.worker.engine
from edged.executor import tensorrt_device, tensorrt_runtime
from edged.executor.base import SamplingRow, StepBatch
from edged.executor.tensorrt_executor import TensorRTExecutor
config = ModelConfig("m", Path(sys.argv[2]), executor="tensorrt", device="cuda", dtype="float16", context_length=512,
                     prefill_chunk=128)
runtime = StandInRuntime(config)
executor = TensorRTExecutor(config, provide=provide, open_device=lambda: StandInDevice(kernels),
                            open_runtime=lambda _: runtime)
executor.load(lambda *_: None)
ids = np.array(eval(sys.argv[3]), np.int32)
table = [np.arange(8, dtype=np.int32)]
drawn, stored = [], 0
while len(drawn) < 8:
    count = len(ids)
    batch = StepBatch(ids, np.arange(stored, stored + count, dtype=np.int32), np.array([0, count], np.int32),
                      np.array([stored], np.int32), table, np.array([count - 1], np.int32), (SamplingRow(),))
    drawn.append(int(executor.step(batch)[0]))
    stored, ids = stored + count, np.array(drawn[-1:], np.int32)
executor.close()
print(drawn)
loaded = {"torch", "tensorrt", "tensorrt_rtx"} & set(sys.modules)
assert not loaded, loaded
"""


def test_serving_imports_no_torch(folders: dict[str, Path]) -> None:
    tokens = prompt(90)
    done = subprocess.run(
        [sys.executable, "-c", SERVING, str(Path(__file__).parent), str(folders["dense, tied"]), str(tokens)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    executor, _, _ = open_executor(folders["dense, tied"])
    runner = Runner(executor)
    assert done.stdout.strip() == str(runner.generate([runner.sequence(tokens, room=8)], 8, chunk=128)[0])
    executor.close()
