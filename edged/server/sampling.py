"""Reading the sampling parameters of a request, and saying those in force."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edged.errors import InvalidArgumentError
from edged.proto_fields import single_fields
from edged.v1 import types_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from edged.decoding.sampling import Sampling

MOST_BAD_WORDS = 256
LONGEST_BAD_WORD = 1024
_SENT_AS_THEY_ARE = single_fields(types_pb2.Sampling)


def given_sampling(
    sampling: types_pb2.Sampling, encode: Callable[[str], list[int]] | None = None
) -> dict[str, Any]:
    """What a request says, as arguments of :func:`edged.decoding.sampling.resolve_sampling`.

    Args:
        sampling: Of the request.
        encode: Gives the token ids of a bad word, nothing added.

    Raises:
        InvalidArgumentError: A bad word is empty or too long, or there are too many.
    """
    fields = sampling.ListFields()
    given = {field.name: value for field, value in fields if field.name in _SENT_AS_THEY_ARE}
    if sampling.logit_bias:
        given["logit_bias"] = dict(sampling.logit_bias)
    sequences = [list(each.ids) for each in sampling.bad_token_ids]
    if sampling.bad_words and encode is not None:
        sequences += _bad_words(sampling.bad_words, encode)
    if sequences:
        given["bad_token_ids"] = sequences
    return given


def _bad_words(words: Any, encode: Callable[[str], list[int]]) -> list[list[int]]:  # noqa: ANN401 - a repeated field
    """Token ids of each word, at the start of a text and after a space."""
    if len(words) > MOST_BAD_WORDS:
        raise InvalidArgumentError(
            f"sampling.bad_words has {len(words)} texts, and at most {MOST_BAD_WORDS} are allowed; send fewer",
            field="sampling.bad_words",
        )
    sequences = []
    for index, word in enumerate(words):
        size = len(word.encode())
        if not 1 <= size <= LONGEST_BAD_WORD:
            raise InvalidArgumentError(
                f"sampling.bad_words[{index}] has {size} bytes; give 1 to {LONGEST_BAD_WORD}",
                field=f"sampling.bad_words[{index}]",
            )
        sequences += [encode(text) for text in dict.fromkeys((word, " " + word.lstrip(" ")))]
    return sequences


def sampling_in_force(sampling: Sampling) -> types_pb2.Sampling:
    """The message that says what a request was resolved to; bad words as the token ids that they became."""
    return types_pb2.Sampling(
        **{name: getattr(sampling, name) for name in _SENT_AS_THEY_ARE},
        logit_bias=dict(sampling.logit_bias),
        bad_token_ids=[types_pb2.TokenIds(ids=sequence) for sequence in sampling.bad_sequences],
    )
