from __future__ import annotations

import pytest
from fake_executor import generate
from hand_stepped import HandStepped

from edged.scheduler.pace import FIRST_TOKENS, LEAST_TOKENS, Pace


def cost(streams, tokens):
    """A machine where a step of streams takes 10 ms and a prompt token 1 ms."""
    return 0.010 * (streams > 0) + 0.001 * tokens


def learned(share, steps=30, a_token=0.001):
    pace = Pace(share)
    pace.note(1, 0, 0.010)
    for _ in range(steps):
        tokens = pace.prompt_tokens(1, 512)
        pace.note(1, tokens, 0.010 + a_token * tokens)
    return pace


@pytest.mark.parametrize(("share", "tokens"), [(0.5, 10), (0.75, 30), (0.9, 90)])
def test_prompts_take_their_share_of_a_step(share, tokens):
    assert learned(share).prompt_tokens(1, 512) == pytest.approx(tokens, abs=1)


def test_a_slow_machine_still_advances_and_a_fast_one_takes_whole_chunks():
    assert learned(0.5, a_token=1.0).prompt_tokens(1, 512) == LEAST_TOKENS
    assert learned(0.5, a_token=1e-6).prompt_tokens(1, 512) == 512


def test_without_streams_or_with_a_share_of_one_nothing_is_cut():
    assert learned(0.5).prompt_tokens(0, 512) == 512
    assert Pace(1.0).prompt_tokens(3, 512) == 512


def test_streams_alone_are_measured_first_and_the_first_piece_is_small():
    pace = Pace(0.5)
    assert pace.prompt_tokens(2, 512) == 0
    pace.note(2, 0, 0.010)
    assert pace.prompt_tokens(2, 512) == FIRST_TOKENS
    pace.note(2, FIRST_TOKENS, 0.010 + 1e-5)
    assert pace.prompt_tokens(2, 512) == 2 * FIRST_TOKENS, "it grows step by step"


def test_one_slow_step_does_not_change_the_pace_much():
    pace = learned(0.5)
    pace.note(1, 10, 5.0)
    assert pace.prompt_tokens(1, 512) >= LEAST_TOKENS
    for _ in range(20):
        tokens = pace.prompt_tokens(1, 512)
        pace.note(1, tokens, 0.010 + 0.001 * tokens)
    assert pace.prompt_tokens(1, 512) == pytest.approx(10, abs=1)


def test_a_long_prompt_leaves_a_stream_its_pace_and_comes_to_its_end():
    bench = HandStepped(
        prefill_chunk=512,
        max_step_tokens=600,
        pages=64,
        context=3000,
        prefill_share=0.5,
        step_seconds=cost,
    )
    bench.submit("stream", [1, 2, 3], 400)
    for _ in range(20):
        bench.step()
    prompt = [(3 * i) % 97 for i in range(1000)]
    bench.submit("long", prompt, 2)
    gaps = []
    while "long" not in bench.tokens:
        before = bench.now
        bench.step()
        gaps.append(bench.now - before)
    assert max(gaps) <= 0.010 * 2.7
    assert len(gaps) < 130, "1000 tokens at about 10 a step"
    bench.run()
    assert bench.tokens["long"] == generate(prompt, 2, 97)


def test_speeds_give_times():
    pace = Pace(0.5)
    assert pace.prompt_seconds(100, 0) is None
    pace.note(0, 100, 0.2)
    assert pace.prompt_seconds(50, 0) == pytest.approx(0.1)
    pace.note(1, 0, 0.010)
    pace.note(8, 0, 0.020)
    assert pace.decode_seconds(1) == 0.010
    assert pace.decode_seconds(4) == 0.010, "the nearest smaller number that was seen"
    assert pace.decode_seconds(7) == 0.020, "as 8"
    assert pace.prompt_seconds(50, 1) == pytest.approx(0.2), "beside streams it has half of the time"


@pytest.mark.parametrize("share", [0, -1, 1.1])
def test_a_share_outside_its_range_is_refused(share):
    with pytest.raises(ValueError, match="prefill_share"):
        Pace(share)


def machine(tokens):
    """A step of prompts takes 30 ms, and 1 ms more for each of its tokens."""
    return 0.030 + 0.001 * tokens


def test_short_prompts_say_little_of_a_long_one():
    pace = Pace(0.5, prefill_chunk=512)
    for _ in range(100):
        pace.note(0, 1, machine(1))
    assert pace.prompt_seconds(900, 0) <= machine(512) + machine(388)
    assert pace.prompt_seconds(1, 0) == pytest.approx(machine(1))


@pytest.mark.parametrize("tokens", [1, 2, 60, 511, 512, 513, 5000])
def test_a_prompt_is_estimated_from_steps_of_its_size(tokens):
    pace = Pace(0.5, prefill_chunk=512)
    for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        pace.note(0, size, machine(size))
    takes = sum(machine(min(512, tokens - start)) for start in range(0, tokens, 512))
    assert 0.5 * takes <= pace.prompt_seconds(tokens, 0) <= 1.01 * takes


def test_a_short_prompt_after_long_ones_is_not_expected_to_take_longer_than_it_does():
    pace = Pace(0.5, prefill_chunk=512)
    pace.note(0, 512, machine(512))
    assert 0 < pace.prompt_seconds(10, 0) <= machine(10)


def test_small_pieces_beside_streams_say_nothing_of_a_long_prompt():
    pace = Pace(0.5, prefill_chunk=512)
    pace.note(1, 0, 0.010)
    for _ in range(50):
        pace.note(1, 1, 0.040)
    assert pace.prompt_seconds(1000, 1) is None
    pace.note(1, 16, 0.026)
    assert pace.prompt_seconds(1000, 1) == pytest.approx(2.0)
