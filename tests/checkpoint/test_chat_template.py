"""Chat templates: the same bytes as transformers, errors that name the message, and no way out of the sandbox."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from transformers_templates import source, template, transformers_tokenizer

from edged.checkpoint.chat_template import ChatTemplate
from edged.checkpoint.template_budget import RenderLimits
from edged.errors import CheckpointError, FailedPreconditionError, InvalidArgumentError

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("chatml_tools", "thinking", "headers", "strict")

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says how <hot> & 'wet' it is — où ? 天气",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "北京", "days": 2, "wet": None}},
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hi"}],
    "system": [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "你好世界 🙂\n\n"},
    ],
    "turns": [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "<think>\nsum\n</think>\n\n2"},
        {"role": "user", "content": "and & 'so' <on>\t"},
    ],
    "ends with the assistant": [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "gone", "reasoning_content": "\nshort\n"},
    ],
    "tool": [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": '{"t": 3}', "name": "weather"},
        {"role": "tool", "content": "wet"},
        {"role": "assistant", "content": "3 degrees"},
    ],
}


@pytest.fixture(scope="module")
def reference() -> Any:
    return transformers_tokenizer()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize(
    "tools", [None, [WEATHER], [WEATHER, {"type": "function", "function": {"name": "hidden"}}]]
)
@pytest.mark.parametrize(
    "arguments", [{}, {"enable_thinking": False, "date_string": "1 Jan 2026"}, {"enable_thinking": True}]
)
@pytest.mark.parametrize("open_turn", [True, False])
def test_same_bytes_as_transformers(  # noqa: PLR0917 - what is combined
    reference: Any, name: str, chat: str, tools: Any, arguments: dict[str, Any], open_turn: bool
) -> None:
    options = {"tools": tools, "add_generation_prompt": open_turn, **arguments}
    if name == "strict" and chat in ("system", "tool"):
        with pytest.raises(TemplateError):
            reference.apply_chat_template(CHATS[chat], chat_template=source(name), tokenize=False, **options)
        with pytest.raises(InvalidArgumentError, match=r"messages\[0\]\.role"):
            template(name).render(CHATS[chat], **options)
        return
    expected = reference.apply_chat_template(
        CHATS[chat], chat_template=source(name), tokenize=False, **options
    )
    assert template(name).render(CHATS[chat], **options) == expected


@given(
    st.lists(
        st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), st.text(max_size=30)),
        min_size=1,
        max_size=5,
    )
)
@settings(max_examples=60, deadline=None)
def test_any_texts_render_as_in_transformers(reference: Any, turns: list[tuple[str, str]]) -> None:
    chat = [{"role": role, "content": content} for role, content in turns]
    for name in ("chatml_tools", "thinking"):
        expected = reference.apply_chat_template(chat, chat_template=source(name), tokenize=False)
        assert template(name).render(chat, add_generation_prompt=False) == expected


@pytest.mark.parametrize("chat", ["one", "system", "turns"])
def test_demo_template_is_as_in_transformers(demo_model: Path, chat: str) -> None:
    reference = transformers.AutoTokenizer.from_pretrained(demo_model)
    expected = reference.apply_chat_template(CHATS[chat], tokenize=False, add_generation_prompt=True)
    assert ChatTemplate.load(demo_model).render(CHATS[chat]) == expected


@pytest.mark.parametrize("name", ["chatml_tools", "thinking", "headers"])
@pytest.mark.parametrize("text", ["The answer", " spaced ", "line\n"])
def test_continuing_the_last_message_is_as_in_transformers(reference: Any, name: str, text: str) -> None:
    chat = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": text}]
    options: dict[str, Any] = {"date_string": "today"}
    expected = reference.apply_chat_template(
        chat, chat_template=source(name), tokenize=False, continue_final_message=True, **options
    )
    assert template(name).render(chat, continue_final_message=True, **options) == expected


def test_messages_are_not_changed() -> None:
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
    ]
    before = json.dumps(chat)
    with pytest.raises(InvalidArgumentError):  # the template drops content that is a list
        template("thinking").render(chat, continue_final_message=True)
    assert json.dumps(chat) == before


@pytest.mark.parametrize(
    ("chat", "field"),
    [
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x"}, {"content": "x"}], "messages[1].role"),
        ([{"role": "user", "content": "x"}, {"role": 7, "content": "x"}], "messages[1].role"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": "x"}], "messages[1].role"),
        ([{"role": "assistant", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x"}, {"role": "assistant"}], "messages[1]"),
        (
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": object()}],
            "messages[1].content",
        ),
        ([], "messages"),
    ],
)
def test_the_message_at_fault_is_named(chat: list[dict[str, Any]], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        template("strict").render(chat)
    assert caught.value.field == field
    assert field in caught.value.message


def test_the_first_of_many_messages_at_fault_is_named() -> None:
    chat = [{"role": ("user", "assistant")[index % 2], "content": "x"} for index in range(101)]
    chat[77]["role"] = "user"
    with pytest.raises(InvalidArgumentError) as caught:
        template("strict").render(chat)
    assert caught.value.field == "messages[77].role"


def test_a_role_that_the_template_spells_is_known() -> None:
    assert "ipython" in template("headers").render(
        [{"role": "user", "content": "x"}, {"role": "ipython", "content": "y"}]
    )
    with pytest.raises(InvalidArgumentError, match="ipython"):
        template("strict").render([{"role": "ipython", "content": "y"}])


def test_variables_of_the_chat_are_no_arguments() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        template("strict").render([{"role": "user", "content": "x"}], documents=[])
    assert caught.value.field == "documents"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("smollm2", "loop"),
        ("smollm2", "message"),
        ("qwen3", "ns"),
        ("minicpm4", "fields"),
        ("headers", "role"),
    ],
)
def test_what_a_template_sets_itself_is_no_argument(name: str, key: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"template_arguments has '{key}'") as caught:
        template(name).check_arguments({key: 3})
    assert key not in caught.value.message.split("; ")[-1].split()


@pytest.mark.parametrize(
    ("name", "key"),
    [("headers", "date_string"), ("llama3", "tools_in_user_message"), ("thinking", "enable_thinking")],
)
def test_what_a_template_sets_where_it_is_silent_is_an_argument(name: str, key: str) -> None:
    assert template(name).check_arguments({key: "x"}) == {key: "x"}


def test_a_model_without_template_says_what_to_do(tmp_path: Path) -> None:
    loaded = ChatTemplate.load(tmp_path)
    assert not loaded
    with pytest.raises(FailedPreconditionError, match=r"chat_template\.jinja"):
        loaded.render([{"role": "user", "content": "x"}])


def test_files_of_a_folder(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "x"}]
    config = tmp_path / "tokenizer_config.json"
    config.write_text(
        json.dumps({"chat_template": "config {{ bos_token }}", "bos_token": {"content": "<b>"}})
    )
    assert ChatTemplate.load(tmp_path).render(chat) == "config <b>"
    listed = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    config.write_text(json.dumps({"chat_template": listed}))
    loaded = ChatTemplate.load(tmp_path)
    assert (loaded.render(chat), loaded.render(chat, tools=[WEATHER])) == ("plain", "tools")
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTemplate.load(tmp_path).render(chat) == "file"
    config.write_text(json.dumps({"chat_template": 7}))
    with pytest.raises(CheckpointError, match="chat_template"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "{% include 'secret' %}",
        "{% import '/etc/passwd' as x %}",
        "{% extends 'x' %}",
        "{% for %}",
        "{% if x %}",
        "{{ 'a' | nothing }}",
        "(" * 100_000,
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
        "x" * (2 << 20),
    ],
    ids=lambda text: text[:20],
)
def test_refused_when_loaded(text: str) -> None:
    if text.startswith("((("):
        assert ChatTemplate({"default": text})  # plain text, however odd
        return
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTemplate({"default": text})


HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "output": "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    "range": "{% for a in range(1000000000) %}{% endfor %}",
    "recursion": "{% macro m(n) %}{{ m(n + 1) }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "wide recursion": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}",
    "block recursion": "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "recursive loop": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "repeat": "{{ messages[0].content * 1000000000 }}",
    "repeat a list": "{{ ([1] * 1000000000) | length }}",
    "doubling +": "{% set n = namespace(x='abc') %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling ~": "{% set n = namespace(x='abc') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling set": "{% set n = namespace(x='abc') %}{% for a in range(60) %}{% set t %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = t %}{% endfor %}",
    "doubling list": "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling join": "{% set n = namespace(x='abc') %}{% for a in range(60) %}{% set n.x = [n.x, n.x] | join %}{% endfor %}",
    "doubling replace": "{% set n = namespace(x='a') %}{% for a in range(60) %}{% set n.x = n.x | replace('a', 'aa') %}{% endfor %}",
    "doubling method": "{% set n = namespace(x='a') %}{% for a in range(60) %}{% set n.x = n.x.replace('a', 'aa') %}{% endfor %}",
    "doubling format": "{% set n = namespace(x='a') %}{% for a in range(60) %}{% set n.x = '{}{}'.format(n.x, n.x) %}{% endfor %}",
    "doubling %": "{% set n = namespace(x='a') %}{% for a in range(60) %}{% set n.x = '%s%s' % (n.x, n.x) %}{% endfor %}",
    "doubling tojson": "{% set n = namespace(x='\"') %}{% for a in range(60) %}{% set n.x = n.x | tojson %}{% endfor %}",
    "keeping ~": "{% set n = namespace(x=[]) %}{% for a in range(99999) %}{% set n.x = n.x + [('a' * 999999) ~ a] %}{% endfor %}",
    "keeping slices": "{% set n = namespace(x=[], y='a' * 999999) %}{% for a in range(99999) %}{% set n.x = n.x + [n.y[1:]] %}{% endfor %}",
    "keeping methods": "{% set n = namespace(x=[], y='a' * 999999) %}{% for a in range(99999) %}{% set n.x = n.x + [n.y.upper()] %}{% endfor %}",
    "keeping lists": "{% set n = namespace(x=[]) %}{% for a in range(99999) %}{% set n.x = n.x + [range(99999) | list] %}{% endfor %}",
    "keeping mapped": "{% set x = range(99999) | map('center', 99999) | list %}",
    "keeping split": "{% set n = namespace(x=[], y='a ' * 99999) %}{% for a in range(99999) %}{% set n.x = n.x + [n.y.split()] %}{% endfor %}",
    "width": "{{ 'a' | center(1000000000) }}",
    "width %": "{{ '%1000000000d' % 1 }}",
    "computed width": "{{ '%*d' % (1000000000, 1) }}",
    "width format": "{{ '{:1000000000}'.format(1) }}",
    "computed width format": "{{ '{:{}}'.format(1, 1000000000) }}",
    "width method": "{{ 'a'.ljust(1000000000) }}",
    "zfill": "{{ 'a'.zfill(1000000000) }}",
    "tabs": "{{ ('\t' * 1000).expandtabs(99999) }}",
    "indent": "{{ ('a\n' * 100000) | indent(99999) }}",
    "json indent": "{{ [1] | tojson(indent=1000000000) }}",
    "batch": "{{ [1] | batch(1000000000, 'x') | list | length }}",
    "power": "{{ 10 ** 9999999999 }}",
    "product": "{% set n = namespace(x=10) %}{% for a in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "laughs": "{% set n = namespace(x=['ha']) %}{% for a in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "laughs ~": "{% set n = namespace(x=['ha']) %}{% for a in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{% set y = '' ~ n.x %}",
    "laughs json": "{% set n = namespace(x=['ha']) %}{% for a in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | tojson }}",
    "laughs compared": "{% set n = namespace(x=['a'], y=['a']) %}{% for a in range(60) %}{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
    "laughs hashed": "{% set n = namespace(x=('a',)) %}{% for a in range(60) %}{% set n.x = (n.x, n.x) %}{% endfor %}{{ {n.x: 1} | length }}",
    "laughs tested": "{% set n = namespace(x=['a'], y=['a']) %}{% for a in range(60) %}{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x is eq(n.y) }}",
    "bytes": "{{ (5).to_bytes(1000000000, 'big') }}",
    "class": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "format globals": "{{ '{0.__init__.__globals__}'.format(cycler) }}",
    "attr": "{{ ([] | attr('append'))(1) }}",
    "open": "{{ open('/etc/passwd').read() }}",
    "mutate": "{% set x = messages.append({'role': 'user'}) %}",
    "namespace": "{% set n = namespace(__class__=1) %}",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_stopped(name: str) -> None:
    limits = RenderLimits(seconds=1.0, steps=300_000, characters=1 << 20)
    chat = [{"role": "user", "content": "hello"}]
    try:
        loaded = ChatTemplate({"default": HOSTILE[name]}, limits=limits)
    except CheckpointError:
        return
    with pytest.raises((FailedPreconditionError, InvalidArgumentError)) as caught:
        loaded.render(chat)
    assert "root:" not in caught.value.message
    # The template can be used again, and so can the thread.
    assert template("strict").render(chat) == "<s>[INST] hello [/INST]"


def test_the_limits_are_for_one_rendering_each() -> None:
    limits = RenderLimits(steps=60_000)
    loaded = ChatTemplate({"default": "{% for a in range(5000) %}{% endfor %}x"}, limits=limits)
    for _ in range(5):
        assert loaded.render([{"role": "user", "content": "hello"}]) == "x"


def test_processor_time_is_limited() -> None:
    limits = RenderLimits(seconds=0.05, steps=1 << 60)
    loaded = ChatTemplate({"default": HOSTILE["loops"]}, limits=limits)
    with pytest.raises(FailedPreconditionError, match=r"0\.05 s"):
        loaded.render([{"role": "user", "content": "hello"}])


MEASURE = """
import json, os, resource, sys
from edged.checkpoint.chat_template import ChatTemplate
from edged.errors import EdgedError
for name, source in json.load(sys.stdin).items():
    if not os.fork():
        for text in ("hello", chr(0x1F642) * 20):
            try:
                ChatTemplate({"default": source}).render([{"role": "user", "content": text}])
            except EdgedError:
                pass
        usage = resource.getrusage(resource.RUSAGE_SELF)
        print(json.dumps([name, usage.ru_maxrss >> 10, usage.ru_utime]), flush=True)
        os._exit(0)
    os.wait()
