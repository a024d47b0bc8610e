"""The Jinja environment of chat templates: what transformers offers to them, in a sandbox with a budget.

Templates are programs from wherever the model came from. Jinja's sandbox keeps them from Python's internals. It does
not bound what they use, so every loop, every macro and every operation whose result can be much larger than its
operands is held to a budget here (:mod:`edged.checkpoint.template_budget`). No template can read a file: there is no
loader.
"""

# ruff: noqa: ANN401 - the values of a template are of any type

from __future__ import annotations

import datetime as dt
import json
import re
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.ext
import jinja2.runtime
import jinja2.utils
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, operators
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edged.checkpoint.template_budget import (
    BudgetError,
    check_count,
    check_length,
    check_size,
    count_result,
    current,
)
from edged.checkpoint.template_filters import bounded_filters, bounded_tests, check_format, check_replace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from jinja2.compiler import Frame
    from jinja2.parser import Parser
    from jinja2.runtime import Context, Macro

_MAX_INTEGER_BITS = 4096
# A template may call these of Python's own types, and nothing else of them.
_STRING_METHODS = """
    capitalize casefold center count encode endswith expandtabs find format format_map index isalnum isalpha isascii
    isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip
    partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith
    strip swapcase title upper zfill
"""
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_STRING_METHODS.split()),
    bytes: frozenset(["decode"]),
    dict: frozenset(["copy", "get", "items", "keys", "values"]),
    list: frozenset(["copy", "count", "index"]),
    tuple: frozenset(["count", "index"]),
    int: frozenset(["bit_length"]),
    float: frozenset(["is_integer"]),
}
_MAX_TIME_FORMAT = 1000
_STEPS_OF_A_TICK = 10


class RefusedError(TemplateError):
    """The template refused its input with ``raise_exception``."""


