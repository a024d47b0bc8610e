"""Prompts that a draft's training lets its model go on from: pieces of text, as they are and as a user's requests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from edged.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Container

    import numpy.typing as npt

    from edged.checkpoint.chat_template import ChatTemplate
    from edged.checkpoint.tokenizer import Tokenizer

_REQUESTS = (
    "{piece}",
    "Summarize this text:\n\n{piece}",
    "Explain this in simple words: {piece}",
    "Continue this text: {piece}",
    "What is this text about?\n\n{piece}",
    "List the most important points of this text:\n\n{piece}",
    "Rewrite this in other words:\n\n{piece}",
    "Write a short story that begins with: {piece}",
    "Ask three questions about this text and answer them:\n\n{piece}",
    "Quote this passage back to me, word for word:\n\n{piece}",
    "What is {words}?",
    "Tell me about {words}.",
    "How does {words} work? Explain it step by step.",
    "Write a short story about {words}.",
    "Give me five ideas for {words}.",
    "Why is {words} important?",
)
"""What users ask of a text, or about something that it names."""
_MARK = "edged-9f2c1b"
_MARKS = ".,;:!?()[]{}<>\"'`*_=-#|"
_WORD = re.compile(r"\S+\s*")
_SPACE = re.compile(r"\s+")
_WORD_CHARACTERS = 16
"""More than a word has on the average, and the space behind it."""


@dataclass(frozen=True)
class Prompts:
    """Token ids int32 ``[S, P]``, filled up with zeros, and how many of each are the prompt, int32 ``[S]``."""

    ids: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def of(cls, found: list[list[int]]) -> Prompts:
        """Some prompts, in rising order of their length."""
        found = sorted(found, key=len)
        lengths = np.array([len(each) for each in found], np.int32)
        ids = np.zeros((len(found), int(lengths.max())), np.int32)
        for row, each in zip(ids, found, strict=True):
            row[: len(each)] = each
        return cls(ids, lengths)

    def lists(self) -> list[list[int]]:
        """Each by itself."""
        return [row[:length].tolist() for row, length in zip(self.ids, self.lengths, strict=True)]


def make_prompts(
    documents: list[str],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    *,
    count: int,
    most_tokens: int,
    chat_share: float,
    seed: int,
) -> Prompts:
    """Cut prompts of various lengths out of documents, in rising order of their length.

    Args:
        documents: Text.
        tokenizer: The model's.
        template: The model's chat template; None: no prompt is a chat.
        count: How many.
        most_tokens: Of a prompt.
        chat_share: Part of them that are a user's request in the chat template.
        seed: Of every choice.

    Raises:
        InvalidArgumentError: The text has too few words for so many prompts.
    """
    r = np.random.default_rng(seed)
    ends = np.cumsum([len(document) for document in documents])
    total = int(ends[-1]) if documents else 0
    needed = count * most_tokens // 2  # pieces may overlap, but shall not be the same ones again and again
    if total < needed:
        raise InvalidArgumentError(
            f"the text has {total} characters: {count} prompts of up to {most_tokens} tokens need at least {needed}; give "
            "more text, or fewer or shorter prompts",
            field="text",
        )
    found: list[list[int]] = []
    for number in range(count):
        at = int(r.integers(total))
        document = int(np.searchsorted(ends, at, side="right"))
        offset = at - int(ends[document] - len(documents[document]))
        words = _words_from(documents[document], offset, most_tokens)
        wanted = int(r.integers(max(2, most_tokens // 8), most_tokens + 1))
        request = _REQUESTS[int(r.integers(len(_REQUESTS)))]
        chat = (template, request) if template and number < round(chat_share * count) else None
        found.append(_fitting(words, tokenizer, chat, wanted=wanted, most=most_tokens))
    return Prompts.of(found)


def chat_frame(tokenizer: Tokenizer, template: ChatTemplate) -> tuple[list[int], list[int]] | None:
    """The tokens before and behind what a user says in a chat; None where nothing stands before it, or it is changed."""
    rendered = template.render([{"role": "user", "content": _MARK}], add_generation_prompt=True)
    before, found, after = rendered.partition(_MARK)
    if not found or not before or _MARK in after:
        return None
    return tokenizer.encode_chat(before), tokenizer.encode(after, add_special_tokens=False)


def asked(drawn: list[int], frame: tuple[list[int], list[int]], endings: Container[int]) -> list[int] | None:
    """A chat whose user says what was drawn, up to where the turn ends; None where nothing was said.

    Args:
        drawn: Tokens behind the frame's first part.
        frame: Of :func:`chat_frame`.
        endings: Tokens that end a turn.
    """
    before, after = frame
    end = next((place for place, token in enumerate(drawn) if token in endings), len(drawn))
    return [*before, *drawn[:end], *after] if end > 1 else None


def _fitting(
    words: list[str],
    tokenizer: Tokenizer,
    chat: tuple[ChatTemplate, str] | None,
    *,
    wanted: int,
    most: int,
) -> list[int]:
    """A prompt of about ``wanted`` and at most ``most`` tokens out of the first of some words; a chat as template and request."""
    if chat is None:
        return tokenizer.encode("".join(words).strip(), parse_special=False)[:wanted]
    template, request = chat
    size = wanted
    while True:
        piece = "".join(words[:size]).strip()
        named = " ".join(sorted(piece.split()[:8], key=len)[-2:]).strip(_MARKS)
        text = request.format(piece=piece, words=named)
        rendered = template.render([{"role": "user", "content": text}], add_generation_prompt=True)
        ids = tokenizer.encode_chat(rendered)
        if len(ids) <= most or size == 1:
            return ids[-most:]  # where the template alone is longer, its end is what the model answers to
        size //= 2


def _words_from(document: str, offset: int, most: int) -> list[str]:
    """Words with the white space behind each, from near a place on: as many as a prompt could hold, at least one."""
    start = 0
    if offset:
        space = _SPACE.search(document, offset)
        start = 0 if space is None else space.end()
    found: list[str] = _WORD.findall(document[start : start + _WORD_CHARACTERS * most])
    return found or _WORD.findall(document[: _WORD_CHARACTERS * most]) or ["-"]
