"""A model's chat template: messages to the text that the model was trained on, as transformers renders it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from edged.checkpoint.json_file import read_optional_json_object
from edged.checkpoint.template_budget import RenderLimits
from edged.checkpoint.template_environment import TemplateEnvironment
from edged.checkpoint.template_rendering import Rendering
from edged.checkpoint.template_source import TEMPLATE_FILE, compile_template, read_sources
from edged.checkpoint.tokenizer import read_special_tokens
from edged.errors import FailedPreconditionError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MAX_DEPTH = 64
# Every template takes these as they are; any other role has to be spelled in the template itself.
_COMMON_ROLES = frozenset({"system", "user", "assistant", "tool"})
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "template")
# The switch that a template has for thinking, by the names in use.
_THINKING_SWITCHES = ("enable_thinking", "thinking")


class ChatTemplate:
    """The chat template of a model. Use :meth:`load`; several threads may render at once.

    Args:
        sources: Templates by name; the one that is used is ``default``, or ``tool_use`` where there are tools.
        special_tokens: What templates see as ``bos_token``, ``eos_token`` and so on.
        where: Stands before messages about the templates.
        limits: What one rendering may use.

    Raises:
        CheckpointError: A template does not compile or reaches for other files.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        *,
        where: str = "chat template",
        limits: RenderLimits | None = None,
    ) -> None:
        self._where = where
        self._special_tokens = dict(special_tokens or {})
        self._renderings: dict[str, Rendering] = {}
        self._roles: dict[str, frozenset[str]] = {}
        self._variables: dict[str, frozenset[str]] = {}
        self._sources = dict(sources)
        environment = TemplateEnvironment()
        for name, source in self._sources.items():
            compiled = compile_template(environment, source, f"{where} ({name})")
            self._renderings[name] = Rendering(compiled.template, limits or RenderLimits(), where)
            self._roles[name] = _COMMON_ROLES | compiled.constants
            self._variables[name] = compiled.variables

    @classmethod
    def load(cls, folder: Path, *, limits: RenderLimits | None = None) -> ChatTemplate:
        """Load the chat template of a model folder, from ``chat_template.jinja`` or ``tokenizer_config.json``.

        A model without one loads too; rendering is then refused.

        Raises:
            CheckpointError: A file is damaged, or a template does not compile or reaches for other files.
        """
        folder = Path(folder)
        settings = read_optional_json_object(folder / "tokenizer_config.json")
        sources = read_sources(folder, settings)
        return cls(sources, read_special_tokens(settings), where=f"{folder}: chat template", limits=limits)

    def __bool__(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._renderings)

    @property
    def source(self) -> str:
        """All templates as they are written."""
        return "\n".join(self._sources.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model's templates."""
        return tuple(self._renderings)

    def takes(self, variable: str) -> bool:
        """Whether one of the templates reads a variable."""
        return any(variable in variables for variables in self._variables.values())

    def check_arguments(
        self,
        arguments: Mapping[str, Any],
        *,
        tools: bool = False,
        enable_thinking: bool | None = None,
        template: str = "",
    ) -> dict[str, Any]:
        """Refuse what the template would not look at, which transformers would drop without a word.

        Args:
            arguments: Further variables of the template.
            tools: Whether the chat has tools.
            enable_thinking: Whether the model shall think; None leaves it to the template.
            template: Name of the template; empty for the one that is used without a name.

        Returns:
            The arguments, with the template's own switch for thinking set.

        Raises:
            InvalidArgumentError: The template reads no such variable, or has no place for tools or no switch.
            FailedPreconditionError: The model has no template.
        """
        name = self._choose(tools, template)
        known = self._variables[name]
        if tools and "tools" not in known:
            raise InvalidArgumentError(
                "tools were given, and the model's chat template has no place for them; leave them out, or put a "
                f"{TEMPLATE_FILE} that has one into the model folder",
                field="tools",
            )
        result = dict(arguments)
        if enable_thinking is not None:
            switch = next((switch for switch in _THINKING_SWITCHES if switch in known), None)
            if switch is None:
                raise InvalidArgumentError(
                    f"enable_thinking is {enable_thinking}, and the model's chat template has no switch for thinking; "
                    "leave it out",
                    field="enable_thinking",
                )
            result[switch] = enable_thinking
        for key in result:
            _refuse_reserved(key)
            if key not in known:
                free = sorted(known - set(_RESERVED) - set(self._special_tokens))
                has = f"it reads {', '.join(free)}" if free else "it has none"
                raise InvalidArgumentError(
                    f"template_arguments has {key[:100]!r}, which the model's chat template does not read; {has}",
                    field="template_arguments",
                )
        return result

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str = "",
        **kwargs: Any,  # noqa: ANN401 - what the template knows
    ) -> str:
        """Return the text of a chat, the same as transformers' ``apply_chat_template``.

        Args:
            messages: Each with ``role`` and ``content`` and whatever else the template reads (``tool_calls`` ...).
            tools: JSON schemas of the functions that the model may call.
            add_generation_prompt: Open the assistant's turn at the end.
            continue_final_message: Leave the last message open for the model to go on with; no turn is opened then.
            template: Name of the template; by default ``tool_use`` where there are tools and such a template, else
                ``default``.
            **kwargs: Further variables of the template, such as ``enable_thinking``.

        Raises:
            InvalidArgumentError: The template cannot render these messages; ``field`` names the first at fault, or the
                tools or arguments without which it can.
            FailedPreconditionError: The model has no template, or it uses more than it may.
        """
        name = self._choose(tools is not None, template)
        for key in kwargs:
            _refuse_reserved(key)
        chat = [self._message(message, f"messages[{index}]", name) for index, message in enumerate(messages)]
        if not chat:
            raise InvalidArgumentError("messages is empty; a chat has at least one message", field="messages")
        variables: dict[str, Any] = {
            **self._special_tokens,
            **_plain(kwargs, "template_arguments"),
            "tools": _plain(list(tools), "tools") if tools is not None else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        rendering = self._renderings[name]
        render = rendering.render_open if continue_final_message else rendering.render
        return render(chat, variables, tuple(kwargs))

    def _choose(self, tools: bool, wanted: str) -> str:
        if not self._renderings:
            raise FailedPreconditionError(
                f"{self._where}: the model has none; send text or token ids instead of messages, or put a "
                f"{TEMPLATE_FILE} into the model folder",
                field="messages",
            )
        if not wanted:
            return "tool_use" if tools and "tool_use" in self._renderings else "default"
        if wanted not in self._renderings:
            raise InvalidArgumentError(
                f"template is {wanted[:100]!r}; the model has {', '.join(self._renderings)}", field="template"
            )
        return wanted

    def _message(self, message: Mapping[str, Any], where: str, template: str) -> dict[str, Any]:
        # Absent and null are the same to a client and not to a template.
        plain: dict[str, Any] = {
            key: value for key, value in _plain(message, where).items() if value is not None
        }
        role = plain.get("role")
        roles = self._roles[template]
        if not isinstance(role, str) or role not in roles:
            known = ", ".join(sorted(_COMMON_ROLES))
            raise InvalidArgumentError(
                f"{where}.role is {str(role)[:100]!r}, which the model's chat template does not know; use {known}",
                field=f"{where}.role",
            )
        reasoning = next((plain[key] for key in _REASONING_KEYS if key in plain), None)
        if reasoning is not None:
            plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
        return plain


def _refuse_reserved(key: str) -> None:
    if key in _RESERVED:
        raise InvalidArgumentError(f"{key} is no template argument; it has its own place", field=key)


def _plain(value: Any, where: str, depth: int = 0) -> Any:  # noqa: ANN401 - JSON
    """Copy a value as plain JSON types, which have no methods that a template could misuse."""
    if depth > _MAX_DEPTH:
        raise InvalidArgumentError(f"{where}: is nested more than {_MAX_DEPTH} deep", field=where)
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    if hasattr(value, "items"):
        return {str(key): _plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    raise InvalidArgumentError(f"{where}: {type(value).__name__} is no JSON value", field=where)
