"""Tools, calls, thoughts and template arguments, from the client and edgectl through the daemon to the template."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from fixtures.daemon import DaemonProcess, demo_configuration

from edged.client.requests import tokenize_request
from edged.errors import FailedPreconditionError, InvalidArgumentError
from edged.v1 import inference_pb2, inference_pb2_grpc

TEMPLATES = Path(__file__).parents[1] / "checkpoint" / "templates"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says how <hot> it is — où ?",
        "parameters": {
            "type": "object",
            "properties": {
                "days": {"type": "integer", "default": 5, "maximum": 7.0},
                "city": {"type": "string"},
            },
            "required": ["city"],
        },
    },
}
CHAT = [
    {"role": "system", "content": "Use tools."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Ask the tool.",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "weather", "arguments": {"days": 2, "city": "北京"}},
            }
        ],
    },
    {"role": "tool", "content": "wet", "tool_call_id": "c1"},
]


@pytest.fixture(scope="module")
def folder(demo_model, tmp_path_factory):
    """The demo model with the template of a model that thinks and calls tools."""
    folder = tmp_path_factory.mktemp("tools") / "model"
    folder.mkdir()
    for file in demo_model.iterdir():
        (folder / file.name).symlink_to(file)
    shutil.copy(TEMPLATES / "qwen3.jinja", folder / "chat_template.jinja")
    named = folder / "additional_chat_templates"
    named.mkdir()
    (named / "plain.jinja").write_text("{{ messages[0].content }}{{ n }}{{ broken.x.y if n == 'break' }}")
    return folder


@pytest.fixture(scope="module")
def tool_daemon(folder):
    process = DaemonProcess(demo_configuration(folder), forked=True)
    try:
        yield process.wait_ready()
    finally:
        process.close()


@pytest.fixture
def tool_client(tool_daemon):
    with tool_daemon.client() as client:
        yield client


def rendered(daemon, messages, **options) -> str:
    """What the daemon's template made."""
    import grpc

    request = tokenize_request(messages, model="", no_special_tokens=False, options=options)
    with grpc.insecure_channel(daemon.address) as channel:
        response: inference_pb2.TokenizeResponse = inference_pb2_grpc.InferenceStub(channel).Tokenize(request)
    return response.rendered


