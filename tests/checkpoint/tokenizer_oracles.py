"""Texts, and what tokenizers are held to."""

# ruff: noqa: RUF001 - texts in many scripts

from __future__ import annotations

import functools
import importlib
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
import transformers

from edged.checkpoint.gguf_import import import_gguf
from edged.decoding.detokenizer import Detokenizer

if TYPE_CHECKING:
    import gguf

    from edged.checkpoint.tokenizer import Tokenizer

regex: Any = importlib.import_module("regex")  # has no types
AutoTokenizer: Any = transformers.AutoTokenizer

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"

TEXTS = [
    "",
    "Hello, world! It's what they've said: don't.",
    "x = 12  +  345\t67\n\n\n  y=8.9e-10\r\n",
    "  two  spaces,   three, and    four    ",
    "\n\n\t \n  1\n 2\n",
    "12345678901234567890 1,234,567.89 ½ Ⅷ ١٢٣ 一二三 ２０２６",
    "中文没有空格，标点也不同。今天是2026年11月30日，气温3度。",
    "日本語のテキスト、カタカナ、ひらがな。 한국어 문장입니다. Привет, мир! مرحبا بالعالم 12",
    "👩\u200d👩\u200d👧\u200d👦 🇩🇪🙂🙃 e\u0301 \u200b\u00a0\u2028\u3000 \ufeff",
    "def f(a: int) -> str:\n    return f'{a:>{10}}'  # comment\n\n\nclass A:\n\tpass\n",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>< |im_end|><|endoftext|><file_sep>a<|im_end|",
    "I'M WE'LL 'S 'twas rock'n'roll",
    "\x00\x01\x7f\u0080ÿ",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "https://a.b/c?d=e&f=%20#g  $1,000.00 (50%) [x] {y} <z/>",
]


def corpus() -> list[str]:
    """Texts in many scripts, then programs and documents, in pieces of some kilobytes."""
    root = Path(__file__).parents[2]
    files = [
        *sorted((root / "edged").rglob("*.py"))[:20],
        *sorted(Path(tokenizers.__file__).parent.rglob("*.pyi")),
    ]
    return TEXTS + [file.read_text("utf-8")[:6000] for file in files]


class ByteLevelOracle:
    """Byte-level BPE straight from its definition, on the vocabulary of a GGUF file that the gguf library read."""

    def __init__(self, reader: gguf.GGUFReader, splits: list[str]) -> None:
        fields = reader.fields
        tokens = fields["tokenizer.ggml.tokens"].contents()
        self.ids = {token: number for number, token in enumerate(tokens)}
        pairs = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
        self.ranks = {pair: rank for rank, pair in enumerate(pairs)}
        types = fields["tokenizer.ggml.token_type"].contents()
        self.control = [token for token, kind in zip(tokens, types, strict=True) if kind in (3, 4)]
        self.splits = [regex.compile(split) for split in splits]
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        self.letters = {byte: chr(byte) for byte in printable} | {
            b: chr(256 + n) for n, b in enumerate(others)
        }

    def split(self, text: str) -> list[str]:
        pieces = [text]
        for expression in self.splits:
            pieces = [part for piece in pieces for part in cut(expression, piece)]
        return pieces

    @functools.lru_cache(maxsize=100_000)  # noqa: B019 - lives as long as the module
    def merge(self, piece: str) -> list[int]:
        # A byte without a token (SmolLM2 has none for some control characters) is lost, as in the tokenizers library.
        symbols = [letter for byte in piece.encode() if (letter := self.letters[byte]) in self.ids]
        while len(symbols) > 1:
            ranked = [
                (self.ranks.get(pair, 1 << 30), place)
                for place, pair in enumerate(itertools.pairwise(symbols))
            ]
            rank, place = min(ranked)
            if rank == 1 << 30:
                break
            symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
        return [self.ids[symbol] for symbol in symbols]

    def encode(self, text: str) -> list[int]:
        special = regex.compile("|".join(map(regex.escape, sorted(self.control, key=len, reverse=True))))
        ids: list[int] = []
        for part in cut(special, text):
            if part in self.control:
                ids.append(self.ids[part])
            else:
                ids.extend(number for piece in self.split(part) for number in self.merge(piece))
        return ids


def cut(expression: Any, text: str) -> list[str]:
    """Matches, and what lies between them."""
    parts, end = [], 0
    for match in expression.finditer(text):
        parts += [text[end : match.start()], match.group()]
        end = match.end()
    return [part for part in [*parts, text[end:]] if part]


def stream(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True) -> str:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.feed(number) for number in ids]
    pieces.append(detokenizer.flush())
    return "".join(pieces)


def written(recipe: Any, folder: Path) -> Path:
    import_gguf(recipe.write(folder / "m.gguf"), folder / "model", overwrite=True)
    return folder / "model"
