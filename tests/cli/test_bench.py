"""edgectl bench: the load it makes, the figures it computes, and a run against the real daemon."""

from __future__ import annotations

import json
import random
import re
import statistics
from xml.etree import ElementTree as ET

import pytest

from edged.cli.bench_load import Lengths, Load, cuts
from edged.cli.bench_report import distribution, figures, message_gaps
from edged.cli.bench_run import Outcome
from edged.cli.exit_codes import ExitCode
from edged.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("text", "mean"),
    [
        ("40", 40),
        ("uniform:10:70", 40),
        ("normal:40:5", 40),
        ("exponential:40", 40),
        ("lognormal:40:0.1", 40),
    ],
)
def test_lengths_have_their_mean_and_their_text(text, mean):
    lengths = Lengths.parse(text)
    assert str(lengths) == text
    numbers = random.Random(1)
    drawn = [lengths.draw(numbers) for _ in range(3000)]
    assert statistics.mean(drawn) == pytest.approx(mean, rel=0.06)
    assert min(drawn) >= lengths.least >= 1
    assert lengths.most is None or max(drawn) <= lengths.most


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-3",
        "4.5",
        "uniform",
        "uniform:1",
        "uniform:9:1",
        "uniform:0.2:0.8",
        "uniform:1:2:3",
        "gamma:3",
        "normal:a:b",
        "exponential:0",
        "normal:nan:1",
    ],
)
def test_what_is_no_distribution_is_refused(text):
    with pytest.raises(ValueError, match=r"no distribution|ends before|lengths of 0"):
        Lengths.parse(text)


def test_a_load_is_its_seeds_and_arrives_at_its_rate():
    load = Load(2000, Lengths.parse("uniform:10:50"), Lengths.parse("20"), rate=8.0, shared_prefix=10, seed=3)
    plan = list(load.plan(range(100, 200), 512))
    assert plan == list(load.plan(range(100, 200), 512))
    assert plan[-1].at == pytest.approx(2000 / 8, rel=0.1)
    assert [request.at for request in plan] == sorted(request.at for request in plan)
    assert len({request.prompt[:10] for request in plan}) == 1
    assert len({request.prompt for request in plan if len(request.prompt) > 14}) > 1500
    assert all(10 <= len(request.prompt) <= 50 and request.output_tokens == 20 for request in plan)
    assert cuts(plan, 512, 10) == []


@pytest.mark.parametrize(
    ("prompt", "output", "prefix", "said"),
    [
        ("600", "64", 0, "reach 664 tokens together, and the model's context_length is 512"),
        ("500", "64", 0, "reach 564 tokens"),
        ("512", "exponential:9", 0, "reach 513 tokens"),
        ("lognormal:40:1", "512", 0, "reach 513 tokens"),
        ("uniform:10:500", "uniform:1:13", 0, "reach 513 tokens"),
        ("128", "64", 5000, "--shared-prefix 5000 does not fit prompts of 128 tokens"),
        ("uniform:5:50", "64", 6, "a prefix of at most 5"),
        ("exponential:90", "64", 449, "a prefix of at most 448"),
    ],
)
def test_a_load_that_the_context_would_make_another_one_is_refused(prompt, output, prefix, said):
    load = Load(3, Lengths.parse(prompt), Lengths.parse(output), shared_prefix=prefix)
    with pytest.raises(InvalidArgumentError, match=re.escape(said)):
        load.plan(range(9), 512)


@pytest.mark.parametrize(
    ("prompt", "output"), [("448", "64"), ("500", "uniform:1:12"), ("uniform:64:448", "64"), ("511", "1")]
)
def test_a_load_that_just_fits_is_not_cut(prompt, output):
    load = Load(50, Lengths.parse(prompt), Lengths.parse(output), shared_prefix=64)
    plan = list(load.plan(range(9), 512))
    assert not any(request.is_cut for request in plan)
    assert cuts(plan, 512, 64) == []


@pytest.mark.parametrize(
    ("prompt", "output"),
    [
        ("lognormal:300:4", "64"),
        ("400", "exponential:200"),
        ("exponential:300", "exponential:300"),
        ("normal:400:200", "uniform:50:64"),
    ],
)
def test_lengths_without_an_end_are_cut_to_the_context_and_said_to_be(prompt, output):
    load = Load(200, Lengths.parse(prompt), Lengths.parse(output), shared_prefix=30)
    plan = list(load.plan(range(9), 512))
    assert all(len(request.prompt) + request.output_tokens <= 512 for request in plan)
    cut = [request for request in plan if request.is_cut]
    assert 0 < len(cut) < 200
    assert all(sum(request.drawn) > 512 for request in cut)
    if load.output_tokens.most is not None:
        assert all(request.output_tokens == request.drawn[1] for request in plan), "the prompt gave way"
    if load.prompt_tokens.most is not None:
        assert {len(request.prompt) for request in plan} == {400}, "the answer gave way"
    said = cuts(plan, 512, 30)
    assert said[0].startswith(f"{len(cut)} of 200 requests were cut to the context of 512 tokens")
    short = sum(len(request.prompt) < 30 for request in plan)
    assert [line.split()[0] for line in said[1:]] == ([str(short)] if short else [])


