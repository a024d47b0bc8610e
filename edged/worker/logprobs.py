"""Log probabilities of drawn tokens, as the daemon is told them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.worker.messages import TokenLogprobs

if TYPE_CHECKING:
    from edged.decoding.detokenizer import TokenTexts
    from edged.executor.host_sampler import HostSampler, Logprobs


def last_logprobs(host: HostSampler | None, texts: TokenTexts) -> tuple[TokenLogprobs, ...]:
    """Those of the token that ``host`` drew last; none where the request does not ask for them."""
    found = None if host is None else host.logprobs
    return () if found is None else (token_logprobs(found, texts),)


def token_logprobs(found: Logprobs, texts: TokenTexts) -> TokenLogprobs:
    """Those of one token."""
    pieces = (texts.token_text(token_id) for token_id in found.top_ids)
    encoded = tuple(piece if isinstance(piece, bytes) else piece.encode() for piece in pieces)
    return TokenLogprobs(found.chosen, found.top_ids, found.top, encoded)
