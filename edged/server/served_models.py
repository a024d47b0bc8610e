"""What the daemon knows of each model: its tokenizer, chat template, defaults and limits. No weights."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from edged.checkpoint.chat_template import ChatTemplate
from edged.checkpoint.tokenizer import Tokenizer
from edged.decoding.sampling import Sampling, resolve_sampling
from edged.errors import EdgedError, InvalidArgumentError, NotFoundError, UnavailableError
from edged.memory.heap import trim_heap
from edged.models.architecture import Architecture
from edged.server.answers import ModelFormats
from edged.server.chat import read_chat
from edged.server.errors import clip
from edged.server.sampling import given_sampling
from edged.server.sampling_defaults import read_sampling_defaults
from edged.server.validation import check_prompt_length, check_token_ids, prompt_bytes
from edged.v1 import inference_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edged.config import Config, ModelConfig
    from edged.v1 import types_pb2

Result = TypeVar("Result")

_THREADS = 2
_LARGE_BYTES = 16 * 2**10
"""Prompts of more text are tokenized one after the other: each takes much memory for a moment."""
_NAME_SHOWN = 100


@dataclass(frozen=True)
class PromptTokens:
    """A prompt as the engine takes it."""

    token_ids: tuple[int, ...]
    rendered: str = ""
    """What a chat's template made."""


