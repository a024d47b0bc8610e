"""What a constraint costs: the time between two steps' tokens with a grammar over that without, in one run.

    python bench/constraints.py [--json FILE] [--model FOLDER] [--dtype float32] [--rounds N] [--tokens N]

`NAME_vs_plain` is the median time between chunks that a client sees, sampled at temperature 0.8, over that of an answer
without a form; `forced_share` is the part of the tokens of `object` that took no step. `compile_seconds` is the first
answer's time to its first chunk less that of a later one with the same form.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from _report import add_json_option, environment, report
from _serving import serving
from daemon import demo_model

from edged.client import Chunk, Client, Finished

PROMPT = "A list of the robots in the house, what they do and where they are: "
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 30},
        "task": {"enum": ["clean", "cook", "carry", "guard"]},
        "battery": {"type": "integer", "minimum": 0, "maximum": 100},
        "position": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
    },
    "required": ["name", "task", "battery", "position"],
    "additionalProperties": False,
}
FORMS: dict[str, dict[str, Any]] = {
    "object": {"json_schema": {"type": "array", "items": ITEM, "minItems": 100}},
    "any_json": {"json_schema": {"type": "array", "items": {"type": "string"}, "minItems": 100}},
    "regex": {"regex": r"([A-Z][a-z' ]{2,80}[.?!]\n?){100}"},
    "grammar": {"lark": 'start: line+\nline: WORD (" " WORD)* "\\n"\nWORD: /[a-zA-Z0-9,.]{1,12}/'},
}
BOUNDS = {f"{name}_vs_plain": "<= 1.10" for name in FORMS} | {"compile_seconds": "<= 1"}


def one_answer(
    client: Client,
    tokens: int,
    seed: int,
    **options: Any,  # noqa: ANN401 - generate's own
) -> tuple[list[float], float, Finished]:
    """Times between the chunks of one answer in ms, seconds to its first, and its end."""
    begin = last = time.perf_counter()
    first, gaps, end = 0.0, [], None
    for event in client.generate(PROMPT, max_tokens=tokens, temperature=0.8, seed=seed, **options):
        now = time.perf_counter()
        if isinstance(event, Chunk):
            if first:
                gaps.append((now - last) * 1e3)
            first = first or now - begin
            last = now
        elif isinstance(event, Finished):
            end = event
    assert end is not None
    return gaps, first, end


def measure(model: Path, dtype: str, rounds: int, tokens: int) -> dict[str, float]:
    """Start a daemon and take every form in turn, so that what else the machine does falls on all of them."""
    gaps: dict[str, list[float]] = {name: [] for name in ("plain", *FORMS)}
    forced = taken = 0
    with serving(model, dtype) as (_, address), Client(address) as client:
        client.wait_ready(timeout=120)
        one_answer(client, 8, 0)
        _, cold, _ = one_answer(client, 8, 0, **FORMS["object"])
        _, warm, _ = one_answer(client, 8, 0, **FORMS["object"])
        for seed in range(rounds):
            gaps["plain"] += one_answer(client, tokens, seed, ignore_eos=True)[0]
            for name, options in FORMS.items():
                found, _, end = one_answer(client, tokens, seed, **options)
                gaps[name] += found
                if name == "object":
                    taken += end.usage.generated_tokens
                    forced += end.usage.generated_tokens - end.timings.steps
    plain = statistics.median(gaps["plain"])
    figures = {f"{name}_vs_plain": statistics.median(gaps[name]) / plain for name in FORMS}
    return figures | {
        "plain_itl_ms": plain,
        "compile_seconds": cold - warm,
        "forced_share": forced / taken,
    }


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
    parser.add_argument("--rounds", type=int, default=4, metavar="N")
    parser.add_argument("--tokens", type=int, default=96, metavar="N", help="of each answer (default: 96)")
    options = parser.parse_args()
    surroundings = environment(dtype=options.dtype, rounds=options.rounds, tokens=options.tokens)
    with demo_model(options.model) as model:
        figures = measure(model, options.dtype, options.rounds, options.tokens)
    report(figures, surroundings, file=options.json, bounds=BOUNDS)


if __name__ == "__main__":
    main()
