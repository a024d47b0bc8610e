"""Which TensorRT builds for what, and what is refused before a build."""

from __future__ import annotations

import re

import pytest
from tensorrt_case import tensorrt_rtx

from edged.engine import targets
from edged.engine.gpu import Gpu
from edged.engine.shapes import EngineShapes
from edged.errors import FailedPreconditionError, InvalidArgumentError
from plugins_trt.tensorrt import adapter

ORIN = Gpu((8, 7), 12060)
ADA = Gpu((8, 9), 13000)


def test_targets_are_read_in_the_usual_spellings() -> None:
    assert targets.parse_targets(["sm120", "SM_89", " 86 ", "sm89"]) == ("sm86", "sm89", "sm120")


@pytest.mark.parametrize("text", ["", "ada", "sm", "sm8", "sm8.9", "sm8900", "89a"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(f"target {text!r}: write a compute capability")):
        targets.parse_targets([text])


def test_without_a_gpu_named_targets_are_built_with_tensorrt_rtx(monkeypatch: pytest.MonkeyPatch) -> None:
    tensorrt_rtx()
    monkeypatch.setattr(targets, "find_gpu", lambda: None)
    chosen, names = targets.choose(("sm86", "sm120"))
    assert chosen.name == "tensorrt_rtx"
    assert names == ("sm86", "sm120")


def test_without_a_gpu_a_target_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "find_gpu", lambda: None)
    with pytest.raises(
        FailedPreconditionError,
        match="no GPU in this machine, so name what to build for: --target with one of sm80",
    ):
        targets.choose(())


def test_orin_is_not_built_for_on_another_machine() -> None:
    tensorrt_rtx()
    with pytest.raises(FailedPreconditionError, match="not for sm87: build there on the machine itself"):
        targets.choose(("sm87", "sm89"), ADA)


def test_the_machines_own_gpu_is_the_target_when_none_is_named() -> None:
    tensorrt_rtx()
    assert targets.choose((), ADA)[1] == ("sm89",)


def test_on_an_orin_without_plain_tensorrt_the_refusal_says_where_it_comes_from() -> None:
    if tensorrt_rtx() is not adapter.load():
        pytest.skip("plain TensorRT is installed")
    with pytest.raises(FailedPreconditionError, match="JetPack brings it for Orin"):
        targets.choose((), ORIN)


@pytest.mark.parametrize(
    ("sizes", "key"),
    [
        ({"prefill_tokens": 63}, "prefill_tokens 63"),
        ({"max_sequences": 0}, "max_sequences 0"),
        ({"prefill_tokens": 16385}, "prefill_tokens 16385"),
        ({"max_sequences": 257}, "max_sequences 257"),
    ],
)
def test_sizes_that_no_plan_has_are_refused(sizes: dict[str, int], key: str) -> None:
    with pytest.raises(InvalidArgumentError, match=key):
        EngineShapes(**sizes)


def test_no_size_can_only_be_one() -> None:
    for profile in EngineShapes(max_sequences=1).profiles:
        for least, usual, most in (profile.tokens, profile.sequences, profile.rows):
            assert 1 <= least <= usual <= most
            assert most >= 2
