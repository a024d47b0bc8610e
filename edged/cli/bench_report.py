"""What a load has shown: percentiles for people, everything for programs."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edged.cli.bench_run import Outcome

PARTS = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


def message_gaps(outcome: Outcome) -> list[float]:
    """Times between the messages of one answer (ITL): a message has the tokens of a step."""
    return [later - earlier for earlier, later in pairwise(outcome.message_times)]


def token_times(outcomes: Sequence[Outcome]) -> list[float]:
    """The mean time of a token after the first (TPOT), of each answer that has two."""
    times = [outcome.token_times for outcome in outcomes]
    return [(each[-1] - each[0]) / (len(each) - 1) for each in times if len(each) > 1]


def distribution(values: Sequence[float]) -> dict[str, float]:
    """Mean, percentiles (nearest rank) and largest value, and how many there are."""
    if not values:
        return {"count": 0}
    ordered = sorted(values)
    found = {name: ordered[max(0, -(-int(part * 100 * len(ordered)) // 100) - 1)] for name, part in PARTS}
    return {
        "count": len(ordered),
        "mean": sum(ordered) / len(ordered),
        **found,
        "max": ordered[-1],
    }


def figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Throughput, TTFT, TPOT, ITL and end-to-end times of what was answered, and how requests ended."""
    answered = [outcome for outcome in outcomes if outcome.code == "OK"]
    seconds = max((outcome.ended for outcome in outcomes), default=0.0)
    tokens = sum(len(outcome.token_times) for outcome in outcomes)
    messages = sum(len(outcome.message_times) for outcome in outcomes)
    prompt = sum(outcome.prompt_tokens for outcome in answered)
    cached = sum(outcome.cached_tokens for outcome in answered)
    rate = (lambda count: count / seconds) if seconds else (lambda _: 0.0)
    return {
        "seconds": seconds,
        "requests": dict(Counter(outcome.code for outcome in outcomes)),
        "requests_per_second": rate(len(answered)),
        "output_tokens": tokens,
        "output_tokens_per_second": rate(tokens),
        "output_tokens_per_message": tokens / messages if messages else 0.0,
        "prompt_tokens": prompt,
        "prompt_tokens_per_second": rate(prompt),
        "cached_tokens": cached,
        "time_to_first_token_seconds": distribution(
            [outcome.first_token for outcome in answered if outcome.first_token is not None]
        ),
        "time_per_output_token_seconds": distribution(token_times(answered)),
        "inter_token_latency_seconds": distribution([gap for each in answered for gap in message_gaps(each)]),
        "request_seconds": distribution([outcome.ended - outcome.due for outcome in answered]),
    }


def as_rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Every request, for programs."""
    return [
        {
            "index": outcome.index,
            "due_seconds": outcome.due,
            "prompt_tokens": outcome.prompt_tokens,
            "cached_tokens": outcome.cached_tokens,
            "token_seconds": outcome.token_times,
            "ended_seconds": outcome.ended,
            "code": outcome.code,
            "message": outcome.message,
        }
        for outcome in outcomes
    ]


def tables(result: dict[str, Any]) -> list[Table | str]:
    """What is printed."""
    times = Table(box=None, header_style="bold", pad_edge=False)
    times.add_column("ms")
    for heading in ("mean", "p50", "p90", "p99", "max"):
        times.add_column(heading, justify="right")
    for name, key in (
        ("time to first token (TTFT)", "time_to_first_token_seconds"),
        ("time per output token (TPOT)", "time_per_output_token_seconds"),
        ("between messages (ITL)", "inter_token_latency_seconds"),
        ("whole request", "request_seconds"),
    ):
        values = result[key]
        shown = [
            f"{values[part] * 1e3:.1f}" for part in ("mean", "p50", "p90", "p99", "max") if part in values
        ]
        times.add_row(name, *(shown or ["-"] * 5))
    ends = ", ".join(f"{count} {code}" for code, count in sorted(result["requests"].items()))
    hits = f", {result['cached_tokens']} of them cached" if result["cached_tokens"] else ""
    return [
        f"requests    {ends} in {result['seconds']:.1f} s, {result['requests_per_second']:.2f} a second",
        (
            f"generated   {result['output_tokens']} tokens, {result['output_tokens_per_second']:.1f} a second, "
            f"{result['output_tokens_per_message']:.2f} a message"
        ),
        f"prompts     {result['prompt_tokens']} tokens, {result['prompt_tokens_per_second']:.1f} a second{hits}",
        "",
        times,
    ]
