"""What a grammar allows next: computed in threads while the step runs, so that a step waits for it seldom or never.

llguidance gives the interpreter's lock back while it compiles and while it computes a mask. After each token the engine
asks for what is forced, which takes microseconds, and has the next mask computed while the model's next step runs.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from edged.decoding.constraints.base import LIMITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import llguidance

    from edged.decoding.constraints.base import Grammar
    from edged.decoding.detokenizer import TokenTexts
    from edged.executor.host_sampler import BoolArray

_THREADS = 2
_STACK_BYTES = 64 * 2**20
"""The check's process has the usual 8 MiB: what passed there passes here."""
_REMEMBERED = 32
_MOST_FORCED = 256


class GrammarCompiler:
    """Compiles the grammars of one model's requests.

    The last grammars are kept. Its view of the vocabulary takes a second to make, with the interpreter's lock held: it is
    made by :meth:`prepare`, while the model loads.

    Args:
        texts: What the tokens stand for.
        vocabulary: Token ids of the model.
    """

    def __init__(self, texts: TokenTexts, vocabulary: int) -> None:
        self._texts = texts
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._tokenizers: dict[tuple[int, ...], llguidance.LLTokenizer] = {}
        self._compiled: OrderedDict[tuple[str, tuple[int, ...]], llguidance.LLMatcher] = OrderedDict()

    def start(self, grammar: Grammar, eos_token_ids: tuple[int, ...]) -> AnswerGrammar:
        """Begin to compile; the result waits for it when it must.

        Args:
            grammar: It has passed the check.
            eos_token_ids: Tokens that end an answer where the grammar lets it end; at least one.
        """
        if self._threads is None:
            previous = threading.stack_size(_STACK_BYTES)
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
            for _ in range(_THREADS):
                self._threads.submit(threading.get_ident).result()
            threading.stack_size(previous)
        return AnswerGrammar(
            self._threads, self._threads.submit(self._compile, grammar.text, eos_token_ids), self._vocabulary
        )

    def prepare(self, eos_token_ids: tuple[int, ...]) -> None:
        """Make the view of the vocabulary for requests with these ends, so that no stream waits for it later.

        Args:
            eos_token_ids: The model's.
        """
        if eos_token_ids:
            with self._lock:
                self._tokenizer(eos_token_ids)

    def close(self) -> None:
        """Let the threads go."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, text: str, eos_token_ids: tuple[int, ...]) -> llguidance.LLMatcher:
        import llguidance  # noqa: PLC0415 - only engines that are asked for it pay for it

        key = (text, eos_token_ids)
        with self._lock:
            matcher = self._compiled.get(key)
            if matcher is not None:
                self._compiled.move_to_end(key)
                return matcher.deep_copy()
            tokenizer = self._tokenizer(eos_token_ids)
        limits = llguidance.LLParserLimits(**LIMITS)
        matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
        with self._lock:
            self._compiled[key] = matcher
            while len(self._compiled) > _REMEMBERED:
                self._compiled.popitem(last=False)
            return matcher.deep_copy()

    def _tokenizer(self, eos_token_ids: tuple[int, ...]) -> llguidance.LLTokenizer:
        """The vocabulary as llguidance sees it; the lock is held."""
        tokenizer = self._tokenizers.get(eos_token_ids)
        if tokenizer is None:
            tokenizer = _make_tokenizer(self._texts, self._vocabulary, eos_token_ids)
            self._tokenizers[eos_token_ids] = tokenizer
        return tokenizer


class AnswerGrammar:
    """Where one answer stands in its grammar.

    Args:
        threads: Compute the masks.
        compiled: The grammar at its start.
        vocabulary: Token ids of the model.
    """

    def __init__(
        self, threads: ThreadPoolExecutor, compiled: Future[llguidance.LLMatcher], vocabulary: int
    ) -> None:
        self.complete = False
        """Whether the answer has its form and nothing can follow."""
        self.error = ""
        """Why no token is allowed any more, if it is the grammar's fault."""
        self._threads = threads
        self._compiled = compiled
        self._vocabulary = vocabulary
        self._mask: Future[bytes] = threads.submit(self._compute)

    def allowed_bits(self) -> bytes:
        """A bit for each token id that says whether it may come next. Waits for the mask if it is not there yet."""
        return self._mask.result()

    def allowed(self) -> BoolArray:
        """Whether each token id may come next, bool ``[V]``. Waits for the mask if it is not there yet."""
        bits = self._mask.result()
        if not bits:
            return np.zeros(self._vocabulary, np.bool_)
        mask: BoolArray = np.unpackbits(
            np.frombuffer(bits, np.uint8), bitorder="little", count=self._vocabulary
        ).view(np.bool_)
        return mask

    def admissible(self, tokens: Sequence[int]) -> int:
        """How many of these tokens the answer may go on with, one after the other; for draft tokens."""
        self._mask.result()
        try:
            return self._compiled.result().validate_tokens(list(tokens))
        except BaseException as error:  # noqa: BLE001 - as in _compute
            self._note_fault(error)
            return 0

    def accept(self, token_id: int, *, forced: bool = True) -> list[int]:
        """The answer goes on with a token that was allowed and does not end it.

        Args:
            token_id: The token.
            forced: Whether to go on with what must follow.

        Returns:
            The tokens that must follow, which are accepted with it; none where ``forced`` is false.
        """
        self._mask.result()  # two threads may not use the matcher at once
        following: list[int] = []
        try:
            following = self._accept(self._compiled.result(), token_id, forced=forced)
        except BaseException as error:  # noqa: BLE001 - as in _compute
            self._note_fault(error)
        if not self.complete:
            self._mask = self._threads.submit(self._compute)
        return following

    def _accept(self, matcher: llguidance.LLMatcher, token_id: int, *, forced: bool) -> list[int]:
        if not matcher.consume_token(token_id):
            return []
        following: list[int] = []
        if forced and not matcher.is_stopped():
            following = matcher.compute_ff_tokens()[:_MOST_FORCED]
            if following and not matcher.consume_tokens(following):
                return []
        self.complete = matcher.is_stopped() and not matcher.is_error()
        return following

    def _compute(self) -> bytes:
        """The mask for the next token, a bit each; empty where none is allowed because of a fault."""
        try:
            matcher = self._compiled.result()
            bits = b"" if matcher.is_error() else matcher.compute_bitmask()
            if not matcher.is_error():
                return bits
            reason = " ".join(matcher.get_error().partition("<")[0].split())[:200]
            self.error = (
                self.error or f"the constraint became too complex for its limits ({reason}); simplify it"
            )
        except BaseException as error:  # noqa: BLE001 - the library's Rust panics are no Exceptions
            self._note_fault(error)
        return b""

    def _note_fault(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise error
        self.error = self.error or f"the constraint failed: {error}"


def _make_tokenizer(
    texts: TokenTexts, vocabulary: int, eos_token_ids: tuple[int, ...]
) -> llguidance.LLTokenizer:
    """The vocabulary as llguidance sees it."""
    import llguidance  # noqa: PLC0415

    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(_Vocabulary(texts, vocabulary, eos_token_ids)),
        n_vocab=vocabulary,
        eos_token=list(eos_token_ids),
        slices=llguidance.LLTokenizer.json_slices(),
    )


class _Vocabulary:
    """What llguidance wants to know of a tokenizer. Forced text is cut into the longest tokens, from its start on.

    Args:
        texts: What the tokens stand for.
        vocabulary: Token ids of the model.
        eos_token_ids: At least one.
    """

    bos_token_id = None

    def __init__(self, texts: TokenTexts, vocabulary: int, eos_token_ids: tuple[int, ...]) -> None:
        self.eos_token_id = eos_token_ids[0]
        pieces = [texts.token_text(token_id) for token_id in range(vocabulary)]
        self.tokens = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        self.special_token_ids = sorted({*texts.special_token_ids, *eos_token_ids})
        special = set(self.special_token_ids)
        self._ids = {
            piece: token_id
            for token_id, piece in reversed(list(enumerate(self.tokens)))
            if piece and token_id not in special
        }
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        found: list[int] = []
        start = 0
        while start < len(data):
            for end in range(min(len(data), start + self._longest), start, -1):
                token_id = self._ids.get(data[start:end])
                if token_id is not None:
                    found.append(token_id)
                    start = end
                    break
            else:
                return found  # a vocabulary without this byte; llguidance takes what was found
        return found