class _BoundedCode(CodeGenerator):
    """Compiles what Jinja's own interception leaves out: ``~``, comparisons, slices and tuples."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - Jinja's name
        self.write("environment.bounded_join((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802 - Jinja's name
        self.write("(environment.checked(")
        self.visit(node.expr, frame)
        self.write(")")
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:  # noqa: N802 - Jinja's name
        check = "searchable" if node.op in ("in", "notin") else "checked"
        self.write(f" {operators[node.op]} environment.{check}(")
        self.visit(node.expr, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802 - Jinja's name
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.counted(")
        super().visit_Getitem(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802 - Jinja's name
        if node.ctx != "load":  # a target of an assignment
            super().visit_Tuple(node, frame)
            return
        self.write("environment.checked(")
        super().visit_Tuple(node, frame)
        self.write(")")


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; here it only has to be understood."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Macro) -> str:
        text: str = caller()
        return text


class _TemplateDict:
    """``dict`` without what a class gives access to."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(jinja2.utils.Namespace):
    """``namespace`` whose attributes are names and not Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be an attribute
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            f"a namespace has no attribute {name!r}: names with an underscore are Python's own"
        )


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and runs chat templates."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])
    code_generator_class = _BoundedCode

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
            finalize=self.checked,
        )
        self.filters: dict[str, Any] = {**bounded_filters(self.filters), "tojson": _tojson}
        self.tests: dict[str, Any] = bounded_tests(self.tests)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _TemplateDict()
        self.globals["namespace"] = _TemplateNamespace
        del self.globals["lipsum"]

    def tick(self) -> bool:
        """Count an iteration of a loop or a call of a macro; it takes as long as looking at some values."""
        current().spend(_STEPS_OF_A_TICK)
        return True

    def checked(self, value: Any) -> Any:
        """Return the value, if it may be written or compared."""
        if value.__class__ is not str:
            check_size(value)
        return value

    def counted(self, value: Any) -> Any:
        """Return the value after counting it as made."""
        return count_result(value)

    def searchable(self, value: Any) -> Any:
        """Return the value, if it may be searched with ``in``; a dictionary compares no values."""
        return value if isinstance(value, dict) else self.checked(value)

    def bounded_join(self, parts: Iterable[Any]) -> str:
        """Return the texts of all values in one: the operator ``~``."""
        return self.concat([str(self.checked(part)) for part in parts])

    def concat(self, parts: Iterable[str]) -> str:
        """Return all texts in one: the body of a macro or of a ``set`` block."""
        texts = list(parts)
        current().check_characters(sum(map(len, texts)), ascii_only=all(map(str.isascii, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Evaluate ``+``, ``*``, ``**`` or ``%`` if the result is not too large."""
        if operator == "+":
            _check_sum(left, right)
        elif operator == "*":
            _check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif isinstance(left, str):
            check_format(left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function or method that a template may call."""
        owner = getattr(function, "__self__", None)
        for kind, names in _METHODS.items():
            if isinstance(owner, kind):
                name = getattr(function, "__name__", "")
                if name not in names:
                    raise SecurityError(f"chat templates cannot call {kind.__name__}.{name}")
                _check_method(owner, name, args)
        if isinstance(owner, jinja2.runtime.LoopContext):
            check_size(args)  # loop.changed compares them
        return count_result(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return ``str.format`` with a check of the widths it is asked for."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        template = str(value.__self__)
        inner = wrapped

        def bounded(*args: Any, **kwargs: Any) -> str:
            check_size(args)
            check_size(kwargs)
            # A width can be written out or come from an argument.
            if re.search(r"\d{6}|:[^}]*\{", template):
                raise BudgetError("it formats with a width that is very large or computed")
            return count_result(inner(*args, **kwargs))

        return bounded

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all(nodes.Stmt):
            if isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)):
                call = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
                node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
                if isinstance(node, nodes.For) and node.test is not None:
                    # What a loop's condition leaves out never comes to its body.
                    node.test = nodes.And(call, node.test).set_lineno(node.lineno)
        return tree


def _check_sum(left: object, right: object) -> None:
    if isinstance(left, str) and isinstance(right, str):
        current().check_characters(len(left) + len(right), ascii_only=left.isascii() and right.isascii())
    elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        check_length(len(left) + len(right))


def _check_product(left: object, right: object) -> None:
    for sequence, count in ((left, right), (right, left)):
        if isinstance(count, int):
            if isinstance(sequence, (str, bytes)):
                current().check_characters(len(sequence) * max(count, 0), ascii_only=sequence.isascii())
            elif isinstance(sequence, (list, tuple)):
                check_length(len(sequence) * max(count, 0))
    if (
        isinstance(left, int)
        and isinstance(right, int)
        and left.bit_length() + right.bit_length() > _MAX_INTEGER_BITS
    ):
        raise BudgetError("it multiplies numbers that are too large")


def _check_power(left: object, right: object) -> None:
    if (
        isinstance(left, int)
        and isinstance(right, int)
        and max(left.bit_length(), 1) * abs(right) > _MAX_INTEGER_BITS
    ):
        raise BudgetError("it raises a number to a power that is too large")


def _check_method(owner: Any, name: str, args: tuple[Any, ...]) -> None:
    if isinstance(owner, str):
        if name in ("center", "ljust", "rjust", "zfill", "expandtabs") and args:
            check_count(args[0])
            current().check_length_of_text(len(owner) + (owner.count("\t") + 1) * _as_count(args[0]))
        elif name == "join" and args and isinstance(args[0], (list, tuple)):
            texts = [len(item) for item in args[0] if isinstance(item, str)]
            current().check_length_of_text(sum(texts) + len(owner) * len(texts))
        elif name == "replace" and len(args) >= 2:
            check_replace(owner, args[0], args[1])
    elif name in ("index", "count"):
        check_size(owner)


def _as_count(value: object) -> int:
    return value if isinstance(value, int) else 0


def _raise_exception(message: str) -> None:
    raise RefusedError(message)


def _strftime_now(form: str) -> str:
    if len(form) > _MAX_TIME_FORMAT:
        raise BudgetError(f"it formats the time with {len(form)} characters")
    # Local time without a zone: what the templates expect and transformers gives.
    return dt.datetime.now().strftime(form)  # noqa: DTZ005


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    check_size(value)
    if (isinstance(indent, int) and indent > 64) or (isinstance(indent, str) and len(indent) > 64):
        raise BudgetError("it indents JSON by more than 64 characters")
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    current().check_characters(len(text), ascii_only=text.isascii())
    return text
