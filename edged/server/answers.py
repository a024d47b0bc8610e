"""What becomes of an answer on its way to the client: taken apart where its format is known, several of them merged."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from edged.decoding.constraints.base import TOOL_CALLS, Constraint
from edged.decoding.constraints.tool_grammar import ToolCalls
from edged.decoding.parsing.calls import Tools
from edged.decoding.parsing.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    guess_reasoning_format,
    guess_tool_format,
)
from edged.decoding.parsing.parser import AnswerParser
from edged.errors import FailedPreconditionError, InvalidArgumentError
from edged.server.chat import read_tools
from edged.server.constraints import check_settings
from edged.server.errors import clip
from edged.server.responses import chunk_response, finished_response
from edged.v1 import inference_pb2, types_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Mapping, Sequence

    from edged.config import ModelConfig
    from edged.decoding.parsing.formats import ToolFormat
    from edged.decoding.parsing.parser import Pieces
    from edged.worker.messages import Finished, Tokens
    from edged.worker.stream import Event, RequestStream

_SHOWN = 60
AUTO = "auto"
NONE = "none"


@dataclass(frozen=True)
class AnswerFormat:
    """How one answer is taken apart; by default it is text.

    Attributes:
        reasoning: What thoughts stand between.
        tools: Format of its calls.
        known: The tools of the chat.
        thinking: The prompt has opened the thoughts.
        kept_token_ids: Special tokens that the parser needs to see.
    """

    reasoning: tuple[str, str] | None = None
    tools: ToolFormat | None = None
    known: Tools = field(default_factory=Tools)
    thinking: bool = False
    kept_token_ids: tuple[int, ...] = ()

    def parser(self) -> AnswerParser | None:
        """For a new answer; None where it is text."""
        if self.reasoning is None and self.tools is None:
            return None
        return AnswerParser(self.reasoning, self.tools, self.known, thinking=self.thinking)


class ModelFormats:
    """The formats of one model.

    Args:
        config: Names the formats, or leaves it to what the template shows.
        template: Sources of the chat template.
        tokens: Ids of the added tokens by their texts.
        special: Ids of the special ones.
    """

    def __init__(
        self, config: ModelConfig, template: str, tokens: Mapping[str, int], special: Collection[int]
    ) -> None:
        tools, reasoning = config.tool_format, config.reasoning_format
        tools = guess_tool_format(template) if tools == AUTO else tools
        reasoning = guess_reasoning_format(template, frozenset(tokens)) if reasoning == AUTO else reasoning
        self._model = config.name
        self._tools = TOOL_FORMATS.get(tools)
        self._reasoning = REASONING_FORMATS.get(reasoning)
        marks = [*(self._reasoning or ()), *((self._tools.start, self._tools.end) if self._tools else ())]
        self._special = {
            text: token_id
            for text, token_id in tokens.items()
            if token_id in special and len(text) > 1 and any(text.strip() in mark for mark in marks)
        }

    def read(
        self, request: inference_pb2.GenerateRequest, rendered: str
    ) -> tuple[AnswerFormat, Constraint | None]:
        """How the answer to a request is taken apart, and the constraint that its choice of tools makes.

        Args:
            request: Its chat has been checked.
            rendered: What the template made of it.

        Raises:
            InvalidArgumentError: The choice contradicts the chat or a constraint.
            FailedPreconditionError: The model's format of calls is not known, and the request needs it.
        """
        tools = read_tools(request.chat) if request.WhichOneof("prompt") == "chat" else None
        choice = self._choice(request, tools)
        if request.WhichOneof("prompt") != "chat" or (
            request.raw and choice != inference_pb2.TOOL_CHOICE_REQUIRED
        ):
            return AnswerFormat(), None
        reasoning = self._reasoning
        thinking = reasoning is not None and _is_open(
            rendered, reasoning, request.chat.continue_final_message
        )
        constraint = None
        if choice == inference_pb2.TOOL_CHOICE_REQUIRED and tools is not None:
            constraint = self._required(request, tools, thinking=thinking)
        elif thinking and request.WhichOneof("constraint") is not None:
            raise InvalidArgumentError(
                f"{request.WhichOneof('constraint')} cannot hold while the prompt has the model think first; set "
                "chat.enable_thinking to false",
                field=request.WhichOneof("constraint") or "",
            )
        if request.raw:
            return AnswerFormat(kept_token_ids=tuple(self._special.values())), constraint
        parses = tools is not None and choice != inference_pb2.TOOL_CHOICE_NONE
        found = AnswerFormat(
            reasoning,
            self._tools if parses else None,
            Tools.of(tools or []),
            thinking=thinking,
            kept_token_ids=tuple(self._special.values()),
        )
        return found, constraint

    def _choice(
        self, request: inference_pb2.GenerateRequest, tools: list[dict[str, object]] | None
    ) -> inference_pb2.ToolChoice:
        """The choice in force.

        Raises:
            InvalidArgumentError: It contradicts the chat.
            FailedPreconditionError: It needs a format that is not known.
        """
        choice, tool = request.tool_choice, request.tool
        if (choice or tool) and tools is None:
            name = "tool_choice" if choice else "tool"
            raise InvalidArgumentError(
                f"{name} is set, and the request has no tools; give them in chat.tools", field=name
            )
        if choice not in inference_pb2.ToolChoice.values():
            raise InvalidArgumentError(
                f"tool_choice is {choice}, which this version does not know", field="tool_choice"
            )
        if tool:
            names = Tools.of(tools or []).parameters
            if tool not in names:
                raise InvalidArgumentError(
                    f"tool is {clip(tool, _SHOWN)!r}, and chat.tools has {clip(', '.join(names), _SHOWN * 4)}",
                    field="tool",
                )
            if choice == inference_pb2.TOOL_CHOICE_NONE:
                raise InvalidArgumentError(
                    "tool names one to call, and tool_choice says that none is; leave one out", field="tool"
                )
            choice = inference_pb2.TOOL_CHOICE_REQUIRED
        needed = (inference_pb2.TOOL_CHOICE_AUTO, inference_pb2.TOOL_CHOICE_REQUIRED)
        if choice in needed and self._tools is None:
            raise FailedPreconditionError(
                f"how model {self._model} writes tool calls is not known from its template; set tool_format in the "
                f"configuration to one of {', '.join(TOOL_FORMATS)}",
                field="tool_choice",
            )
        return choice

    def _required(
        self, request: inference_pb2.GenerateRequest, tools: list[dict[str, object]], *, thinking: bool
    ) -> Constraint:
        kind = request.WhichOneof("constraint")
        if kind is not None:
            raise InvalidArgumentError(
                f"{kind} and a required tool call contradict each other; leave one out", field=kind
            )
        check_settings(request, "tool_choice")
        assert self._tools is not None, "checked with the choice"  # noqa: S101
        named = [tool for tool in tools if not request.tool or request.tool in Tools.of([tool]).parameters]
        calls = ToolCalls(
            format=self._tools.name,
            tools=tuple(json.dumps(tool, ensure_ascii=False) for tool in named),
            reasoning=() if self._reasoning is None else self._reasoning,
            thinking=thinking,
            special=tuple(self._special),
        )
        return Constraint(TOOL_CALLS, msgspec.json.encode(calls).decode())


def _is_open(rendered: str, marks: tuple[str, str], continues: bool) -> bool:
    """Whether a prompt ends inside the model's thoughts."""
    start, end = (rendered.rfind(mark) for mark in marks)
    return start > end and (continues or not rendered[start + len(marks[0]) :].strip())


