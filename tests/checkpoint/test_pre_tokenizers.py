"""Pre-tokenizers by the names that GGUF files have for them, and what else such a file says of its tokens."""

# ruff: noqa: RUF001 - texts in many scripts

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import gguf
import pytest
import tokenizers
from tokenizer_oracles import GPT2, TEXTS, AutoTokenizer, ByteLevelOracle, stream, written

from edged.checkpoint.gguf_splits import RULES
from edged.checkpoint.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

# What each rule has to cut, in the words of llama.cpp, which spells both cases of the contractions.
WORDS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3, QWEN2 = rf"{WORDS}|\p{{N}}{{1,3}}|{REST}", rf"{WORDS}|\p{{N}}|{REST}"
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ENDING = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?"
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{ENDING}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = [
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
]
HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Cased letters; the published list has not all scripts, which the texts here do not use either.
CASED = r"[\p{Lu}\p{Ll}\p{Lt}]"
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
SPLITS: dict[str, list[str]] = {
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN, r"\p{N}"],
    "deepseek-llm": [
        r"[\r\n]",
        rf"\s?{CASED}+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+\Z",
        HAN,
        r"\p{N}+",
    ],
    "minicpm5": [r"\p{N}{1,3}", GPT2],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9]{3}"],
    "viking": [BLOOM, r"\p{N}"],
    "seed-coder": [rf"{WORDS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "qwen35": [QWEN35],
    "tekken": [TEKKEN],
    **{name: [BLOOM] for name in ("bloom", "poro-chat", "gpt3-finnish")},
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), DEEPSEEK3),
    **{name: [GPT4O] for name in ("gpt-4o", "llama4", "kanana2", "minimax-m2")},
    **{
        name: [
            r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
        ]
        for name in ("bailingmoe", "bailingmoe2", "llada-moe")
    },
    **{
        name: [r"\p{N}", GPT2]
        for name in (
            "smollm",
            "starcoder",
            "refact",
            "codeshell",
            "exaone",
            "command-r",
            "minerva-7b",
            "mellum2",
        )
    },
    **{
        name: [GPT2]
        for name in (
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
        )
    },
    **{
        name: [LLAMA3]
        for name in (
            "llama3",
            "llama-v3",
            "llama-bpe",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "dbrx",
            "smaug-bpe",
            "glm4",
            "chatglm-bpe",
        )
    },
    **{
        name: [QWEN2]
        for name in (
            "qwen2",
            "deepseek-r1-qwen",
            "stablelm2",
            "megrez",
            "hunyuan",
            "solar-open",
            "grok-2",
            "kormo",
        )
    },
}


@pytest.mark.parametrize("name", RULES)
def test_every_pre_tokenizer_cuts_as_its_definition(tmp_path: Path, recipe: Any, name: str) -> None:
    recipe.metadata["tokenizer.ggml.pre"] = name
    folder = written(recipe, tmp_path)
    mine = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    reference = ByteLevelOracle(gguf.GGUFReader(tmp_path / "m.gguf"), SPLITS[name])
    generator = random.Random(0)
    letters = (
        " \t\n\r'\"sStTreEvVmMlLdDaZéÉßñ中文한1２½٣.,!?-_$+<=>^~|/\\()#*`«»…🙂\u3000\u00a0\u200d\u0301ǅʰ"
    )
    made = ["".join(generator.choices(letters, k=generator.randrange(1, 40))) for _ in range(400)]
    for text in TEXTS + made:
        if mine.normalizer is not None and mine.normalizer.normalize_str(text) != text:
            continue
        got = [text[start:end] for _, (start, end) in mine.pre_tokenizer.pre_tokenize_str(text)]
        assert got == reference.split(text), text


def test_a_model_that_ignores_merges_takes_whole_pieces(tmp_path: Path, recipe: Any) -> None:
    tokens = recipe.metadata["tokenizer.ggml.tokens"]
    tokens[-1] = "xyz"  # no merges lead to it
    recipe.metadata["tokenizer.ggml.token_type"][-1] = 1
    recipe.metadata["tokenizer.ggml.pre"] = "llama-bpe"
    assert Tokenizer.load(written(recipe, tmp_path)).encode("xyz")[1:] == [len(tokens) - 1]
    recipe.metadata["tokenizer.ggml.pre"] = "smaug-bpe"
    assert len(Tokenizer.load(written(recipe, tmp_path)).encode("xyz")) == 3


def test_begin_and_end_tokens_are_added_as_the_file_says(tmp_path: Path, recipe: Any) -> None:
    bos, eos = recipe.metadata["tokenizer.ggml.bos_token_id"], recipe.metadata["tokenizer.ggml.eos_token_id"]
    letter = recipe.metadata["tokenizer.ggml.tokens"].index("a")
    for rule, add_bos, add_eos, expected in (
        ("smollm", None, None, [letter]),
        ("smollm", True, None, [bos, letter]),
        ("smollm", True, True, [bos, letter, eos]),
        ("smollm", False, True, [letter, eos]),
        ("llama-bpe", None, None, [bos, letter]),
        ("llama-bpe", False, None, [letter]),
    ):
        recipe.metadata["tokenizer.ggml.pre"] = rule
        for key, value in (("add_bos_token", add_bos), ("add_eos_token", add_eos)):
            recipe.metadata.pop(f"tokenizer.ggml.{key}", None)
            if value is not None:
                recipe.metadata[f"tokenizer.ggml.{key}"] = value
        folder = written(recipe, tmp_path)
        loaded = Tokenizer.load(folder)
        assert loaded.encode("a") == AutoTokenizer.from_pretrained(folder)("a")["input_ids"] == expected
        assert loaded.encode("a", add_special_tokens=False) == [letter]
        assert loaded.adds_bos is (bos in expected)
        chat = [bos, letter] if bos in expected else [letter]
        assert loaded.encode_chat("a") == chat
        assert loaded.encode_chat("<|im_start|>a") == [bos, letter]  # never twice


def test_user_defined_tokens_are_whole_and_stay_in_the_text(tmp_path: Path, recipe: Any) -> None:
    loaded = Tokenizer.load(written(recipe, tmp_path))
    think = recipe.metadata["tokenizer.ggml.tokens"].index("<think>")
    assert loaded.encode("<think>") == loaded.encode("<think>", parse_special=False) == [think]
    assert loaded.decode([think, think - 1]) == stream(loaded, [think, think - 1]) == "<think>"


def test_a_token_that_ends_turns_is_special_whatever_the_file_says(tmp_path: Path, recipe: Any) -> None:
    tokens, types = recipe.metadata["tokenizer.ggml.tokens"], recipe.metadata["tokenizer.ggml.token_type"]
    end = tokens.index("<|im_end|>")
    types[end] = 4
    recipe.metadata["tokenizer.ggml.eos_token_id"] = recipe.metadata["tokenizer.ggml.padding_token_id"]
    loaded = Tokenizer.load(written(recipe, tmp_path))
    assert loaded.eos_token_ids == (tokens.index("<|endoftext|>"), end)
    assert end in loaded.special_token_ids
    assert loaded.decode(loaded.encode("a<|im_end|>")) == "a"
