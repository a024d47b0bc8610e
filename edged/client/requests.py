"""Builds request messages from plain Python values."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Union

from edged.client.chat import CHAT_OPTIONS, ChatOptions, put_chat
from edged.client.fields import extend_field, set_field
from edged.errors import InvalidArgumentError
from edged.proto_fields import single_fields
from edged.v1 import inference_pb2, types_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Prompt = Union[str, "Sequence[int]", "Sequence[Mapping[str, Any]]"]
"""Plain text, token ids, or the messages of a chat (``{"role": …, "content": …}``, as OpenAI writes them)."""

EmbedInputs = Union["Sequence[str]", "Sequence[Sequence[int]]"]
"""Texts, or the token ids of each."""


class GenerateOptions(ChatOptions, total=False):
    """Keyword arguments of ``generate``; what is left out or None takes the model's or the API's default.

    Their meaning, unit and range stand in ``protos/edged/v1/types.proto``. ``stop`` is one string or several.
    """

    model: str
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    penalty_window: int | None
    logit_bias: Mapping[int, float] | None
    bad_words: Iterable[str]
    bad_token_ids: Iterable[Sequence[int]]
    logprobs: bool
    top_logprobs: int
    max_tokens: int | None
    min_tokens: int
    stop: str | Iterable[str]
    stop_token_ids: Iterable[int]
    ignore_eos: bool
    keep_special_tokens: bool
    priority: int
    session: str
    json_schema: Mapping[str, Any] | bool | str | None
    regex: str | None
    lark: str | None
    choice: Sequence[str] | None
    ready_made: str | None
    n: int | None
    tool_choice: str | None
    tool: str | None
    raw: bool
    no_speculation: bool


_SINGLE_SAMPLING = single_fields(types_pb2.Sampling)
TOOL_CHOICES = {
    "auto": inference_pb2.TOOL_CHOICE_AUTO,
    "none": inference_pb2.TOOL_CHOICE_NONE,
    "required": inference_pb2.TOOL_CHOICE_REQUIRED,
}


def generate_request(prompt: Prompt, options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """The request of one generation.

    Raises:
        InvalidArgumentError: A value that the message cannot hold; the daemon checks the rest.
        TypeError: A keyword that ``generate`` does not have.
    """
    _refuse_unknown("generate", options, {*GenerateOptions.__annotations__, *CHAT_OPTIONS})
    request = inference_pb2.GenerateRequest()
    _put_prompt(request, prompt, options)
    set_field(request, "model", options.get("model"))
    set_field(request, "priority", options.get("priority"))
    set_field(request, "session", options.get("session"))
    set_field(request, "keep_special_tokens", options.get("keep_special_tokens"))
    set_field(request, "no_speculation", options.get("no_speculation"))
    for name in _SINGLE_SAMPLING:
        set_field(request.sampling, name, options.get(name))
    _put_bias(request.sampling, options)
    set_field(request.stops, "max_tokens", options.get("max_tokens"))
    set_field(request.stops, "min_tokens", options.get("min_tokens"))
    set_field(request.stops, "ignore_eos", options.get("ignore_eos"))
    _put_constraint(request, options)
    choice = options.get("tool_choice")
    if choice is not None:
        if choice not in TOOL_CHOICES:
            raise InvalidArgumentError(
                f"tool_choice is {choice!r}; use one of {', '.join(TOOL_CHOICES)}", field="tool_choice"
            )
        request.tool_choice = TOOL_CHOICES[choice]
    set_field(request, "tool", options.get("tool"))
    set_field(request, "raw", options.get("raw"))
    stop = options.get("stop", ())
    extend_field(request.stops, "strings", (stop,) if isinstance(stop, str) else stop)
    extend_field(request.stops, "token_ids", options.get("stop_token_ids", ()))
    return request


_CONSTRAINTS = ("json_schema", "regex", "lark", "choice", "ready_made")


def _put_constraint(request: inference_pb2.GenerateRequest, options: GenerateOptions) -> None:
    """The form of the answer.

    Raises:
        InvalidArgumentError: There are several, or one that cannot be sent.
    """
    given = [name for name in _CONSTRAINTS if options.get(name) is not None]
    if len(given) > 1:
        raise InvalidArgumentError(
            f"{' and '.join(given)} are both given; an answer has one form", field=given[1]
        )
    for name in given:
        value = options.get(name)
        if name == "choice":
            request.choice.SetInParent()  # an empty one is refused, and not left out
            extend_field(request.choice, "texts", value)  # type: ignore[arg-type]
        elif name == "json_schema" and not isinstance(value, str):
            try:
                set_field(request, name, json.dumps(value, ensure_ascii=False, allow_nan=False))
            except (TypeError, ValueError, RecursionError) as error:
                raise InvalidArgumentError(f"json_schema is no JSON: {error}", field=name) from None
        else:
            set_field(request, name, value)


def _put_bias(sampling: types_pb2.Sampling, options: GenerateOptions) -> None:
    """What names tokens: the bias and the sequences that may not come."""
    try:
        sampling.logit_bias.update(options.get("logit_bias") or {})
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"logit_bias is no dictionary of token ids and numbers: {error}", field="logit_bias"
        ) from error
    extend_field(sampling, "bad_words", options.get("bad_words", ()))
    for sequence in options.get("bad_token_ids", ()):
        extend_field(sampling.bad_token_ids.add(), "ids", sequence)


def tokenize_request(
    prompt: Prompt, *, model: str, no_special_tokens: bool, options: ChatOptions | None = None
) -> inference_pb2.TokenizeRequest:
    """The request that turns text or a chat into token ids.

    Raises:
        InvalidArgumentError: A value that the message cannot hold.
        TypeError: A keyword that ``tokenize`` does not have.
    """
    request = inference_pb2.TokenizeRequest()
    _refuse_unknown("tokenize", options or {}, {*CHAT_OPTIONS, "model", "no_special_tokens"})
    _put_prompt(request, prompt, options or {})
    set_field(request, "model", model)
    set_field(request, "no_special_tokens", no_special_tokens)
    return request


def detokenize_request(
    token_ids: Iterable[int], *, model: str, keep_special_tokens: bool
) -> inference_pb2.DetokenizeRequest:
    """The request that turns token ids into text.

    Raises:
        InvalidArgumentError: A value that the message cannot hold.
    """
    request = inference_pb2.DetokenizeRequest()
    extend_field(request, "token_ids", token_ids)
    set_field(request, "model", model)
    set_field(request, "keep_special_tokens", keep_special_tokens)
    return request


POOLINGS = {"last": inference_pb2.POOLING_LAST, "mean": inference_pb2.POOLING_MEAN}


def embed_request(
    inputs: EmbedInputs, *, model: str, pooling: str, normalize: bool, priority: int
) -> inference_pb2.EmbedRequest:
    """The request that turns texts into vectors.

    Raises:
        InvalidArgumentError: A value that the message cannot hold, or one text instead of several.
    """
    if isinstance(inputs, str):
        raise InvalidArgumentError("inputs is one text; give a list of texts", field="inputs")
    if pooling and pooling not in POOLINGS:
        raise InvalidArgumentError(
            f"pooling is {pooling!r}; use {' or '.join(POOLINGS)}, or leave it out", field="pooling"
        )
    request = inference_pb2.EmbedRequest()
    for each in inputs:
        entry = request.inputs.add()
        if isinstance(each, str):
            set_field(entry, "text", each)
        else:
            entry.token_ids.SetInParent()
            extend_field(entry.token_ids, "ids", each)
    set_field(request, "model", model)
    set_field(request, "priority", priority)
    set_field(request, "normalize", normalize)
    if pooling:
        request.pooling = POOLINGS[pooling]
    return request


def _refuse_unknown(call: str, options: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(options) - known)
    if unknown:
        raise TypeError(f"{call} has no argument {unknown[0]!r}; it has {sorted(known)}")


def _put_prompt(
    request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest,
    prompt: Prompt,
    options: Mapping[str, Any],
) -> None:
    items: list[Any] = [] if isinstance(prompt, str) else list(prompt)
    if items and not isinstance(items[0], int):
        put_chat(request.chat, items, options)
        return
    for name in CHAT_OPTIONS:
        given = options.get(name)
        if given is not None and (given or name == "enable_thinking"):
            raise InvalidArgumentError(f"{name} goes with the messages of a chat; leave it out", field=name)
    if isinstance(prompt, str):
        set_field(request, "text", prompt)
    elif isinstance(request, inference_pb2.GenerateRequest):
        request.token_ids.SetInParent()
        extend_field(request.token_ids, "ids", items)
    else:
        raise InvalidArgumentError("Tokenize takes text or a chat, not token ids", field="prompt")
