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
