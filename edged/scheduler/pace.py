"""How fast this model runs here, measured step by step; how much of a prompt may share a step with running streams.

A stream's next token comes when the step is over, so a piece of a prompt in the step is a pause to it. The pace keeps
the time that prompts add to a share of the step: it knows what a step of so many streams takes by itself, what a
prompt token adds, and cuts the prompt accordingly. (Cutting prompts into steps that decode: SARATHI, arXiv 2308.16369;
here the cut follows the measured times instead of a fixed number of tokens.)
"""

from __future__ import annotations

LEAST_TOKENS = 8
"""A prompt always advances by this much: its steps have a cost of their own."""
FIRST_TOKENS = 16
"""Taken beside streams before it is known what that costs."""
_MOST_GROWTH = 2
_FADE = 0.8
"""Weight of the past in the running means, for each new step."""
_OUTLIER = 4.0
"""A step that takes so many times what was expected counts only so much: the machine did something else meanwhile."""


class _Rate:
    """Seconds a token, over the last steps, each weighted with its tokens."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    @property
    def seconds(self) -> float | None:
        """Seconds of one token; None before anything was measured."""
        return self._seconds / self._tokens if self._tokens else None

    def add(self, tokens: int, seconds: float) -> None:
        known = self.seconds
        if known is not None:
            seconds = min(seconds, _OUTLIER * known * tokens)
        self._tokens = self._tokens * _FADE + tokens
        self._seconds = self._seconds * _FADE + seconds


class _Sizes:
    """What steps of prompts take, by their size.

    A step costs something before its first token, so a token of a small step costs many times one of a large step, and
    no number of small steps tells what a large one takes.
    """

    def __init__(self) -> None:
        self._rates: dict[int, _Rate] = {}  # power of two of the tokens

    def add(self, tokens: int, seconds: float) -> None:
        self._rates.setdefault(_bucket(tokens), _Rate()).add(tokens, seconds)

    def seconds(self, tokens: int) -> float | None:
        """What a step of ``tokens`` takes at least, after the size seen that is next to it; None if none was seen.

        Of a size that was not seen, the next larger one has the cheaper tokens, and the next smaller one as a whole
        takes less. So a request is refused for its deadline only on a speed that was measured.
        """
        if not self._rates:
            return None
        bucket = _bucket(tokens)
        larger = [each for each in self._rates if each >= bucket]
        if larger:
            return tokens * (self._rates[min(larger)].seconds or 0.0)
        below = max(self._rates)
        return float(2**below) * (self._rates[below].seconds or 0.0)


class Pace:
    """Measured speeds of one model.

    Args:
        prefill_share: Part of a step's time that prompts may take while streams run, above 0; 1 sets no limit.
        prefill_chunk: Most prompt tokens in a step.
    """

    def __init__(self, prefill_share: float = 1.0, prefill_chunk: int = 512) -> None:
        if not 0 < prefill_share <= 1:
            raise ValueError(f"prefill_share is above 0 and at most 1, not {prefill_share}")
        self._share = prefill_share
        self._chunk = prefill_chunk
        self._decode: dict[int, float] = {}  # power of two of the streams -> seconds of a step of them alone
        self._alone = _Sizes()  # steps of prompts without streams
        self._beside = _Rate()  # what prompt tokens add to a step of streams
        self._pieces = _Rate()  # the same, of pieces as a long prompt is cut into
        self._last = FIRST_TOKENS

    def note(self, streams: int, prompt_tokens: int, seconds: float) -> None:
        """A step ran.

        Args:
            streams: Sequences that decoded in it.
            prompt_tokens: Tokens of prompts in it.
            seconds: What it took.
        """
        if not prompt_tokens:
            self._note_decode(streams, seconds)
        elif not streams:
            self._alone.add(prompt_tokens, seconds)
        else:
            self._last = prompt_tokens
            alone = self.decode_seconds(streams)
            if alone is not None:
                added = max(seconds - alone, 0.05 * seconds)
                self._beside.add(prompt_tokens, added)
                if prompt_tokens >= LEAST_TOKENS:
                    self._pieces.add(prompt_tokens, added)

    def prompt_tokens(self, streams: int, most: int) -> int:
        """Prompt tokens that the next step may hold beside ``streams`` streams, at most ``most``."""
        if not streams or self._share == 1:
            return most
        decode = self.decode_seconds(streams)
        if decode is None:
            return 0  # a step of the streams alone tells what a step may take
        a_token = self._beside.seconds
        if a_token is None:
            return min(most, FIRST_TOKENS)
        allowed = int(decode * self._share / (1 - self._share) / a_token)
        return min(most, max(LEAST_TOKENS, min(allowed, _MOST_GROWTH * max(self._last, LEAST_TOKENS))))

    def decode_seconds(self, streams: int) -> float | None:
        """Seconds of a step of ``streams`` streams and nothing else; None if none of any number was seen."""
        known = self._decode
        if not known:
            return None
        bucket = _bucket(streams)
        if bucket in known:
            return known[bucket]
        below = [each for each in known if each < bucket]
        return known[max(below)] if below else known[min(known)]

    def prompt_seconds(self, tokens: int, streams: int) -> float | None:
        """Seconds until ``tokens`` tokens of a prompt are stored while ``streams`` streams run; None if unknown.

        Rather too few than too many, where no step of such a size was seen.
        """
        a_token = self._pieces.seconds
        if streams and self._share < 1 and a_token is not None:
            return tokens * a_token / self._share
        whole, rest = divmod(tokens, self._chunk)
        a_chunk = self._alone.seconds(self._chunk)
        if a_chunk is None:
            return None
        seconds = whole * a_chunk + ((self._alone.seconds(rest) or 0.0) if rest else 0.0)
        return seconds / self._share if streams else seconds

    def _note_decode(self, streams: int, seconds: float) -> None:
        bucket = _bucket(streams)
        known = self._decode.get(bucket)
        if known is None:
            self._decode[bucket] = seconds
        else:
            self._decode[bucket] = known * _FADE + min(seconds, _OUTLIER * known) * (1 - _FADE)


def _bucket(streams: int) -> int:
    """The power of two that ``streams`` is rounded up to: a step's time depends on little more."""
    return (streams - 1).bit_length()
