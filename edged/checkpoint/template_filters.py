"""Jinja's filters and tests with a check before what can grow, and one of every text that comes out."""

# ruff: noqa: ANN401 - the values of a template are of any type

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from jinja2 import pass_eval_context
from jinja2.filters import make_attrgetter

from edged.checkpoint.template_budget import BudgetError, check_count, check_size, count_result, current

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from jinja2.nodes import EvalContext

# Slow in the square of their input, and no use in a chat template.
_LEFT_OUT = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
# Write or compare the value as a whole.
_WHOLE = ("dictsort", "groupby", "max", "min", "sort", "string", "unique")
_COUNTED = ("batch", "center", "indent", "slice", "truncate", "round")
_COMPARING = ("==", "!=", "<", "<=", ">", ">=", "eq", "equalto", "ne", "lt", "lessthan", "le", "gt", "greaterthan", "ge", "in")  # fmt: skip


def bounded_filters(filters: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return the filters of an environment with their bounds, without those that have none."""
    bounded = {name: _bounded(name, function) for name, function in filters.items() if name not in _LEFT_OUT}
    bounded["join"] = _join
    return bounded


def bounded_tests(tests: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return the tests of an environment; those that compare check what they compare."""
    return {name: _checking(function) if name in _COMPARING else function for name, function in tests.items()}


def check_replace(text: str, old: object, new: object) -> None:
    """Allow ``text.replace(old, new)``.

    Raises:
        BudgetError: The result is too long.
    """
    if isinstance(old, str) and isinstance(new, str):
        found = text.count(old)
        current().check_length_of_text(len(text) + found * max(len(new) - len(old), 0))


def check_format(template: str, values: object) -> None:
    """Allow ``template % values``.

    Raises:
        BudgetError: A width is very large or computed, or a value too large to be written.
    """
    if re.search(r"%[^%a-zA-Z]*(\d{6}|\*)", template):
        raise BudgetError("it formats with a width that is very large or computed")
    check_size(values)


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # Filters that want the context, the environment or the like get it before the value.
    position = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        value = args[position] if len(args) > position else None
        _check_before(name, value, args[position + 1 :], kwargs)
        return count_result(function(*args, **kwargs))

    return bounded


def _check_before(name: str, value: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if name in _WHOLE:
        check_size(value)
    elif name in _COUNTED:
        for argument in (*args, *kwargs.values()):
            check_count(argument)
        if name == "indent" and isinstance(value, str):
            width = args[0] if args else kwargs.get("width", 4)
            columns = width if isinstance(width, int) else len(str(width))
            current().check_length_of_text(len(value) + columns * (value.count("\n") + 1))
    elif name == "replace":
        old, new = (*args, kwargs.get("old"), kwargs.get("new"))[:2]
        check_replace(str(value), old, new)
    elif name == "format":
        check_format(str(value), kwargs or args)
    elif name == "sum":
        start = args[1] if len(args) > 1 else kwargs.get("start", 0)
        if not isinstance(start, (int, float)):
            raise BudgetError("it sums what are no numbers")


def _checking(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checking(*args: Any) -> Any:
        for argument in args:
            check_size(argument)
        return function(*args)

    return checking


@pass_eval_context
def _join(context: EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(context.environment, attribute), value)
    budget = current()
    parts: list[str] = []
    characters = 0
    for item in value:
        check_size(item)
        parts.append(str(item))
        characters += len(parts[-1]) + len(d)
        budget.spend()
        budget.check_length_of_text(characters)
    return count_result(str(d).join(parts))
