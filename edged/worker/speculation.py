"""The speculation of one model, from its configuration; and what steps of trees cost here, measured while it loads."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from edged.executor.base import SamplingRow, StepBatch
from edged.log import get_logger
from edged.speculation import expansion
from edged.speculation.eagle_draft import EagleDraft
from edged.speculation.prompt_lookup import PRIOR_RATES, PromptLookup
from edged.speculation.speculator import Speculator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edged.config import ModelConfig
    from edged.executor.base import Executor, Int32Array
    from edged.speculation.tree import Draft

_log = get_logger("engine")

_SIZES = (1, 2, 4, 8, 16, 32, 64)
_REPEATS = 2
_MOST_SECONDS = 3.0
"""Of measuring; larger trees than were measured are judged by the largest that was."""


def make_speculator(config: ModelConfig, executor: Executor) -> Speculator | None:
    """The model's speculation; None where it has none.

    Args:
        config: The model's part of the configuration.
        executor: Loaded; no page of it is in use.
    """
    speculation = config.speculation
    if speculation.method == "off" or speculation.tree_size == 1:
        return None
    make_draft: Callable[[Int32Array], Draft] = PromptLookup
    priors: Sequence[float] = PRIOR_RATES
    if executor.draft_model is not None:
        make_draft = partial(EagleDraft, model=executor.draft_model, width=speculation.width)
        priors = expansion.PRIOR_RATES
    speculator = Speculator(
        make_draft,
        priors,
        tree_size=speculation.tree_size,
        depth=speculation.most_depth,
        adaptive=speculation.adaptive,
    )
    if not speculation.adaptive:
        return speculator  # which asks for no costs
    most = min(speculation.tree_size, executor.limits.tree_tokens)
    seconds = measure_steps(executor, most)
    speculator.costs.note_loaded(seconds)
    _log.info(
        "steps of trees measured",
        model=config.name,
        milliseconds={str(size): round(1e3 * each, 3) for size, each in seconds.items()},
    )
    return speculator


def measure_steps(executor: Executor, most: int) -> dict[int, float]:
    """Seconds of steps of one sequence by their tokens, up to ``most``, as far as the time for it goes."""
    seconds: dict[int, float] = {}
    begun = time.monotonic()
    for size in sorted({*(size for size in _SIZES if size < most), most}):
        batch = _chain(size)
        taken = []
        for _ in range(_REPEATS):
            before = time.monotonic()
            executor.step(batch)
            taken.append(time.monotonic() - before)
        seconds[size] = max(min(taken), 1e-9)
        if time.monotonic() - begun > _MOST_SECONDS:
            break
    return seconds


def _chain(size: int) -> StepBatch:
    """A tree without branches on the first page."""
    rows = np.arange(size, dtype=np.int32)
    return StepBatch(
        token_ids=np.zeros(size, np.int32),
        positions=rows,
        sequence_starts=np.array([0, size], np.int32),
        lengths=np.zeros(1, np.int32),
        page_tables=[np.zeros(1, np.int32)],
        logit_rows=rows,
        sampling=[SamplingRow()] * size,
        tree_masks=np.array([(2 << node) - 1 for node in range(size)], np.uint64),
    )
