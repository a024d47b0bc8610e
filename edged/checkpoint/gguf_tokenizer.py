"""Builds ``tokenizer.json`` from the vocabulary in a GGUF file.

A GGUF file names the way its text was split before the merges were learned (``tokenizer.ggml.pre``):
:mod:`edged.checkpoint.gguf_splits`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from edged.checkpoint.gguf_splits import GPT2, RULES
from edged.checkpoint.sentencepiece_tokenizer import merges_from_scores
from edged.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edged.checkpoint.gguf_file import GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Token types of a GGUF vocabulary."""

# Texts of tokens that end a turn or a document; a chat model may use one that is not its tokenizer's eos. Some files
# store them as user-defined; they are control tokens all the same, as in llama.cpp.
_END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<EOT>",
    "<|endoftext|>",
    "<|end_of_text|>",
)
_SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


class GgufTokenizer(NamedTuple):
    """A tokenizer and what goes into the files beside it."""

    tokenizer: Tokenizer
    tokens: list[str]  # by id
    config: dict[str, Any]  # tokenizer_config.json
    token_ids: dict[str, int]  # bos_token_id, pad_token_id where the file has them
    eos_token_ids: list[int]  # the file's eos first


def build_tokenizer(file: GgufFile) -> GgufTokenizer:
    """Build the tokenizer of a GGUF file.

    Raises:
        CheckpointError: The kind of vocabulary or the pre-tokenizer is not supported, or the vocabulary is damaged.
    """
    kind = file.get("tokenizer.ggml.model", "")
    tokens = _tokens(file)
    types = _token_types(file, len(tokens))
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(file, tokens)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(file, tokens, types), True
    else:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.model is {kind!r}; supported are 'gpt2' (byte-level BPE) and 'llama' "
            f"(SentencePiece BPE)"
        )
    special = _special_ids(file, len(tokens))
    _add_tokens(tokenizer, tokens, types, special)
    add_bos = file.get("tokenizer.ggml.add_bos_token", add_bos) and "bos_token" in special
    add_eos = file.get("tokenizer.ggml.add_eos_token", False) and "eos_token" in special
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.get(f"{file.get('general.architecture', '')}.context_length", 0),
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
    }
    config.update({name: tokens[number] for name, number in special.items()})
    template = _chat_template(file)
    if template is not None:
        config["chat_template"] = template
    _add_post_processor(tokenizer, config, special, byte_level=kind == "gpt2")
    _check_ids(file, tokenizer, tokens)
    ids = {name + "_id": special[name] for name in ("bos_token", "pad_token") if name in special}
    return GgufTokenizer(tokenizer, tokens, config, ids, _eos_ids(file, tokens, types, special))


def _tokens(file: GgufFile) -> list[str]:
    tokens = file.find("tokenizer.ggml.tokens", list)
    if not tokens or not all(isinstance(token, str) for token in tokens):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.tokens is missing or holds more than strings")
    # Padding of the vocabulary may be empty; llama.cpp names such tokens so, and names must differ.
    tokens = [token or f"[EMPTY_{number}]" for number, token in enumerate(tokens)]
    first: dict[str, int] = {}
    for number, token in enumerate(tokens):
        if first.setdefault(token, number) != number:
            raise CheckpointError(f"{file.path}: tokens {first[token]} and {number} are both {token!r}")
    return tokens


def _token_types(file: GgufFile, count: int) -> list[int]:
    types = file.find("tokenizer.ggml.token_type", list)
    if types is None:
        return [NORMAL] * count
    if len(types) != count:
        raise CheckpointError(f"{file.path}: {len(types)} token types for {count} tokens")
    return types


def _special_ids(file: GgufFile, count: int) -> dict[str, int]:
    special = {}
    for name, key in _SPECIAL_KEYS.items():
        number = file.find(f"tokenizer.ggml.{key}", int)
        if number is not None:
            special[name] = _in_vocabulary(file, key, number, count)
    return special


def _in_vocabulary(file: GgufFile, key: str, number: int, count: int) -> int:
    if not 0 <= number < count:
        raise CheckpointError(f"{file.path}: tokenizer.ggml.{key} is {number}, but there are {count} tokens")
    return number


def _byte_level(file: GgufFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    name = file.get("tokenizer.ggml.pre", "default")
    rule = RULES.get(name)
    if rule is None:
        raise CheckpointError(
            f"{file.path}: the pre-tokenizer tokenizer.ggml.pre = {name!r} is not supported; "
            f"supported are {', '.join(RULES)}"
        )
    merges = file.find("tokenizer.ggml.merges", list)
    if merges is None:
        raise CheckpointError(f"{file.path}: tokenizer.ggml.merges is missing")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [_merge(file, merge) for merge in merges]
    tokenizer = Tokenizer(_bpe(file, vocabulary, pairs, ignore_merges=rule.ignore_merges))
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(split), behavior="isolated") for split in rule.splits if split != GPT2
    ]
    # ByteLevel brings GPT-2's expression; it runs last, which is also its place in every rule that has others.
    gpt2 = GPT2 in rule.splits
    if gpt2 and rule.splits[-1] != GPT2:
        steps = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in rule.splits]
        gpt2 = False
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rule.add_bos


