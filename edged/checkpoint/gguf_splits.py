"""How text is cut before merges, by the names that GGUF files use (``tokenizer.ggml.pre``).

The expressions are those of the models' published tokenizers, and the names those that llama.cpp gives them. A name that
is not here is refused: with a wrong rule a model still talks, only worse.
"""

from __future__ import annotations

from typing import NamedTuple

# How GPT-2 splits; every byte-level model here began from it.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Case-insensitive contractions, a leading punctuation mark joins its word, line breaks on their own; {digits} differs.
_MODERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _MODERN.format(digits=r"\p{N}{1,3}")
_QWEN2 = _MODERN.format(digits=r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


# As Tekken, with English contractions behind the word and digits by threes.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Letters and their marks together.
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
# Punctuation may lead a Latin word; symbols count as punctuation.
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


class SplitRule(NamedTuple):
    """How text is split: each expression in turn cuts out its matches and leaves the rest to the next."""

    splits: tuple[str, ...]
    ignore_merges: bool = False  # a whole piece that is in the vocabulary is taken without merging
    add_bos: bool = False  # unless the file says otherwise
    nfc: bool = False  # the model's own tokenizer composes characters first


# The letters that have a case, as DeepSeek's first tokenizer lists them.
_CASED = "".join(
    "-".join(chr(int(code, 16)) for code in part.split("-"))
    for part in [
        "41-5a",
        "61-7a",
        "b5",
        "c0-d6",
        "d8-f6",
        "f8-1ba",
        "1bc-1bf",
        "1c4-293",
        "295-2af",
        "370-373",
        "376",
        "377",
        "37b-37d",
        "37f",
        "386",
        "388-38a",
        "38c",
        "38e-3a1",
        "3a3-3f5",
        "3f7-481",
        "48a-52f",
        "531-556",
        "10a0-10c5",
        "13a0-13f5",
        "13f8-13fd",
        "1c90-1cba",
        "1cbd-1cbf",
        "1d00-1d2b",
        "1d6b-1d77",
        "1d79-1d9a",
        "1e00-1f15",
        "1f18-1f1d",
        "1f20-1f45",
        "1f48-1f4d",
        "1f50-1f57",
        "1f59",
        "1f5b",
        "1f5d",
        "1f5f-1f7d",
        "1f80-1fb4",
        "1fb6-1fbc",
        "1fbe",
        "1fc2-1fc4",
        "1fc6-1fcc",
        "1fd0-1fd3",
        "1fd6-1fdb",
        "1fe0-1fec",
        "1ff2-1ff4",
        "1ff6-1ffc",
        "2102",
        "2107",
        "210a-2113",
        "2115",
        "2119-211d",
        "2124",
        "2126",
        "2128",
        "212a-212d",
        "212f-2134",
        "2139",
        "213c-213f",
        "2145-2149",
        "214e",
        "2183",
        "2184",
        "2c00-2c7b",
        "2c7e-2ce4",
        "2ceb-2cee",
        "2cf2",
        "2cf3",
        "a640-a66d",
        "a680-a69b",
        "a722-a76f",
        "a771-a787",
        "a78b-a78e",
        "ab70-abbf",
        "fb00-fb06",
        "fb13-fb17",
        "ff21-ff3a",
        "ff41-ff5a",
        "10400-1044f",
        "104b0-104d3",
        "104d8-104fb",
        "10c80-10cb2",
        "10cc0-10cf2",
        "118a0-118df",
        "1e900-1e943",
    ]
)
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"

_DIGITS = SplitRule((r"\p{N}", GPT2))
_PLAIN = SplitRule((GPT2,))
_LLAMA3_RULE = SplitRule((_LLAMA3,), ignore_merges=True, add_bos=True)
_LLAMA3_PLAIN = SplitRule((_LLAMA3,))
_QWEN2_PLAIN = SplitRule((_QWEN2,))
_GPT4O_RULE = SplitRule((_GPT4O,))
_DEEPSEEK3_RULE = SplitRule((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3))

RULES: dict[str, SplitRule] = {
    # What llama.cpp does with files from before the name was stored.
    "default": SplitRule((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **dict.fromkeys(
        (
            "gpt-2",
            "phi-2",
            "mpt",
            "olmo",
            "gigachat",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
            "a.x-4.0",
            "mellum",
        ),
        _PLAIN,
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "codeshell", "exaone", "command-r", "minerva-7b", "mellum2"),
        _DIGITS,
    ),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        _LLAMA3_RULE,
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3_PLAIN),
    "qwen2": SplitRule((_QWEN2,), nfc=True),
    "qwen35": SplitRule((_QWEN35,), nfc=True),
    **dict.fromkeys(
        ("deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "solar-open", "grok-2", "kormo"), _QWEN2_PLAIN
    ),
    "tekken": SplitRule((_TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O_RULE),
    "deepseek-llm": SplitRule(
        (
            r"[\r\n]",
            rf"\s?[{_CASED}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _HAN,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": SplitRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3_RULE),
    "falcon": SplitRule((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), SplitRule((_WORDS,))),
    "viking": SplitRule((_WORDS, r"\p{N}")),
    "seed-coder": SplitRule((_SEED,)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), SplitRule((_BAILING,))),
    "minicpm5": SplitRule((r"\p{N}{1,3}", GPT2), ignore_merges=True),
}
"""The pre-tokenizers that can be imported, by ``tokenizer.ggml.pre``."""
