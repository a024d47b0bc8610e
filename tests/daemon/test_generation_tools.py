"""Tools, thoughts and several answers through the real daemon, with the demo model under Qwen3's chat template."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import pytest
from fixtures.daemon import DaemonProcess, demo_configuration

from edged.client import Chunk, Finished
from edged.errors import FailedPreconditionError, InvalidArgumentError

TEMPLATES = Path(__file__).parent.parent / "checkpoint" / "templates"
PARAMETERS = {
    "type": "object",
    "properties": {
        "place": {"enum": ["kitchen", "dock", "garden"]},
        "speed": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["place"],
}
TOOLS = [
    {"type": "function", "function": {"name": "go", "description": "Go there", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop", "description": "Stand still"}},
]
CHAT = [{"role": "user", "content": "Go to the kitchen, please."}]


@pytest.fixture(scope="module")
def tooled(demo_model, tmp_path_factory):
    """A client of a daemon whose model has a template for tools and thoughts."""
    folder = tmp_path_factory.mktemp("tooled")
    for file in demo_model.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    shutil.copy(TEMPLATES / "qwen3.jinja", folder / "chat_template.jinja")
    process = DaemonProcess(demo_configuration(folder, model={"context_length": 2048}), forked=True)
    try:
        with process.wait_ready().client() as client:
            yield client
        assert process.stop() == 0, process.log()
    finally:
        process.close()


def answer(client, prompt=CHAT, **options):
    return client.generate(prompt, **{"temperature": 0.0, "max_tokens": 80, **options}).answer()


def hold(calls):
    for call in calls:
        assert call.name in ("go", "stop")
        arguments = json.loads(call.arguments)
        if call.name == "go":
            jsonschema.validate(arguments, {**PARAMETERS, "additionalProperties": False})
        else:
            assert arguments == {}


def test_required_calls_come_as_calls(tooled):
    def run(seed):
        return answer(
            tooled,
            tools=TOOLS,
            tool_choice="required",
            temperature=1.5,
            seed=seed,
            max_tokens=56,
            enable_thinking=False,
        )

    with ThreadPoolExecutor(4) as threads:
        for got in threads.map(run, range(4)):
            if got.finished.reason != "length":
                assert got.text == ""
            assert got.tool_calls
            hold(got.tool_calls)
            assert len({call.id for call in got.tool_calls}) == len(got.tool_calls)
            assert all(call.id.startswith("call-") for call in got.tool_calls)


def test_one_tool_can_be_named(tooled):
    got = answer(tooled, tools=TOOLS, tool="stop", enable_thinking=False, max_tokens=25)
    assert got.tool_calls
    assert {call.name for call in got.tool_calls} == {"stop"}


def test_a_call_is_streamed_when_it_is_complete_and_is_not_in_the_text(tooled):
    form = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    events = list(
        tooled.generate(CHAT, tools=TOOLS, regex=form.replace("{", r"\{").replace("}", r"\}"), max_tokens=60)
    )
    called = [event for event in events if getattr(event, "tool_calls", ())]
    assert len(called) == 1
    assert [(call.name, call.arguments) for call in called[0].tool_calls] == [("stop", "{}")]
    assert "".join(getattr(event, "text", "") for event in events) == ""
    raw = answer(tooled, tools=TOOLS, regex=form.replace("{", r"\{").replace("}", r"\}"), raw=True)
    assert (raw.text, raw.tool_calls) == (form, ())
    none = answer(tooled, tools=TOOLS, regex=form.replace("{", r"\{").replace("}", r"\}"), tool_choice="none")
    assert (none.text, none.tool_calls) == (form, ())


def test_thoughts_are_split_from_the_answer(tooled):
    got = answer(tooled, regex="<think>\nHm, [a-z]{2,4}\n</think>\n\nYes [a-z]{2,5}", max_tokens=40)
    assert got.reasoning.startswith("Hm, ")
    assert got.text.startswith("Yes ")
    assert "think" not in got.reasoning + got.text
    text = "".join(
        event.text
        for event in tooled.generate("<think>", regex="<think>a</think>", max_tokens=20)
        if isinstance(event, Chunk | Finished)
    )
    assert text == "<think>a</think>", "a prompt that is no chat is answered as it is"


@pytest.mark.parametrize(
    ("options", "error", "field"),
    [
        ({"tool_choice": "required"}, InvalidArgumentError, "tool_choice"),
        ({"tool": "go"}, InvalidArgumentError, "tool"),
        ({"tools": TOOLS, "tool": "fly"}, InvalidArgumentError, "tool"),
        ({"tools": TOOLS, "tool": "go", "tool_choice": "none"}, InvalidArgumentError, "tool"),
        ({"tools": TOOLS, "tool": "go", "regex": "a"}, InvalidArgumentError, "regex"),
        ({"tools": TOOLS, "tool": "go", "ignore_eos": True}, InvalidArgumentError, "stops.ignore_eos"),
        (
            {"tools": [{"name": "f", "parameters": {"not": {}}}], "tool_choice": "required"},
            InvalidArgumentError,
            "tool_choice",
        ),
    ],
)
def test_choices_that_contradict_themselves_are_refused(tooled, options, error, field):
    with pytest.raises(error) as caught:
        answer(tooled, max_tokens=2, **options)
    assert caught.value.field == field


def test_a_model_whose_calls_are_not_known_says_so(client):
    # The template of the demo model has no place for tools at all, which is refused first.
    with pytest.raises((InvalidArgumentError, FailedPreconditionError)):
        answer(client, tools=TOOLS, tool_choice="required")


SEVERAL = {"temperature": 1.2, "max_tokens": 6, "seed": 2**64 - 2}


def test_several_answers_are_those_of_seeds_in_a_row(client):
    prompt = "The robot went through the old house and saw " * 8
    together = client.generate(prompt, n=3, **SEVERAL).answers()
    assert len(together) == 3
    for index, each in enumerate(together):
        alone = answer(client, prompt, **{**SEVERAL, "seed": (SEVERAL["seed"] + index) % 2**64})
        assert alone.token_ids == each.token_ids
    assert len({each.token_ids for each in together}) > 1


def test_several_answers_share_the_prompt(client):
    prompt = "One two three four five six seven eight nine ten eleven. " * 30
    before = client.status().models[0].prompt_tokens
    events = list(client.generate(prompt, n=3, temperature=1.0, max_tokens=3))
    ends = [event for event in events if isinstance(event, Finished)]
    assert sorted(end.index for end in ends) == [0, 1, 2]
    tokens = ends[0].usage.prompt_tokens
    assert tokens > 256
    # All of the prompt once, and of the others what does not fill a page.
    assert client.status().models[0].prompt_tokens - before <= tokens + 2 * 64


def test_a_client_that_leaves_ends_every_answer(client):
    generation = client.generate("Once", n=3, temperature=1.0, max_tokens=500, ignore_eos=True)
    for event in generation:
        if isinstance(event, Chunk):
            break
    generation.cancel()
    assert answer(client, "Go on", max_tokens=2).token_ids


@pytest.mark.parametrize("options", [{"n": 0}, {"n": 65, "temperature": 1.0}, {"n": 2, "temperature": 0.0}])
def test_numbers_of_answers_that_cannot_be_are_refused(client, options):
    with pytest.raises(InvalidArgumentError) as caught:
        answer(client, "x", **options)
    assert caught.value.field == "sampling.n"