def _merge(file: GgufFile, merge: object) -> tuple[str, str]:
    # The first character may itself be a space in vocabularies that do not write it as a letter.
    cut = merge.find(" ", 1) if isinstance(merge, str) else -1
    if not isinstance(merge, str) or cut < 1 or cut == len(merge) - 1:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.merges holds {str(merge)[:100]!r}, which is no pair"
        )
    return merge[:cut], merge[cut + 1 :]


def _bpe(
    file: GgufFile, vocabulary: dict[str, int], merges: Sequence[tuple[str, str]], **options: object
) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary, merges=list(merges), **options)
    except Exception as error:  # noqa: BLE001 - the library raises plain Exceptions
        raise CheckpointError(f"{file.path}: the merges do not fit the vocabulary: {error}") from None


def _sentencepiece(file: GgufFile, tokens: list[str], types: list[int]) -> Tokenizer:
    scores = file.find("tokenizer.ggml.scores", list)
    if scores is None or len(scores) != len(tokens):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.scores is missing or not one a token")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    unknown = file.find("tokenizer.ggml.unknown_token_id", int)
    options: dict[str, Any] = {"fuse_unk": True, "byte_fallback": True}
    if unknown is not None:
        options["unk_token"] = tokens[_in_vocabulary(file, "unknown_token_id", unknown, len(tokens))]
    usable = {token: number for number, token in enumerate(tokens) if types[number] == NORMAL}
    tokenizer = Tokenizer(_bpe(file, vocabulary, merges_from_scores(usable, scores), **options))
    spaces = normalizers.Replace(" ", "\u2581")
    prefix = file.get("tokenizer.ggml.add_space_prefix", True)
    # A normalizer, not a Metaspace: it then also runs on the text after a special token, as llama.cpp does.
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces]) if prefix else spaces
    steps: list[decoders.Decoder] = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int], special: dict[str, int]) -> None:
    control, user_defined = [], []
    for number, token in enumerate(tokens):
        if types[number] == USER_DEFINED and token not in _END_OF_TURN:
            user_defined.append(AddedToken(token, normalized=False, special=False))
        elif types[number] in (CONTROL, UNKNOWN, USER_DEFINED) or number in special.values():
            control.append(AddedToken(token, normalized=False, special=True))
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(user_defined)


def _add_post_processor(
    tokenizer: Tokenizer, config: dict[str, Any], special: dict[str, int], *, byte_level: bool
) -> None:
    pieces, used = ["$A:0"], []
    if config["add_bos_token"]:
        pieces.insert(0, f"{config['bos_token']}:0")
        used.append((config["bos_token"], special["bos_token"]))
    if config["add_eos_token"]:
        pieces.append(f"{config['eos_token']}:0")
        used.append((config["eos_token"], special["eos_token"]))
    if used:
        tokenizer.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=used)
    elif byte_level:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)


def _check_ids(file: GgufFile, tokenizer: Tokenizer, tokens: list[str]) -> None:
    """Adding a token must not have moved it: its id is its row in the embedding."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    for number, token in enumerate(tokens):
        if vocabulary.get(token) != number:
            raise CheckpointError(
                f"{file.path}: token {number}, {token!r}, would get the id {vocabulary.get(token)}"
            )
    if len(vocabulary) != len(tokens):
        raise CheckpointError(f"{file.path}: {len(tokens)} tokens became {len(vocabulary)}")


def _eos_ids(file: GgufFile, tokens: list[str], types: list[int], special: dict[str, int]) -> list[int]:
    ids = [special["eos_token"]] if "eos_token" in special else []
    for key in ("eot_token_id", "eom_token_id"):
        number = file.find(f"tokenizer.ggml.{key}", int)
        if number is not None:
            ids.append(_in_vocabulary(file, key, number, len(tokens)))
    numbers = {token: number for number, token in enumerate(tokens)}
    ids += [
        numbers[text]
        for text in _END_OF_TURN
        if text in numbers and types[numbers[text]] in (CONTROL, USER_DEFINED)
    ]
    return list(dict.fromkeys(ids))


def _chat_template(file: GgufFile) -> str | list[dict[str, str]] | None:
    default = file.find("tokenizer.chat_template", str)
    named = file.find("tokenizer.chat_templates", list) or []
    templates = [{"name": "default", "template": default}] if default is not None else []
    for name in named:
        text = file.find(f"tokenizer.chat_template.{name}", str)
        if text is not None:
            templates.append({"name": str(name), "template": text})
    return default if len(templates) < 2 else templates