class AnswerWriter:
    """Makes the responses of one answer.

    Args:
        answer_format: How it is taken apart.
        request_id: Calls are named after it.
        index: Which of several answers it is.
    """

    def __init__(self, answer_format: AnswerFormat, request_id: str, index: int = 0) -> None:
        self._parser = answer_format.parser()
        self._request_id = request_id
        self._index = index
        self._calls = 0

    def chunk(self, message: Tokens) -> inference_pb2.GenerateResponse:
        """One step's text and tokens."""
        response = chunk_response(message)
        response.chunk.index = self._index
        if self._parser is not None:
            self._put(response.chunk, self._parser.feed(message.text))
        return response

    def finished(self, message: Finished) -> inference_pb2.GenerateResponse:
        """The end, and what had been held back."""
        response = finished_response(message)
        response.finished.index = self._index
        if self._parser is not None:
            pieces, rest = self._parser.feed(message.text), self._parser.flush()
            pieces.text += rest.text
            pieces.reasoning += rest.reasoning
            pieces.calls += rest.calls
            self._put(response.finished, pieces)
        return response

    def _put(self, target: inference_pb2.Chunk | inference_pb2.Finished, pieces: Pieces) -> None:
        target.text = pieces.text
        target.reasoning = pieces.reasoning
        for call in pieces.calls:
            target.tool_calls.append(
                types_pb2.ToolCall(
                    id=f"call-{self._request_id}-{self._index}-{self._calls}",
                    name=call.name,
                    arguments=call.arguments,
                )
            )
            self._calls += 1


async def merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, Event], None]:
    """The events of several streams as they come, each with its stream's number. The first that fails ends all.

    Raises:
        EdgedError: As the stream that failed.
    """
    if len(streams) == 1:
        async for event in streams[0]:
            yield 0, event
        return
    waiting = {asyncio.ensure_future(stream.__anext__()): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda each: waiting[each]):
                index = waiting.pop(task)
                with contextlib.suppress(StopAsyncIteration):
                    event = task.result()
                    waiting[asyncio.ensure_future(streams[index].__anext__())] = index
                    yield index, event
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
