"""What becomes of answers: formats by template and configuration, choices of tools, pieces, several streams in one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from edged.config import ModelConfig
from edged.decoding.constraints.tool_grammar import ToolCalls
from edged.decoding.parsing.formats import TOOL_FORMATS
from edged.decoding.sampling import Sampling
from edged.decoding.stops import Stops
from edged.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError
from edged.server.answers import AnswerWriter, ModelFormats, merged
from edged.v1 import inference_pb2, types_pb2
from edged.worker.messages import Finished, Submit, Tokens
from edged.worker.request_terms import split_answers

TEMPLATES = Path(__file__).parent.parent / "checkpoint" / "templates"
TOOL = json.dumps({"type": "function", "function": {"name": "go", "parameters": {"type": "object"}}})
OTHER = json.dumps({"name": "stop"})


def formats(template="qwen3", tokens=None, special=(), **settings):
    source = (TEMPLATES / f"{template}.jinja").read_text() if template else ""
    config = ModelConfig(name="m", path=Path("m"), **settings)
    return ModelFormats(config, source, tokens or {}, special)


def request(*tools, **fields):
    chat = types_pb2.Chat(messages=[types_pb2.ChatMessage(role="user", content="x")], tools=tools)
    return inference_pb2.GenerateRequest(chat=chat, **fields)


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("qwen3", "hermes", True),
        ("chatml_tools", "hermes", False),
        ("minicpm4", "minicpm4", True),
        ("llama3", "llama3", False),
        ("smollm2", None, False),
        ("thinking", None, True),
    ],
)
def test_the_formats_of_the_families(template, tools, reasoning):
    found, constraint = formats(template).read(request(TOOL), "")
    assert constraint is None
    assert (found.tools.name if found.tools else None) == tools
    if template != "minicpm4":
        assert (found.reasoning is not None) == reasoning


def test_the_configuration_decides_over_the_template():
    found, _ = formats("qwen3", tool_format="minicpm5", reasoning_format="thought").read(request(TOOL), "")
    assert found.tools is TOOL_FORMATS["minicpm5"]
    assert found.reasoning == ("<|thought_start|>", "<|thought_end|>")
    found, _ = formats("qwen3", tool_format="none", reasoning_format="none").read(request(TOOL), "")
    assert found.parser() is None


def test_special_tokens_that_are_marks_stay_in_the_text():
    tokens = {
        "<tool_call>": 90,
        "</tool_call>": 91,
        "<think>": 92,
        "</think>": 93,
        "<|im_end|>": 94,
        "<s>": 95,
    }
    found, _ = formats("qwen3", tokens, special={90, 91, 94, 95}).read(request(TOOL), "")
    assert set(found.kept_token_ids) == {90, 91}


def test_only_chats_are_taken_apart_and_calls_only_where_there_are_tools():
    model = formats()
    assert model.read(inference_pb2.GenerateRequest(text="x"), "")[0].parser() is None
    assert model.read(request(), "")[0].tools is None
    assert model.read(request(TOOL, tool_choice="TOOL_CHOICE_NONE"), "")[0].tools is None
    assert model.read(request(TOOL, raw=True), "")[0].parser() is None


@pytest.mark.parametrize(
    ("rendered", "thinking"),
    [
        ("...assistant\n", False),
        ("...assistant\n<think>\n", True),
        ("...assistant\n<think>\n\n</think>\n\n", False),
        ("user: what is <think>?\nassistant\n", False),
    ],
)
def test_whether_the_prompt_has_opened_the_thoughts(rendered, thinking):
    assert formats().read(request(), rendered)[0].thinking == thinking


def test_required_calls_become_a_constraint():
    tokens = {"<tool_call>": 90, "</tool_call>": 91}
    model = formats("qwen3", tokens, special={90})
    _, constraint = model.read(request(TOOL, OTHER, tool="stop"), "<think>\n")
    calls = msgspec.json.decode(constraint.text, type=ToolCalls)
    assert constraint.kind == "tool_choice"
    assert calls.format == "hermes"
    assert [json.loads(each) for each in calls.tools] == [json.loads(OTHER)]
    assert calls.thinking
    assert calls.special == ("<tool_call>",)


@pytest.mark.parametrize(
    ("model", "made", "error", "field"),
    [
        ("qwen3", request(tool="go"), InvalidArgumentError, "tool"),
        ("qwen3", request(tool_choice="TOOL_CHOICE_REQUIRED"), InvalidArgumentError, "tool_choice"),
        ("qwen3", request(TOOL, tool="fly"), InvalidArgumentError, "tool"),
        ("qwen3", request(TOOL, tool="go", tool_choice="TOOL_CHOICE_NONE"), InvalidArgumentError, "tool"),
        ("qwen3", request(TOOL, tool="go", lark="start: x"), InvalidArgumentError, "lark"),
        ("qwen3", request(TOOL, tool_choice=77), InvalidArgumentError, "tool_choice"),
        ("smollm2", request(TOOL, tool_choice="TOOL_CHOICE_AUTO"), FailedPreconditionError, "tool_choice"),
        ("smollm2", request(TOOL, tool="go"), FailedPreconditionError, "tool_choice"),
    ],
)
def test_choices_that_cannot_be_are_refused(model, made, error, field):
    with pytest.raises(error) as caught:
        formats(model).read(made, "")
    assert caught.value.field == field


def test_a_form_beside_open_thoughts_is_refused():
    with pytest.raises(InvalidArgumentError, match="enable_thinking"):
        formats().read(request(regex="a"), "<think>\n")


def test_pieces_and_calls_reach_the_right_fields():
    found, _ = formats().read(request(TOOL), "")
    writer = AnswerWriter(found, "abc", 2)
    answer = '<think>Hm.</think>Yes. <tool_call>{"name": "go"}</tool_call><tool_call>{"name": "stop"}'
    chunks = [writer.chunk(Tokens("abc-2", (5,), piece)).chunk for piece in answer]
    end = writer.finished(
        Finished("abc-2", "length", "</tool_call> ", prompt_tokens=1, generated_tokens=1)
    ).finished
    assert "".join(chunk.reasoning for chunk in chunks) == "Hm."
    assert "".join(chunk.text for chunk in chunks) + end.text == "Yes."
    calls = [call for chunk in chunks for call in chunk.tool_calls] + list(end.tool_calls)
    assert [(call.id, call.name, call.arguments) for call in calls] == [
        ("call-abc-2-0", "go", "{}"),
        ("call-abc-2-1", "stop", "{}"),
    ]
    assert {chunk.index for chunk in chunks} == {end.index} == {2}


def test_answers_have_seeds_and_names_of_their_own():
    submit = Submit("r", "m", (1,), Sampling(n=3, seed=2**64 - 1, temperature=1.0), Stops(4))
    made = split_answers(submit)
    assert [(each.request_id, each.sampling.seed, each.sampling.n) for each in made] == [
        ("r-0", 2**64 - 1, 1),
        ("r-1", 0, 1),
        ("r-2", 1, 1),
    ]
    assert split_answers(msgspec.structs.replace(submit, sampling=Sampling())) == [
        msgspec.structs.replace(submit, sampling=Sampling())
    ]


class Stream:
    def __init__(self, events, error=None):
        self.events, self.error = list(events), error

    def __aiter__(self):
        return self

    async def __anext__(self):
        await asyncio.sleep(0)
        if self.events:
            return self.events.pop(0)
        if self.error is not None:
            raise self.error
        raise StopAsyncIteration


def test_streams_are_merged_each_in_its_order():
    async def main():
        streams = [Stream(range(5)), Stream(range(10, 12)), Stream([])]
        return [found async for found in merged(streams)]

    found = asyncio.run(main())
    assert [event for index, event in found if index == 0] == [0, 1, 2, 3, 4]
    assert [event for index, event in found if index == 1] == [10, 11]


def test_the_first_stream_that_fails_ends_them_all():
    async def main():
        endless, seen = Stream(range(10**6)), []

        async def read():
            async for found in merged([endless, Stream([1], ResourceExhaustedError("full"))]):
                seen.append(found)  # noqa: PERF401 - what came before the failure counts

        with pytest.raises(ResourceExhaustedError):
            await read()
        return seen, len(endless.events)

    seen, left = asyncio.run(main())
    assert (1, 1) in seen
    assert left > 10**6 - 20