class ServedModel:
    """One model of the configuration.

    Args:
        config: Its part of the configuration.
        tokenizer: Of the model folder.
        template: Chat template of the model folder; it may be empty.
        vocabulary: Number of token ids that the model has logits for.
        sampling: Used where a request is silent.
        threads: Where tokenizing and templates run.
        large: The one thread where they run for large prompts.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        vocabulary: int,
        sampling: Sampling,
        threads: ThreadPoolExecutor,
        large: ThreadPoolExecutor,
    ) -> None:
        self.name = config.name
        self.context_length = config.context_length
        self.embeddings = config.embeddings
        """``last``, ``mean`` or ``none``."""
        self.max_sequences = config.max_sequences
        self.vocabulary = vocabulary
        self.eos_token_ids = tokenizer.eos_token_ids
        self.formats = ModelFormats(
            config, template.source, tokenizer.added_tokens, tokenizer.special_token_ids
        )
        self._sampling = sampling
        self.longest_token = max(map(len, map(tokenizer.id_to_bytes, range(tokenizer.vocabulary_size))))
        self._tokenizer = tokenizer
        self._template = template
        self._threads = threads
        self._large = large

    @classmethod
    def load(cls, config: ModelConfig, threads: ThreadPoolExecutor, large: ThreadPoolExecutor) -> ServedModel:
        """Read the small files of a model folder.

        Raises:
            CheckpointError: One is missing or damaged.
        """
        vocabulary = Architecture.of(config).vocabulary
        tokenizer = Tokenizer.load(config.path)
        tokenizer.check_embedding(vocabulary)
        sampling = read_sampling_defaults(config.path, vocabulary)
        return cls(
            config,
            tokenizer=tokenizer,
            template=ChatTemplate.load(config.path),
            vocabulary=vocabulary,
            sampling=sampling,
            threads=threads,
            large=large,
        )

    async def resolve_sampling(self, sampling: types_pb2.Sampling) -> Sampling:
        """Sampling parameters of a request, with the model's defaults where it is silent.

        Raises:
            InvalidArgumentError: A value is outside its range.
        """
        if sampling.bad_words:
            given = await self._run(given_sampling, sampling, self._encode_alone)
        else:
            given = given_sampling(sampling)
        return resolve_sampling(
            **given, defaults=self._sampling, vocabulary=self.vocabulary, context_length=self.context_length
        )

    async def read_prompt(
        self,
        request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest,
        *,
        add_special_tokens: bool = True,
        leaves_room: bool = True,
    ) -> PromptTokens:
        """Token ids of a request's prompt, whatever its form.

        Args:
            request: Holds it.
            add_special_tokens: Whether plain text gets what the tokenizer adds.
            leaves_room: Whether given token ids must leave room for an answer.

        Raises:
            InvalidArgumentError: It is missing or malformed.
            FailedPreconditionError: It is a chat and the model has no template.
        """
        kind = request.WhichOneof("prompt")
        large = kind in {"text", "chat"} and prompt_bytes(request) > _LARGE_BYTES
        run = self._run_large if large else self._run
        if kind == "text":
            prompt = await run(self._encode, request.text, add_special_tokens)
        elif kind == "chat":
            prompt = await run(self._encode_chat, request.chat)
        elif kind == "token_ids" and isinstance(request, inference_pb2.GenerateRequest):
            if leaves_room:
                check_prompt_length(len(request.token_ids.ids), self.context_length, "token_ids")
            prompt = PromptTokens(tuple(request.token_ids.ids))
            check_token_ids(prompt.token_ids, self.vocabulary, "token_ids.ids")
        else:
            forms = ", ".join(field.name for field in request.DESCRIPTOR.oneofs_by_name["prompt"].fields)
            raise InvalidArgumentError(f"the request has no prompt; set one of {forms}", field="prompt")
        return prompt

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids that have been checked."""
        return await self._run(self._decode, tuple(token_ids), skip_special_tokens)

    async def _run(self, work: Callable[..., Result], *arguments: object) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def _run_large(self, work: Callable[..., Result], *arguments: object) -> Result:
        """As ``_run``, one at a time, giving the memory back before the next one takes its own."""

        def run() -> Result:
            try:
                return work(*arguments)
            finally:
                trim_heap()

        return await asyncio.get_running_loop().run_in_executor(self._large, run)

    def _encode(self, text: str, add_special_tokens: bool) -> PromptTokens:
        return PromptTokens(tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens)))

    def _encode_alone(self, text: str) -> list[int]:
        """Token ids of a text inside another one."""
        return self._tokenizer.encode(text, add_special_tokens=False, parse_special=False)

    def _encode_chat(self, chat: types_pb2.Chat) -> PromptTokens:
        prompt = read_chat(chat)
        try:
            arguments = self._template.check_arguments(
                prompt.arguments,
                tools=prompt.tools is not None,
                enable_thinking=prompt.enable_thinking,
                template=prompt.template,
            )
            rendered = self._template.render(
                prompt.messages,
                tools=prompt.tools,
                continue_final_message=prompt.continue_final_message,
                template=prompt.template,
                **arguments,
            )
        except EdgedError as error:
            if error.field:  # the template's name of it; the request's begins with chat
                error.field = f"chat.{error.field}"
            raise
        return PromptTokens(tuple(self._tokenizer.encode_chat(rendered)), rendered)

    def _decode(self, token_ids: tuple[int, ...], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


class ServedModels:
    """All models of the configuration.

    Args:
        config: The configuration.
    """

    def __init__(self, config: Config) -> None:
        self.prompt_size = config.prompt_size
        """Bytes that a prompt's text may have."""
        self._configs = config.models
        self._default = config.default_model or config.models[0].name
        self._models: dict[str, ServedModel] = {}
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="tokenize-large")

    @property
    def loaded(self) -> bool:
        """Whether every model's files have been read."""
        return len(self._models) == len(self._configs)

    def load(self) -> None:
        """Read the small files of every model. May run in a thread.

        Raises:
            CheckpointError: A file is missing or damaged.
        """
        for config in self._configs:
            self._models[config.name] = ServedModel.load(config, self._threads, self._large)

    def find(self, name: str) -> ServedModel:
        """The model of that name, or the default model for an empty one.

        Raises:
            NotFoundError: The configuration has none of that name.
            UnavailableError: Its files are still being read.
        """
        wanted = name or self._default
        model = self._models.get(wanted)
        if model is not None:
            return model
        names = [config.name for config in self._configs]
        if wanted in names:
            raise UnavailableError(f"model {wanted} is loading; try again in a moment", retry_seconds=1.0)
        raise NotFoundError(
            f"there is no model {clip(wanted, _NAME_SHOWN)!r}; the configuration has {', '.join(names)}",
            field="model",
        )

    def close(self) -> None:
        """Let the threads go."""
        for threads in (self._threads, self._large):
            threads.shutdown(wait=False, cancel_futures=True)
