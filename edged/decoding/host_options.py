"""Which requests the host's sampler draws for, and what it is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.executor.host_sampler import HostOptions, HostSampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edged.decoding.sampling import Sampling
    from edged.decoding.stops import Stops
    from edged.executor.host_sampler import AllowedTokens


def make_host_sampler(
    sampling: Sampling, stops: Stops, prompt: Sequence[int], constraint: AllowedTokens | None = None
) -> HostSampler | None:
    """The host's sampler of one request, or None where the device can draw its tokens by itself.

    Args:
        sampling: How tokens are chosen.
        stops: Says which tokens may not come early.
        prompt: Token ids.
        constraint: What it allows next.
    """
    if sampling.is_simple and not stops.min_tokens and constraint is None:
        return None
    options = HostOptions(
        min_p=sampling.min_p,
        typical_p=sampling.typical_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        penalty_window=sampling.penalty_window,
        logit_bias=sampling.logit_bias,
        bad_sequences=sampling.bad_sequences,
        min_tokens=stops.min_tokens,
        end_token_ids=stops.token_ids,
        logprobs=sampling.top_logprobs if sampling.logprobs else -1,
    )
    return HostSampler(options, prompt, constraint)
