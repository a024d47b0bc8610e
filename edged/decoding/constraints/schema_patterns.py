r"""Patterns of JSON schemas in the syntax of the library that enforces them.

A schema's pattern is one of ECMAScript, searched for anywhere in the text; what is enforced is Rust's. They differ in what
``\d``, ``\w``, ``\s`` and ``.`` stand for, in what a class may hold (Rust has classes in classes and ``&&``), in flags
and in quantifiers of quantifiers. Validators written in Python differ in the first of these, too; an answer fits by
both readings. What cannot be said is refused by name.
"""

from __future__ import annotations

import functools
import re

from edged.errors import InvalidArgumentError

_SPACES = r"\t-\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
# What all validators take for such a character, and what some do.
_SURE = {"d": "0-9", "w": "A-Za-z0-9_", "s": _SPACES}
_PERHAPS = {"d": r"\p{Nd}", "w": r"\p{L}\p{N}_", "s": _SPACES + r"\x{1c}-\x{1f}\x{85}\x{feff}"}
_ANY = r"[^\n\r\x{2028}\x{2029}]"
_CONTROL = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_QUANTIFIER = re.compile(r"[*+?]|\{\d+(?:,\d*)?\}")
_FLAGS = re.compile(r"\(\?([a-zA-Z-]+)[:)]")
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|[ux]\{([0-9A-Fa-f]{1,8})\}")
_PROPERTY = re.compile(r"[pP](?:\{[^}]*\}|[A-Za-z])")
_LAST = 0x10FFFF


@functools.lru_cache(maxsize=256)
def rust_pattern(pattern: str) -> str:
    """The pattern in Rust's syntax.

    Raises:
        InvalidArgumentError: It says what dialects read differently.
    """
    return _Translator(pattern).translate()


def _refuse(what: str) -> InvalidArgumentError:
    return InvalidArgumentError(what, field="json_schema")


class _Translator:
    """Reads one pattern from left to right.

    Args:
        pattern: In ECMAScript's syntax.
    """

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        found = {flag for match in _FLAGS.finditer(pattern) for flag in match[1]} - {"-"}
        unknown = sorted(found - {"i", "s"})
        if unknown:
            raise _refuse(f"sets the flag {unknown[0]}, which not every dialect has; say it without")
        self._any = "." if "s" in found else _ANY

    def translate(self) -> str:
        """All of it."""
        result: list[str] = []
        quantified = False
        while self._at < len(self._pattern):
            match = _QUANTIFIER.match(self._pattern, self._at)
            if match is not None:
                if quantified:
                    raise _refuse(f"repeats a repetition ({match[0]}); put the inner one into a group")
                self._at = match.end()
                lazy = self._pattern.startswith("?", self._at)
                self._at += lazy
                result.append(match[0])
                quantified = True
                continue
            quantified = False
            result.append(self._one())
        return "".join(result)

    def _one(self) -> str:
        """One character, class, escape or bracket that is no quantifier."""
        character = self._pattern[self._at]
        self._at += 1
        if character == "\\":
            return self._escape()
        if character == "[":
            return self._class()
        if character == ".":
            return self._any
        if character == "{":
            raise _refuse("has a { that begins no repetition; write \\{")
        if character == "(" and self._pattern.startswith("?", self._at):
            group = re.compile(
                r"\?(?:<[=!]|<[A-Za-z_]\w*>|P<[A-Za-z_]\w*>|[a-zA-Z-]+[:)]|.)", re.DOTALL
            ).match(self._pattern, self._at)
            if group is not None:
                self._at = group.end()
                return "(" + group[0]
        return character if character not in "]}" else f"\\{character}"

    def _escape(self) -> str:
        """What stands behind a backslash outside of a class."""
        name = self._pattern[self._at : self._at + 1]
        if name and name.lower() in _SURE:
            self._at += 1
            return f"[{_SURE[name]}]" if name in _SURE else f"[^{_PERHAPS[name.lower()]}]"
        literal = self._literal()
        if literal is not None:
            return _character(literal)
        property_ = _PROPERTY.match(self._pattern, self._at)
        if property_ is not None:
            self._at = property_.end()
            return "\\" + property_[0]
        self._at += 1
        return "\\" + name  # borders, references and what Rust refuses

    def _literal(self) -> int | None:
        """The character that an escape stands for, if it stands for one; moves on behind it."""
        name = self._pattern[self._at : self._at + 1]
        number = _HEX.match(self._pattern, self._at)
        if number is not None:
            self._at = number.end()
            value = int(number[1] or number[2] or number[3], 16)
            if value > _LAST or 0xD800 <= value < 0xE000:
                raise _refuse(f"holds \\{number[0]}, which is no whole character; write the character itself")
            return value
        if name == "c" and re.match(r"c[A-Za-z]", self._pattern[self._at : self._at + 2]):
            self._at += 2
            return ord(self._pattern[self._at - 1]) % 32
        if name == "0" and not self._pattern[self._at + 1 : self._at + 2].isdigit():
            self._at += 1
            return 0
        if name in _CONTROL or (name and name.isascii() and not name.isalnum()):
            self._at += 1
            return ord(_CONTROL.get(name, name))
        return None

    def _class(self) -> str:
        """A class, behind its opening bracket."""
        negated = self._pattern.startswith("^", self._at)
        self._at += negated
        if self._pattern.startswith("]", self._at):
            raise _refuse(
                "has a class that is empty or begins with ], which dialects read differently; write \\]"
            )
        items: list[str] = []
        while not self._pattern.startswith("]", self._at):
            first = self._item(negated=negated)
            following = self._pattern[self._at : self._at + 2]
            if following[:1] == "-" and following not in ("-", "-]"):
                self._at += 1
                last = self._item(negated=negated)
                if isinstance(first, str) or isinstance(last, str) or first > last:
                    raise _refuse("has a class with a range whose ends are no characters in their order")
                items.append(f"{_character(first)}-{_character(last)}")
            else:
                items.append(first if isinstance(first, str) else _character(first))
        self._at += 1
        return f"[{'^' if negated else ''}{''.join(items)}]"

    def _item(self, *, negated: bool) -> int | str:
        """One character of a class, or a set of them."""
        if self._at >= len(self._pattern):
            raise _refuse("has a class without an end")
        character = self._pattern[self._at]
        self._at += 1
        if character != "\\":
            return ord(character)
        name = self._pattern[self._at : self._at + 1]
        if name and name.lower() in _SURE:
            self._at += 1
            # In a class that is turned round, what is perhaps in a set must be left out with it.
            sets = _SURE if (name in _SURE) != negated else _PERHAPS
            return f"[{'' if name in _SURE else '^'}{sets[name.lower()]}]"
        if name == "b":
            self._at += 1
            return 8
        literal = self._literal()
        if literal is not None:
            return literal
        property_ = _PROPERTY.match(self._pattern, self._at)
        if property_ is not None:
            self._at = property_.end()
            return "\\" + property_[0]
        raise _refuse(f"has \\{name} in a class, which dialects read differently; write the character itself")


def _character(value: int) -> str:
    """A character that stands for itself alone, inside a class and outside."""
    text = chr(value)
    return text if text.isascii() and text.isalnum() else f"\\x{{{value:x}}}"
