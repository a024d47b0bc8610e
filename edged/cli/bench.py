"""``edgectl bench``: a load of requests, and what their clients see."""

import asyncio
import json
import math
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from edged.cli.bench_load import Lengths, Load, PlannedRequest, cuts
from edged.cli.bench_plot import draw, load_pyplot
from edged.cli.bench_report import as_rows, figures, tables
from edged.cli.bench_run import Outcome, run_load
from edged.cli.connection import connect, wait_until_serving
from edged.cli.exit_codes import ExitCode
from edged.cli.options import AddressOption, ModelOption, TimeoutOption, WaitOption
from edged.cli.progress import ProgressBars
from edged.cli.terminal import note, show
from edged.client import Client
from edged.errors import NotFoundError
from edged.v1 import control_pb2
from edged.whole_file import write_whole

_WORDS = (
    "the sea is calm and a robot walks along the shore where people build small boats of wood, paint them blue "
    "or white, and tell each other long stories about storms, islands, light houses and the birds of the north"
)
"""Prompts are made of the tokens of these words, in any order: ordinary tokens of any vocabulary, none of them special."""


def lengths(text: str | Lengths) -> Lengths:
    """The distribution that ``text`` names; a default stays as it is.

    Raises:
        typer.BadParameter: It names none.
    """
    if isinstance(text, Lengths):
        return text
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def command(
    *,
    address: AddressOption = None,
    model: ModelOption = "",
    requests: Annotated[
        int, typer.Option("--requests", "-n", metavar="N", min=1, max=1_000_000, help="Requests to send.")
    ] = 32,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            "-c",
            metavar="N",
            min=1,
            max=10_000,
            help="Closed loop: keep N requests open; a new one is sent when one has ended.",
            show_default="4",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            "-r",
            metavar="X",
            help="Open loop: requests arrive at random, X a second on average (Poisson), whatever has ended.",
            show_default=False,
        ),
    ] = None,
    prompt_tokens: Annotated[
        Lengths,
        typer.Option(
            "--prompt-tokens",
            metavar="LENGTHS",
            parser=lengths,
            help="128, uniform:LOW:HIGH, normal:MEAN:DEVIATION, lognormal:MEDIAN:SIGMA or exponential:MEAN.",
            show_default="128",
        ),
    ] = Lengths("fixed", 128),  # noqa: B008 - frozen
    output_tokens: Annotated[
        Lengths,
        typer.Option(
            "--output-tokens", metavar="LENGTHS", parser=lengths, help="Likewise.", show_default="64"
        ),
    ] = Lengths("fixed", 64),  # noqa: B008 - frozen
    shared_prefix: Annotated[
        int,
        typer.Option(
            "--shared-prefix",
            metavar="N",
            min=0,
            help="Let all prompts begin with the same N tokens, for the cache.",
        ),
    ] = 0,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="The same seed makes the same load.")] = 0,
    warm_up: Annotated[
        int,
        typer.Option("--warm-up", metavar="N", min=0, help="Requests before the load that do not count."),
    ] = 1,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Write settings, figures and every request there.",
            show_default=False,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE", help="Draw an SVG there; needs edged[bench].", show_default=False
        ),
    ] = None,
    wait: WaitOption = None,
    timeout: TimeoutOption = None,
) -> int:
    """Send a load of requests and print time to first token, per output token and between messages, and throughput.

    Times are what this client sees; those of an open loop count from when a request was due. --timeout is each
    request's deadline. Answers have exactly their drawn length, and lengths that the context cannot hold are refused;
    only those of normal, lognormal and exponential are cut to it, and the report says how many. The exit status is 1 when
    a request was not answered.
    """
    if rate is not None and (concurrency is not None or not (math.isfinite(rate) and rate > 0)):
        raise typer.BadParameter("is above 0 and goes without --concurrency", param_hint="'--rate'")
    load = Load(requests, prompt_tokens, output_tokens, rate, shared_prefix, seed)
    if plot is not None:
        load_pyplot()  # said before the load is run, not after
    with connect(address) as client:
        wait_until_serving(client, wait)
        served = _find_model(client, model)
        token_ids = sorted(set(client.tokenize(_WORDS, model=model, no_special_tokens=True)))
        planned = list(load.plan(token_ids, served.context_length))
        before = client.status()
    notices = cuts(planned, served.context_length, shared_prefix)
    for notice in notices:
        note(notice)
    width = None if rate is not None else (concurrency or 4)
    _warm_up(planned, warm_up, address, model)
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    outcomes = _run(planned, address, model, width, timeout)
    result = figures(outcomes)
    loop = f"{rate:g} requests a second" if rate is not None else f"{width} at once"
    title = f"{served.name}: {requests} requests, {loop}, prompts {prompt_tokens}, answers {output_tokens}"
    show(title, *notices, *tables(result))
    if json_file is not None:
        settings: dict[str, Any] = {
            "model": served.name,
            "requests": requests,
            "concurrency": width,
            "rate": rate,
            "prompt_tokens": str(prompt_tokens),
            "output_tokens": str(output_tokens),
            "shared_prefix": shared_prefix,
            "seed": seed,
            "timeout_seconds": timeout,
            "started": started,
        }
        daemon = {
            "version": before.version,
            "executor": served.executor,
            "device": served.device,
            "dtype": served.dtype,
            "context_length": served.context_length,
            "max_sequences": served.max_sequences,
        }
        content = {
            "settings": settings,
            "daemon": daemon,
            "notices": notices,
            "figures": result,
            "requests": as_rows(outcomes),
        }
        write_whole(json_file, json.dumps(content, indent=1) + "\n")
    if plot is not None:
        draw(outcomes, title, plot)
    return ExitCode.DONE if set(result["requests"]) == {"OK"} else ExitCode.NO


def _find_model(client: Client, name: str) -> control_pb2.ModelStatus:
    """The model's part of the status."""
    models = client.status().models
    found = next((model for model in models if model.name == name or not name), None)
    if found is None:
        raise NotFoundError(
            f"no model is called {name}: there are {', '.join(m.name for m in models)}", field="model"
        )
    return found


def _warm_up(planned: list[PlannedRequest], count: int, address: str | None, model: str) -> None:
    """Run short requests that do not count; what goes wrong is seen in the load itself."""
    short = [PlannedRequest(each.index, 0.0, each.prompt[:8], 4, (8, 4)) for each in planned[:count]]
    if short:
        asyncio.run(
            run_load(short, address=address, model=model, concurrency=1, timeout=60.0, on_done=lambda _: None)
        )


def _run(
    planned: list[PlannedRequest],
    address: str | None,
    model: str,
    concurrency: int | None,
    timeout: float | None,
) -> list[Outcome]:
    """Run the load and show how far it is."""
    done = 0
    with ProgressBars("bench") as bars:

        def on_done(_outcome: Outcome) -> None:
            nonlocal done
            done += 1
            bars.report("requests", done, len(planned))

        return asyncio.run(
            run_load(
                planned,
                address=address,
                model=model,
                concurrency=concurrency,
                timeout=timeout,
                on_done=on_done,
            )
        )
