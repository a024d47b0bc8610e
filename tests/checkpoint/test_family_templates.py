"""The templates of the families, in the shapes that are published: the same bytes as transformers over any conversation."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers_templates import source, template, transformers_tokenizer

from edged.checkpoint.chat_template import ChatTemplate
from edged.errors import InvalidArgumentError

FAMILIES = ("smollm2", "minicpm4", "qwen3", "llama3", "chatml_tools", "thinking", "headers")
WITH_TOOLS = tuple(name for name in FAMILIES if name != "smollm2")

texts = st.text(max_size=20) | st.sampled_from(
    [
        "<think>\nsum\n</think>\n\n2",
        "</think>",
        "<tool_response>x</tool_response>",
        " \n",
        "{{ 7 * 7 }}{% if %}",
        "<|im_end|>",
        "\u2028'\"<&>\\",
        "天气 🙂 où",
    ]
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64)
    | st.floats(allow_nan=False, allow_infinity=False)
)
json_values = st.recursive(
    scalars | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(["weather", "look_up", "天气", "a.b"])
schemas: st.SearchStrategy[Any] = st.recursive(
    st.fixed_dictionaries(
        {
            "type": st.sampled_from(
                ["string", "integer", "number", "boolean", "null", "array", ["string", "null"]]
            )
        },
        optional={
            "description": texts,
            "enum": st.lists(texts | st.integers(), min_size=1, max_size=3),
            "default": json_values,
        },
    ),
    lambda inner: (
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(names, inner, max_size=3)},
            optional={"required": st.lists(names, max_size=2), "additionalProperties": inner | st.booleans()},
        )
        | st.fixed_dictionaries({"type": st.just("array"), "items": inner})
    ),
    max_leaves=4,
)
tools = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries(
                {"name": names}, optional={"description": texts, "parameters": schemas}
            ),
        }
    ),
    min_size=1,
    max_size=3,
)
calls = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries(
            {
                "name": names,
                "arguments": st.dictionaries(
                    st.text("abc_é", min_size=1, max_size=4), json_values, max_size=3
                ),
            }
        ),
    },
    optional={"id": st.text("abc123", min_size=9, max_size=9)},
)
messages = st.one_of(
    st.fixed_dictionaries({"role": st.just("user"), "content": texts}, optional={"name": names}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": texts}, optional={"reasoning_content": texts}
    ),
    st.fixed_dictionaries(
        {
            "role": st.just("assistant"),
            "content": st.none() | texts,
            "tool_calls": st.lists(calls, min_size=1, max_size=2),
        },
        optional={"reasoning_content": texts},
    ),
    st.fixed_dictionaries(
        {"role": st.just("tool"), "content": texts}, optional={"name": names, "tool_call_id": texts}
    ),
)
system = st.fixed_dictionaries({"role": st.just("system"), "content": texts})
conversations = st.builds(
    lambda first, rest: first + rest, st.lists(system, max_size=1), st.lists(messages, min_size=1, max_size=5)
)


@pytest.fixture(scope="module")
def reference() -> Any:
    return transformers_tokenizer()


def compare(reference: Any, name: str, chat: Any, **options: Any) -> None:
    """Both render the same bytes, or both refuse."""
    options.setdefault("add_generation_prompt", False)
    try:
        expected = reference.apply_chat_template(chat, chat_template=source(name), tokenize=False, **options)
    except Exception:  # noqa: BLE001 - whatever a template fails with there
        with pytest.raises(InvalidArgumentError):
            template(name).render(chat, **options)
        return
    assert template(name).render(chat, **options) == expected


@pytest.mark.parametrize("name", FAMILIES)
@given(
    chat=conversations,
    offered=st.none() | tools,
    open_turn=st.booleans(),
    thinking=st.sampled_from([{}, {"enable_thinking": True}, {"enable_thinking": False}]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_conversation_is_the_same_bytes(  # noqa: PLR0917 - what is combined
    reference: Any, name: str, chat: Any, offered: Any, open_turn: bool, thinking: Any
) -> None:
    options = {"add_generation_prompt": open_turn, "date_string": "1 Jan 2026", **thinking}
    compare(reference, name, chat, tools=offered, **options)


@pytest.mark.parametrize("arguments", [
    {"builtin_tools": ["brave_search", "code_interpreter"]},
    {"tools_in_user_message": False},
    {"custom_tools": [{"name": "mine", "parameters": {"z": 1, "a": [1.0, 1e22, -0.0]}}]},
])  # fmt: skip
@given(chat=conversations, offered=st.none() | tools)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_template_arguments_are_the_same_bytes(
    reference: Any, arguments: Any, chat: Any, offered: Any
) -> None:
    compare(reference, "llama3", chat, tools=offered, date_string="today", **arguments)


@pytest.mark.parametrize("name", FAMILIES)
@given(chat=conversations, text=texts.filter(str.strip))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_continuing_any_conversation_is_the_same_bytes(
    reference: Any, name: str, chat: Any, text: str
) -> None:
    chat = [*chat, {"role": "assistant", "content": text}]
    compare(reference, name, chat, continue_final_message=True, date_string="today")


def test_the_clock_is_the_same() -> None:
    text = "{{ strftime_now('%Y-%m-%d') }}"
    chat = [{"role": "user", "content": "x"}]
    backend: Any = transformers.PreTrainedTokenizerFast
    plain = backend(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()))
    expected = plain.apply_chat_template(chat, chat_template=text, tokenize=False)
    assert ChatTemplate({"default": text}).render(chat) == expected


# What the template of a model says it reads


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_templates_with_tools_take_tools(name: str) -> None:
    assert template(name).check_arguments({}, tools=True) == {}


def test_tools_where_there_is_no_place_for_them_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="no place for them") as caught:
        template("smollm2").check_arguments({}, tools=True)
    assert caught.value.field == "tools"


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("thinking", [True, False])
def test_the_switch_for_thinking(name: str, thinking: bool) -> None:
    if name in ("minicpm4", "qwen3", "thinking"):
        assert template(name).check_arguments({}, enable_thinking=thinking) == {"enable_thinking": thinking}
        return
    with pytest.raises(InvalidArgumentError, match="no switch for thinking") as caught:
        template(name).check_arguments({}, enable_thinking=thinking)
    assert caught.value.field == "enable_thinking"


def test_the_switch_has_the_name_that_the_template_gives_it() -> None:
    deep = ChatTemplate({"default": "{% if thinking is defined and thinking %}<think>{% endif %}"})
    assert deep.check_arguments({}, enable_thinking=True) == {"thinking": True}


def test_arguments_that_the_template_does_not_read_are_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'date'.*builtin_tools, .*date_string") as caught:
        template("llama3").check_arguments({"date_string": "x", "date": "x"})
    assert caught.value.field == "template_arguments"
    with pytest.raises(InvalidArgumentError, match="its own place"):
        template("llama3").check_arguments({"messages": []})


def test_a_template_by_its_name() -> None:
    loaded = ChatTemplate({"default": "plain", "tool_use": "tools", "rag": "{{ documents_text }}"})
    chat = [{"role": "user", "content": "x"}]
    assert loaded.names == ("default", "tool_use", "rag")
    assert loaded.render(chat) == "plain"
    assert loaded.render(chat, tools=[{"name": "f"}]) == "tools"
    assert loaded.render(chat, tools=[{"name": "f"}], template="default") == "plain"
    assert loaded.render(chat, template="rag", documents_text="d") == "d"
    assert loaded.check_arguments({"documents_text": "d"}, template="rag")
    with pytest.raises(InvalidArgumentError, match="default, tool_use, rag") as caught:
        loaded.render(chat, template="wizard")
    assert caught.value.field == "template"


def test_tools_and_arguments_at_fault_are_named() -> None:
    chat = [{"role": "user", "content": "x"}]
    with pytest.raises(InvalidArgumentError, match="not iterable") as caught:
        template("llama3").render(chat, builtin_tools=5)
    assert caught.value.field == "template_arguments"
    loaded = ChatTemplate({"default": "{% for t in tools or [] %}{{ t.function.name + '' }}{% endfor %}"})
    with pytest.raises(InvalidArgumentError) as caught:
        loaded.render(chat, tools=[{"name": "f"}])
    assert caught.value.field == "tools"