"""


def test_hostile_templates_cost_little_time_and_memory() -> None:
    """With the default limits, each in a process of its own."""
    greedy = {name: text for name, text in HOSTILE.items() if name.startswith(("keeping", "repeat"))}
    sources = {**greedy, **{f"{name} wide": text.replace("'a'", "'🙂'") for name, text in greedy.items()}}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], input=json.dumps(sources).encode(), capture_output=True, check=True
    )
    measured = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(measured) == len(sources)
    for name, peak, seconds in measured:
        assert peak < 200, name  # MiB; the interpreter and its libraries take 40
        assert seconds < 2 * 2.5, name  # processor time of two renderings


@pytest.mark.parametrize("text", ["{{a}}" * 21_000, "{{ [" + "1," * 21_000 + "] }}"], ids=["many", "long"])
def test_templates_that_would_take_long_to_compile_are_refused(text: str) -> None:
    begun = time.process_time()
    with pytest.raises(CheckpointError, match="cannot be compiled: it has more than 20000 nodes"):
        ChatTemplate({"default": text})
    assert time.process_time() - begun < 10


def test_a_long_chat_fits_the_default_limits() -> None:
    chat = [{"role": ("user", "assistant")[index % 2], "content": "word " * 400} for index in range(2000)]
    assert len(template("thinking").render(chat, tools=[WEATHER] * 50)) > 4_000_000
