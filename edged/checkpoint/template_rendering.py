"""One rendering of a chat template: within its limits, and with the message, tools or arguments named where it fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import SecurityError

from edged.checkpoint.template_budget import Budget, BudgetError, RenderLimits
from edged.checkpoint.template_environment import RefusedError
from edged.errors import FailedPreconditionError, InvalidArgumentError

if TYPE_CHECKING:
    import jinja2

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


@dataclass(frozen=True)
class Rendering:
    """A compiled template, and what one rendering may use."""

    template: jinja2.Template
    limits: RenderLimits
    where: str
    """Stands before messages about the template."""

    def render(
        self, chat: list[dict[str, Any]], variables: dict[str, Any], arguments: tuple[str, ...]
    ) -> str:
        """The text of a chat.

        Args:
            chat: Plain messages.
            variables: What the template sees beside them.
            arguments: Which of these the request gave.

        Raises:
            FailedPreconditionError: The template was stopped at a limit, or at something that it may not do.
            InvalidArgumentError: It refuses or cannot render a message, the tools or the arguments; ``field`` says which.
        """
        try:
            return self._run(chat, variables)
        except (BudgetError, RecursionError, MemoryError) as error:
            raise FailedPreconditionError(
                f"{self.where}: was stopped: {error or type(error).__name__}; use another template or fewer messages",
                field="messages",
            ) from None
        except SecurityError as error:
            raise FailedPreconditionError(f"{self.where}: was stopped: {error}", field="messages") from None
        except Exception as error:  # noqa: BLE001 - templates fail in any way on messages they do not expect
            self._blame_variables(chat, variables, arguments, error)
            index = self._first_at_fault(chat, variables, error)
            field = f"messages[{index}]"
            if isinstance(error, RefusedError):
                field += ".role" if "role" in str(error).lower() else ""
                raise InvalidArgumentError(
                    f"{field}: the chat template refuses it: {error}", field=field
                ) from None
            raise InvalidArgumentError(
                f"{field}: the chat template cannot render it: {error}", field=field
            ) from None

    def render_open(
        self, chat: list[dict[str, Any]], variables: dict[str, Any], arguments: tuple[str, ...]
    ) -> str:
        """As :meth:`render`, with the last message left open.

        It is rendered with a mark at the end of the last message's text, and cut there.
        """
        final = chat[-1]
        field = f"messages[{len(chat) - 1}].content"
        content = final.get("content")
        if isinstance(content, list):
            parts = [part for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
            holder, key = (parts[-1], "text") if parts else ({}, "")
        else:
            holder, key = final, "content"
        text = holder.get(key)
        if not isinstance(text, str):
            raise InvalidArgumentError(f"{field}: is no text that could be continued", field=field)
        holder[key] = text + _CONTINUE_TAG
        rendered = self.render(chat, variables, arguments)
        place = rendered.rfind(_CONTINUE_TAG.strip())
        if place < 0 or text.strip() not in rendered:
            raise InvalidArgumentError(
                f"{field}: the chat template drops parts of the last message, which therefore cannot be continued",
                field=field,
            )
        # A template that trims its messages also trims what is continued.
        kept = rendered[place : place + len(_CONTINUE_TAG)] == _CONTINUE_TAG
        return rendered[:place] if kept else rendered[:place].rstrip()

    def _run(self, chat: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        with Budget(self.limits, _characters(chat) + _characters(variables)) as budget:
            parts: list[str] = []
            count = 0
            for part in self.template.generate({**variables, "messages": chat}):
                count += len(part)
                budget.check_length_of_text(count)
                parts.append(part)
            return "".join(parts)

    def _blame_variables(
        self,
        chat: list[dict[str, Any]],
        variables: dict[str, Any],
        arguments: tuple[str, ...],
        error: Exception,
    ) -> None:
        """Raise for the tools, or for the arguments, if the chat renders without them."""
        for field, keys in (("tools", ("tools",)), ("template_arguments", arguments)):
            if all(variables[key] is None for key in keys):
                continue
            rest = {key: value for key, value in variables.items() if key not in keys}
            try:
                self._run(chat, {**rest, "tools": rest.get("tools")})
            except Exception:  # noqa: BLE001, S112 - as the rendering itself; then they are not to blame
                continue
            verb = "refuses" if isinstance(error, RefusedError) else "cannot render"
            raise InvalidArgumentError(f"{field}: the chat template {verb} it: {error}", field=field)

    def _first_at_fault(self, chat: list[dict[str, Any]], variables: dict[str, Any], error: Exception) -> int:
        """Return the index of the message with which the rendering begins to fail (by bisection)."""
        good, bad = 0, len(chat)
        while bad - good > 1:
            middle = (good + bad) // 2
            try:
                self._run(chat[:middle], {**variables, "add_generation_prompt": False})
            except Exception as other:  # noqa: BLE001 - as the rendering itself
                if type(other) is not type(error):
                    break
                bad = middle
            else:
                good = middle
        return bad - 1


def _characters(value: object) -> int:
    """Count the characters of all texts in a plain value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list):
        return sum(map(_characters, value))
    if isinstance(value, dict):
        return sum(map(len, value)) + sum(map(_characters, value.values()))
    return 0
