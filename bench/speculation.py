"""What drafts from the prompt are worth: answers of one daemon with and without them, in turn.

    python bench/speculation.py [--json FILE] [--model FOLDER] [--dtype float32] [--threads N] [--rounds N] [--tokens N]

Times are those of decoding (`decode_seconds`), summed over the answers of a kind, the median over the rounds.
`copy_speedup` is a passage quoted back, without drafts over with them; `free_vs_plain`, `sampled_vs_plain` and `lists_vs_plain`
are stories, stories at temperature 0.8, and text that begins to repeat itself and never goes on as before, with drafts over
without. `bookkeeping_vs_step` is what choosing drafts takes of the host over a step, in text of which nothing repeats.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _report import add_json_option, environment, report
from _serving import serving
from _texts import PASSAGES, STORIES
from daemon import demo_model

from edged.client import Client, Finished

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LISTS = tuple(
    "".join(
        f"Item {100 + number}: the {colour} {thing} weighs {number * 37 % 91} kilograms and costs {number * 53 % 97} euros.\n"
        for number, (colour, thing) in enumerate(zip(colours, things, strict=True))
    )
    + "Item 108: the"
    for colours, things in (
        (
            ("red", "blue", "green", "black", "white", "brown", "grey", "pink"),
            ("box", "lamp", "chair", "robot", "table", "bell", "rope", "ship"),
        ),
        (
            ("old", "new", "small", "large", "broken", "clean", "round", "flat"),
            ("wheel", "door", "clock", "motor", "plate", "saw", "key", "pump"),
        ),
    )
)
TREE = "speculation: {method: prompt_lookup, tree_size: 16}"
BOUNDS = {
    "copy_speedup": ">= 1.5",
    "free_vs_plain": "<= 1.03",
    "sampled_vs_plain": "<= 1.03",
    "lists_vs_plain": "<= 1.03",
    "bookkeeping_vs_step": "<= 0.01",
}


def quote(passage: str) -> str:
    """The demo model's chat, as text."""
    return f"<|im_start|>user\nQuote this passage back to me, word for word:\n\n{passage}<|im_end|>\n<|im_start|>assistant\n"


KINDS: Mapping[str, tuple[Sequence[str], dict[str, Any]]] = {
    "copy": (tuple(map(quote, PASSAGES)), {"temperature": 0.0, "ignore_eos": False}),
    "free": (STORIES, {"temperature": 0.0}),
    "sampled": (STORIES, {"temperature": 0.8, "seed": 1}),
    "lists": (LISTS, {"temperature": 0.8, "seed": 2}),
}


def decode(client: Client, text: str, tokens: int, options: dict[str, Any]) -> Finished:
    """One answer's end."""
    end = None
    arguments = {"ignore_eos": True, **options}
    for event in client.generate(text, max_tokens=tokens, **arguments):
        if isinstance(event, Finished):
            end = event
    assert end is not None
    return end


def one_round(
    client: Client, texts: Sequence[str], tokens: int, options: dict[str, Any]
) -> tuple[float, float, int, int]:
    """Decoding with and without drafts, answer by answer; the order of the two changes."""
    seconds = {False: 0.0, True: 0.0}
    drafted = accepted = 0
    for number, text in enumerate(texts):
        for plain in (number % 2 == 0, number % 2 == 1):
            end = decode(client, text, tokens, {**options, "no_speculation": plain})
            seconds[plain] += end.timings.decode_seconds
            drafted += end.usage.drafted_tokens
            accepted += end.usage.accepted_tokens
    return seconds[False], seconds[True], drafted, accepted


def measure(model: Path, dtype: str, threads: int, rounds: int, tokens: int) -> dict[str, float]:
    """Start a daemon and take every kind in turn, so that what else the machine does falls on all of them."""
    ratios: dict[str, list[float]] = {kind: [] for kind in KINDS}
    counts = dict.fromkeys(KINDS, (0, 0))
    plain_seconds = 0.0
    with (
        serving(model, dtype, keys=f"threads: {threads}, {TREE}") as (_, address),
        Client(address) as client,
    ):
        client.wait_ready(timeout=240)
        decode(client, STORIES[0], 8, {"temperature": 0.0})
        for _ in range(rounds):
            for kind, (texts, options) in KINDS.items():
                drafts, plain, drafted, accepted = one_round(client, texts, tokens, options)
                ratios[kind].append(drafts / plain)
                counts[kind] = (counts[kind][0] + drafted, counts[kind][1] + accepted)
                if kind == "free":
                    plain_seconds = plain / len(texts) / (tokens - 1)
    figures = {"copy_speedup": 1 / statistics.median(ratios["copy"])}
    figures |= {f"{kind}_vs_plain": statistics.median(ratios[kind]) for kind in KINDS if kind != "copy"}
    for kind, (drafted, accepted) in counts.items():
        figures[f"{kind}_drafted"], figures[f"{kind}_accepted"] = drafted, accepted
    bookkeeping = bookkeeping_seconds()
    return figures | {
        "step_ms": plain_seconds * 1e3,
        "bookkeeping_us": bookkeeping * 1e6,
        "bookkeeping_vs_step": bookkeeping / plain_seconds,
    }


def bookkeeping_seconds(prompt: int = 4096, steps: int = 2000) -> float:
    """Median time of choosing the drafts of a step and of learning from it, one stream, text without repetition."""
    import numpy as np

    from edged.decoding.answer import Answer
    from edged.decoding.sampling import Sampling
    from edged.decoding.stops import Stops
    from edged.scheduler.drafting import Drafting
    from edged.scheduler.request import Request
    from edged.speculation.prompt_lookup import PRIOR_RATES, PromptLookup
    from edged.speculation.speculator import Speculator

    class NoText:
        def feed(self, token_id: int) -> str:  # noqa: ARG002 - as a detokenizer has it
            return ""

        def flush(self) -> str:
            return ""

    numbers = random.Random(0)  # noqa: S311 - a bench's numbers
    answer: Any = Answer(NoText(), Stops(2 * steps))  # type: ignore[arg-type] # a detokenizer for this bench
    tokens = np.array([numbers.randrange(49152) for _ in range(prompt)], np.int32)
    request = Request("r", tokens, Sampling(), answer, max_tokens=2 * steps)
    drafting = Drafting(Speculator(PromptLookup, PRIOR_RATES, tree_size=16, depth=15))
    drafting.begin(request)
    taken = []
    for _ in range(steps):
        request.accept(numbers.randrange(49152))
        before = time.perf_counter()
        drafting.draft([request], 500)
        drafting.note_step([request], 0.02)
        taken.append(time.perf_counter() - before)
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
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--tokens", type=int, default=96, metavar="N", help="of each answer (default: 96)")
    options = parser.parse_args()
    surroundings = environment(
        dtype=options.dtype, threads=options.threads, rounds=options.rounds, tokens=options.tokens
    )
    with demo_model(options.model) as model:
        figures = measure(model, options.dtype, options.threads, options.rounds, options.tokens)
    report(figures, surroundings, file=options.json, bounds=BOUNDS)


if __name__ == "__main__":
    main()
