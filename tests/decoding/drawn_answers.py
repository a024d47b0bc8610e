"""Random answers of grammars, token by token, over a vocabulary of letters."""

from __future__ import annotations

import json
import random

import llguidance
import numpy as np

from edged.decoding.constraints.base import LIMITS
from edged.decoding.constraints.checker import _END, Vocabulary, check, small_tokenizer

VOCABULARY = Vocabulary().tokens


def matcher(schema):
    """A schema's grammar at its start."""
    grammar = check("json_schema", schema if isinstance(schema, str) else json.dumps(schema))
    return llguidance.LLMatcher(
        small_tokenizer(), grammar, log_level=0, limits=llguidance.LLParserLimits(**LIMITS)
    )


def takes(start, text):
    """Whether a text as a whole has the form."""
    taken, data = start.deep_copy(), list(text.encode())
    if taken.validate_tokens(data) != len(data):
        return False
    taken.consume_tokens(data)
    return taken.is_accepting() or (taken.is_stopped() and not taken.is_error())


def allowed_tokens(matcher):
    """The tokens that may come next, of a matcher's mask."""
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()


def drawn(start, generator, most=60):
    """A random answer; None if it did not come to its end."""
    taken, tokens = start.deep_copy(), []
    while not taken.is_stopped():
        allowed = allowed_tokens(taken)
        token = _END if _END in allowed and generator.random() < 0.5 else generator.choice(allowed)
        if token == _END:
            break
        if len(tokens) == most:
            return None
        taken.consume_token(token)
        tokens.append(token)
        if taken.is_error():
            return None  # a limit; the engine ends such an answer with an error
    return b"".join(VOCABULARY[token] for token in tokens).decode()


def walks(grammar, tokenizer, count, seed=0, most=400):
    """Random answers of a grammar: texts, and whether each came to its end."""
    generator = random.Random(seed)
    start = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=llguidance.LLParserLimits(**LIMITS))
    for _ in range(count):
        matcher, taken = start.deep_copy(), []
        while len(taken) < most and not matcher.is_stopped():
            allowed = allowed_tokens(matcher)
            assert not matcher.is_error(), matcher.get_error()
            token = _END if _END in allowed and generator.random() < 0.5 else generator.choice(allowed)
            if token == _END:
                break
            assert matcher.consume_token(token)
            taken.append(token)
        text = b"".join(VOCABULARY[token] for token in taken).decode(errors="replace")
        yield text, len(taken) < most