def test_figures_are_what_they_are_called():
    values = [index / 1000 for index in range(1, 201)]
    found = distribution(random.Random(1).sample(values, 200))
    assert (found["p50"], found["p90"], found["p99"], found["max"]) == (0.1, 0.18, 0.198, 0.2)
    assert distribution([]) == {"count": 0}
    good = Outcome(0, 1.0, 30, 16, [1.5, 1.6, 1.9], [1.5, 1.6, 1.6, 1.9], 2.0)
    bad = Outcome(1, 1.0, 30, 0, [], [], 4.0, "UNAVAILABLE", "gone")
    assert message_gaps(good) == pytest.approx([0.1, 0.3])
    result = figures([good, bad])
    assert result["requests"] == {"OK": 1, "UNAVAILABLE": 1}
    assert result["output_tokens_per_second"] == 1.0
    assert result["output_tokens_per_message"] == pytest.approx(4 / 3)
    assert result["inter_token_latency_seconds"]["max"] == pytest.approx(0.3)
    times = result["time_per_output_token_seconds"]
    assert (times["count"], times["p50"]) == (1, pytest.approx(0.4 / 3))
    assert result["time_to_first_token_seconds"]["p50"] == 0.5
    assert result["request_seconds"]["max"] == 1.0
    assert (result["prompt_tokens"], result["cached_tokens"]) == (30, 16)


def test_a_closed_and_an_open_loop_against_the_daemon(edgectl, daemon, tmp_path):
    address = ("--address", daemon.address)
    result = edgectl(
        "bench", *address, "-n", "6", "-c", "3", "--prompt-tokens", "uniform:70:90", "--output-tokens", "5",
        "--shared-prefix", "65", "--json", tmp_path / "run.json", "--plot", tmp_path / "run.svg", timeout=120,
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "6 OK in" in result.out
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["settings"]["concurrency"] == 3
    assert run["figures"]["output_tokens"] == 30
    assert run["figures"]["time_to_first_token_seconds"]["count"] == 6
    assert run["figures"]["inter_token_latency_seconds"]["count"] == 24
    assert run["figures"]["cached_tokens"] >= 3 * 64, (
        "those that were not sent at once found the common beginning"
    )
    assert [len(request["token_seconds"]) for request in run["requests"]] == [5] * 6
    assert ET.parse(tmp_path / "run.svg").getroot().tag.endswith("svg")
    opened = edgectl(
        "bench",
        *address,
        "-n",
        "4",
        "--rate",
        "20",
        "--output-tokens",
        "3",
        "--prompt-tokens",
        "8",
        timeout=120,
    )
    assert opened.code == 0, opened.err
    assert "20 requests a second" in opened.out


def test_requests_that_fail_are_counted_and_tell_the_exit_status(edgectl, daemon):
    result = edgectl(
        "bench",
        "--address",
        daemon.address,
        "-n",
        "2",
        "--output-tokens",
        "800",
        "--timeout",
        "0.3",
        timeout=120,
    )
    assert result.code == 1
    assert "2 DEADLINE_EXCEEDED" in result.out


def test_a_load_is_refused_or_says_how_the_context_cut_it(edgectl, daemon, tmp_path):
    address = ("--address", daemon.address)
    result = edgectl("bench", *address, "-n", "3", "--prompt-tokens", "9000")
    assert result.code == ExitCode.REFUSED
    assert "--prompt-tokens 9000 and --output-tokens 64 reach 9064 tokens" in result.err
    assert result.out == ""
    result = edgectl(
        "bench", *address, "-n", "3", "--prompt-tokens", "8", "--output-tokens", "exponential:3",
        "--shared-prefix", "4", timeout=120,
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "cut to the context" not in result.out
    result = edgectl(
        "bench", *address, "-n", "1", "--prompt-tokens", "lognormal:3000:0.1", "--output-tokens", "1",
        "--json", tmp_path / "cut.json", timeout=240,
    )  # fmt: skip
    assert result.code == 0, result.err
    said = "1 of 1 requests were cut to the context of"
    assert said in result.out
    assert said in result.err
    assert said in json.loads((tmp_path / "cut.json").read_text())["notices"][0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rate", "3", "-c", "2"], "goes without --concurrency"),
        (["--rate", "0"], "is above 0"),
        (["--prompt-tokens", "many"], "no distribution of lengths"),
        (["--requests", "0"], "--requests"),
    ],
)
def test_a_load_that_makes_no_sense_is_refused(edgectl, arguments, said):
    result = edgectl("bench", *arguments)
    assert result.code == ExitCode.USAGE
    assert said in result.err