@pytest.fixture(scope="module")
def reference(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("thinking", [None, True, False])
def test_the_prompt_is_what_transformers_makes(reference, tool_daemon, tool_client, thinking):
    arguments = {} if thinking is None else {"enable_thinking": thinking}
    expected = reference.apply_chat_template(
        CHAT, tools=[WEATHER], tokenize=False, add_generation_prompt=True, **arguments
    )
    assert rendered(tool_daemon, CHAT, tools=[WEATHER], enable_thinking=thinking) == expected
    assert rendered(tool_daemon, CHAT, tools=[json.dumps(WEATHER)], template_arguments=arguments) == expected
    ids = tool_client.tokenize(CHAT, tools=[WEATHER], enable_thinking=thinking)
    assert list(ids) == reference(expected, add_special_tokens=False)["input_ids"]
    generation = tool_client.generate(CHAT, tools=[WEATHER], enable_thinking=thinking, max_tokens=1).answer()
    assert generation.started.prompt_tokens == len(ids)


def test_a_named_template_and_its_arguments(tool_daemon):
    assert rendered(tool_daemon, CHAT, template="plain", template_arguments={"n": 5}) == "Use tools.5"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tools": ["{"]}, "chat.tools[0]"),
        ({"tools": ["[]"]}, "chat.tools[0]"),
        ({"tools": [{"type": "function"}]}, "chat.tools[0].name"),
        ({"tools": [WEATHER, WEATHER]}, "chat.tools[1].function.name"),
        ({"template_arguments": "5"}, "chat.template_arguments"),
        ({"template_arguments": {"enable_thinking": "no"}}, "chat.template_arguments.enable_thinking"),
        ({"template_arguments": {"enable_thinkin": False}}, "chat.template_arguments"),
        ({"template": "wizard"}, "chat.template"),
        ({"template": "plain", "tools": [WEATHER]}, "chat.tools"),
        ({"template": "plain", "enable_thinking": False}, "chat.enable_thinking"),
        ({"template": "plain", "template_arguments": {"n": "break"}}, "chat.template_arguments"),
        ({"tools": ["[" * 400_000]}, "chat"),
    ],
)
def test_refused(tool_client, options, field):
    begun = time.monotonic()
    for call in (
        lambda: tool_client.tokenize(CHAT, **options),
        lambda: tool_client.generate(CHAT, **options).answer(),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            call()
        assert caught.value.field == field
    assert time.monotonic() - begun < 5


def test_what_the_demo_models_own_template_has_no_place_for(client):
    for options, field in (
        ({"tools": [WEATHER]}, "chat.tools"),
        ({"enable_thinking": True}, "chat.enable_thinking"),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            client.generate(CHAT[:2], **options).answer()
        assert caught.value.field == field
    assert not issubclass(FailedPreconditionError, InvalidArgumentError)


def test_edgectl(tool_daemon, tool_client, run_edgectl, tmp_path):
    (tmp_path / "tools.json").write_text(json.dumps([WEATHER]))
    chat = [{"role": "user", "content": "Hi"}]

    def ids(*arguments):
        result = run_edgectl("tokenize", "Hi", *arguments, EDGED_ADDRESS=tool_daemon.address)
        assert result.returncode == 0, result.stderr
        return tuple(map(int, result.stdout.split()))

    tools = tmp_path / "tools.json"
    assert ids("--tools", tools) == tool_client.tokenize(chat, tools=[WEATHER])
    (tmp_path / "one.json").write_text(json.dumps({"tools": WEATHER}))
    assert ids("--tools", tmp_path / "one.json") == ids("--tools", tools)
    assert ids("--no-think") == ids("--template-arg", "enable_thinking=false")
    assert ids("--no-think") == tool_client.tokenize(chat, enable_thinking=False)
    assert ids("--think") == tool_client.tokenize(chat, enable_thinking=True) == ids("--chat")

    def fails(*arguments):
        result = run_edgectl(*arguments, EDGED_ADDRESS=tool_daemon.address)
        assert result.stderr.count("\n") == 1
        return result.returncode, result.stderr

    code, message = fails("generate", "Hi", "--tools", tmp_path / "none.json")
    assert (code, "none.json: cannot be read: No such file" in message) == (5, True)
    (tmp_path / "bad.json").write_text("{")
    assert "bad.json: is no JSON" in fails("generate", "Hi", "--tools", tmp_path / "bad.json")[1]
    (tmp_path / "bad.json").write_text("[7]")
    assert "must hold a list of tools" in fails("generate", "Hi", "--tools", tmp_path / "bad.json")[1]
    assert fails("generate", "Hi", "--template-arg", "enable_thinking")[0] == 64
    code, message = fails("generate", "Hi", "--template-arg", "enable_thinking=maybe")
    assert (code, 'is "maybe"; give true or false' in message) == (3, True)
    result = run_edgectl(
        "generate",
        "Hi",
        "--tools",
        tools,
        "--no-think",
        "-n",
        "1",
        "--json",
        EDGED_ADDRESS=tool_daemon.address,
    )
    assert json.loads(result.stdout)["usage"]["prompt_tokens"] == len(
        tool_client.tokenize(chat, tools=[WEATHER], enable_thinking=False)
    )
    chatted = run_edgectl(
        "chat", "--no-think", "-n", "1", stdin="Hi\n/think\nHi\n", EDGED_ADDRESS=tool_daemon.address
    )
    assert chatted.returncode == 0, chatted.stderr
    assert "the model is asked to think" in chatted.stderr


@pytest.fixture
def run_edgectl(tmp_path, fork_server):
    def run(*arguments, stdin="", **environment):
        done = fork_server.run(
            [str(each) for each in arguments],
            stdin=stdin.encode(),
            timeout=60,
            cwd=tmp_path,
            environment={**os.environ, **environment},
        )
        return SimpleNamespace(returncode=done.code, stdout=done.out.decode(), stderr=done.err.decode())

    return run
