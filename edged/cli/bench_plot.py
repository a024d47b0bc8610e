"""A load as a picture (SVG): how times are distributed, and what happened when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edged.cli.bench_report import message_gaps, token_times
from edged.errors import FailedPreconditionError
from edged.whole_file import whole_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from edged.cli.bench_run import Outcome

_SLICES = 60


def load_pyplot() -> Any:  # noqa: ANN401 - an optional package
    """matplotlib, drawing SVG.

    Raises:
        FailedPreconditionError: It is not installed.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an optional package
    except ImportError as error:
        raise FailedPreconditionError(
            "a plot needs matplotlib: pip install 'edged[bench]', or leave --plot out", field="plot"
        ) from error
    mpl.use("svg")
    import matplotlib.pyplot as plt  # noqa: PLC0415 - after the choice of what it draws with

    return plt


def draw(outcomes: Sequence[Outcome], title: str, file: Path) -> None:
    """Write the picture.

    Args:
        outcomes: The requests.
        title: Stands above.
        file: Where it goes.

    Raises:
        FailedPreconditionError: matplotlib is not installed.
    """
    plt = load_pyplot()
    answered = [outcome for outcome in outcomes if outcome.code == "OK"]
    figure, (first, between, over_time) = plt.subplots(1, 3, figsize=(15, 4.2), constrained_layout=True)
    figure.suptitle(title)
    times = [outcome.first_token for outcome in answered if outcome.first_token is not None]
    _cumulative(first, {"": times}, "time to first token (ms)")
    gaps = [gap for outcome in answered for gap in message_gaps(outcome)]
    _cumulative(
        between,
        {"between messages (ITL)": gaps, "per output token (TPOT)": token_times(answered)},
        "time between messages and per token (ms)",
    )
    between.legend()
    _over_time(over_time, outcomes)
    with whole_file(file) as opened:
        figure.savefig(opened, format="svg")
    plt.close(figure)


def _cumulative(axes: Any, curves: Mapping[str, Sequence[float]], label: str) -> None:  # noqa: ANN401 - matplotlib's
    """Share of a curve's values up to each value."""
    for name, values in curves.items():
        ordered = sorted(value * 1e3 for value in values)
        shares = [100 * (index + 1) / len(ordered) for index in range(len(ordered))]
        axes.step(ordered, shares, where="post", label=name or None)
    for part in (50, 90, 99):
        axes.axhline(part, linewidth=0.5, linestyle=":")
    axes.set_xlabel(label)
    axes.set_ylabel("% of values")
    axes.set_ylim(0, 101)
    axes.grid(alpha=0.3)


def _over_time(axes: Any, outcomes: Sequence[Outcome]) -> None:  # noqa: ANN401 - matplotlib's
    """Tokens a second and open requests, over the run."""
    end = max((outcome.ended for outcome in outcomes), default=0.0) or 1.0
    width = end / _SLICES
    edges = [index * width for index in range(_SLICES)]
    counts = [0] * _SLICES
    for outcome in outcomes:
        for moment in outcome.token_times:
            counts[min(_SLICES - 1, int(moment / width))] += 1
    axes.step(edges, [count / width for count in counts], where="post", label="tokens a second")
    axes.set_xlabel("seconds")
    axes.set_ylabel("tokens a second")
    axes.grid(alpha=0.3)
    beside = axes.twinx()
    open_requests = [
        sum(outcome.due <= edge + width / 2 < outcome.ended for outcome in outcomes) for edge in edges
    ]
    beside.step(edges, open_requests, where="post", color="tab:orange", label="open requests")
    beside.set_ylabel("open requests", color="tab:orange")
    beside.set_ylim(bottom=0)
