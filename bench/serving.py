"""Figures of many clients on one daemon: the demo model, this machine's CPU.

    python bench/serving.py [--json FILE] [--model FOLDER] [--rounds N]

Each figure is a ratio within one run, the median of the rounds. `streams4_vs_one`: time a token of 4 concurrent streams
together over that of one stream. `prefill_gap_vs_median`: a stream's worst gap between two tokens while a prompt of 2000
tokens is prefilled, over its median gap without one. `cached_ttft_vs_cold`: time to first token of a prompt of 2000
tokens that was asked before, over that of one that was not. `schedule_32_us`: Python's time for one step of 32
sequences with page tables, in microseconds: making the batch, and keeping the books after it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from _report import add_json_option, environment, report
from _serving import serving
from daemon import demo_model

from edged.client import Chunk, Client

if TYPE_CHECKING:
    from collections.abc import Sequence

BOUNDS = {
    "streams4_vs_one": "<= 0.5",
    "prefill_gap_vs_median": "<= 3",
    "cached_ttft_vs_cold": "<= 0.1",
    "schedule_32_us": "<= 200",
}
PROMPT = 2000
CONTEXT = 4096
SEQUENCES = 4
ON = {"temperature": 0.0, "ignore_eos": True}


def prompt_of(seed: int, tokens: int) -> list[int]:
    """A prompt that shares no page with that of another seed."""
    numbers = random.Random(seed)  # noqa: S311 - test data
    return [numbers.randrange(100, 40_000) for _ in range(tokens)]


def token_times(client: Client, prompt: Sequence[int], tokens: int) -> list[float]:
    """When each token of an answer came, seconds of ``time.perf_counter()``."""
    return [
        time.perf_counter()
        for event in client.generate(prompt, max_tokens=tokens, **ON)  # type: ignore[arg-type]
        if isinstance(event, Chunk) and event.token_ids
    ]


def seconds_a_token(address: str, streams: int, tokens: int, seed: int) -> float:
    """Time of one token while so many streams run: the time between the last first and the first last token."""
    times: list[list[float]] = [[] for _ in range(streams)]

    def run(index: int) -> None:
        with Client(address) as client:
            times[index] = token_times(client, prompt_of(seed + index, 32), tokens)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    count = sum(begin < moment <= end for each in times for moment in each)
    return (end - begin) / count


def gap_ratio(address: str, seed: int) -> tuple[float, float]:
    """Worst gap of a stream while a long prompt is prefilled over its median gap; and that prompt's time to first token."""
    with Client(address) as client, Client(address) as other:
        times: list[float] = []
        begun = threading.Event()

        def stream() -> None:
            for event in client.generate(prompt_of(seed, 32), max_tokens=1500, **ON):  # type: ignore[arg-type]
                if isinstance(event, Chunk) and event.token_ids:
                    times.append(time.perf_counter())
                    if len(times) == 60:
                        begun.set()
                    if enough.is_set():
                        return

        enough = threading.Event()
        thread = threading.Thread(target=stream)
        thread.start()
        begun.wait(120)
        start = time.perf_counter()
        first = token_times(other, prompt_of(seed + 1, PROMPT), 1)[0]
        enough.set()
        thread.join()
    gaps = [(later - earlier, later) for earlier, later in pairwise(times)]
    quiet = [gap for gap, at in gaps if at < start][10:]
    busy = [gap for gap, at in gaps if start <= at <= first]
    return max(busy) / statistics.median(quiet), first - start


def first_token_seconds(client: Client, prompt: Sequence[int]) -> float:
    """Time to first token."""
    start = time.perf_counter()
    return token_times(client, prompt, 1)[0] - start


def schedule_us(sequences: int = 32, steps: int = 2000) -> float:
    """Median time of Python for one step, in microseconds."""
    from edged.decoding.answer import Answer
    from edged.decoding.sampling import Sampling
    from edged.decoding.stops import Stops
    from edged.executor.base import ExecutorLimits
    from edged.scheduler.holdings import Holdings
    from edged.scheduler.request import Request
    from edged.scheduler.scheduler import Scheduler

    class NoText:
        def feed(self, _token_id: int) -> str:
            return ""

        def flush(self) -> str:
            return ""

    limits = ExecutorLimits(4096 + sequences, sequences, 32_768, 512 * sequences, 50_000)
    scheduler = Scheduler(
        limits, prefill_chunk=4096, queue_capacity=64, prefill_share=0.5, holdings=Holdings(limits.pages)
    )
    for index in range(sequences):
        answer = Answer(NoText(), Stops(20_000))  # type: ignore[arg-type]
        sampling = Sampling(temperature=0.8, seed=index)
        scheduler.submit(
            Request(str(index), prompt_of(index, 4000), sampling, answer, max_tokens=20_000), 0.0
        )
    taken: list[float] = []
    while len(taken) < steps:
        begin = time.perf_counter()
        batch = scheduler.next_batch(0.0)
        middle = time.perf_counter()
        assert batch is not None
        decodes = scheduler.prompt_tokens == 0
        after = time.perf_counter()
        scheduler.stepped(0.01)
        end = time.perf_counter()
        for request in scheduler.drawing:
            request.accept(7)
        if decodes:
            taken.append((middle - begin + end - after) * 1e6)
    return statistics.median(taken)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json_option(parser)
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="a model folder (default: the demo model)"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each measurement (default: 3)")
    options = parser.parse_args()
    surroundings = environment(rounds=options.rounds)
    figures: dict[str, float] = {}
    with (
        demo_model(options.model) as model,
        serving(model, context=CONTEXT, sequences=SEQUENCES) as (_, address),
        Client(address) as client,
    ):
        client.wait_ready(timeout=120)
        pairs, gaps, waits, cold, cached = [], [], [], [], []
        for turn in range(options.rounds):
            seed = 1000 * (turn + 1)
            one = seconds_a_token(address, 1, 60, seed)
            four = seconds_a_token(address, 4, 60, seed + 100)
            pairs.append((four / one, one, four))
            prompt = prompt_of(seed + 200, PROMPT)
            cold.append(first_token_seconds(client, prompt))
            cached.append(first_token_seconds(client, prompt))
            ratio, wait = gap_ratio(address, seed + 300)
            gaps.append(ratio)
            waits.append(wait)
    figures["streams4_vs_one"] = statistics.median(ratio for ratio, _, _ in pairs)
    figures["one_stream_tokens_per_second"] = 1 / statistics.median(one for _, one, _ in pairs)
    figures["four_streams_tokens_per_second"] = 1 / statistics.median(four for _, _, four in pairs)
    figures["prefill_gap_vs_median"] = statistics.median(gaps)
    figures["prefill_gap_vs_median_worst"] = max(gaps)
    figures["ttft_beside_a_stream_seconds"] = statistics.median(waits)
    figures["cached_ttft_vs_cold"] = statistics.median(
        warm / first for warm, first in zip(cached, cold, strict=True)
    )
    figures["cold_ttft_seconds"] = statistics.median(cold)
    figures["schedule_32_us"] = schedule_us()
    report(figures, surroundings, file=options.json, bounds=BOUNDS)


if __name__ == "__main__":
    main()
