"""From YAML text to a tree of nodes that know their line and column, in bounded time and memory.

The tree is not turned into Python objects here: aliases stay shared nodes, so a "billion laughs" file is as small as
its text, and :mod:`edged.config_reader` walks only as deep as the configuration's own types.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from edged.config_faults import Fault, child, show_plain

if TYPE_CHECKING:
    from yaml.nodes import MappingNode, Node

TEXT_LIMIT = 256 * 2**10
"""Characters of a configuration file. The longest real one is a few kilobytes."""
DEPTH_LIMIT = 32
"""Nested collections. The configuration's own types need five."""
ENTRY_LIMIT = 1000
"""Keys of one mapping."""
MERGE_LIMIT = 16
"""Mappings merged by one ``<<``; it keeps files of merges of merges from multiplying."""

_MERGE_TAG = "tag:yaml.org,2002:merge"


class YamlFaultError(Exception):
    """The text is no single, bounded YAML document; ``fault`` says where. It never leaves the reader."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.problem)
        self.fault = fault


class _BoundedLoader(yaml.SafeLoader):
    """SafeLoader that refuses deep nesting before Python's own stack does."""

    depth = 0

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        self.depth += 1
        if self.depth > DEPTH_LIMIT:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise YamlFaultError(
                _at(mark, f"nested deeper than {DEPTH_LIMIT} levels", "a configuration needs five")
            )
        node: Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


def compose(text: str) -> Node | None:
    """The root node of ``text``; None when it holds no document.

    Raises:
        YamlFaultError: Not YAML, several documents, too long or too deep.
    """
    if len(text) > TEXT_LIMIT:
        raise YamlFaultError(
            Fault("", f"longer than {TEXT_LIMIT} characters", "give the path of a configuration file")
        )
    try:
        loader = _BoundedLoader(text)
        try:
            return loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        raise YamlFaultError(_syntax_fault(error)) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        raise YamlFaultError(
            Fault(
                "",
                f"the character U+{ord(text[error.position]):04X} is not allowed in YAML",
                "remove it, or write it as an escape in double quotes",
                line,
                column,
            )
        ) from error
    except (ValueError, OverflowError) as error:
        # PyYAML lets numbers out of range in escapes ("\UFFFFFFFF") and in %YAML directives pass as these.
        raise YamlFaultError(
            Fault("", f"not YAML ({error})", "correct the escape or the %YAML directive")
        ) from error


def _syntax_fault(error: yaml.MarkedYAMLError) -> Fault:
    mark = error.problem_mark or error.context_mark
    problem = error.problem or error.context or "not YAML"
    if "expected a single document" in str(error.context):
        return _at(mark, "a second YAML document begins here", "keep one document in a file")
    if "'\\t'" in problem or "'\\t'" in str(error.context):
        return _at(mark, "a tab, where YAML allows only spaces", "indent with spaces")
    if "mapping values are not allowed here" in problem:
        return _at(
            mark,
            "a second ': ' in one entry, or wrong indentation",
            "put quotes around a value that holds ': ', and give keys of one section the same indentation",
        )
    context = f" ({error.context})" if error.context and error.context != problem else ""
    return _at(mark, f"not YAML: {problem}{context}", "correct the syntax there")


def _at(mark: Any, problem: str, remedy: str) -> Fault:  # noqa: ANN401 - PyYAML's marks have no typed class
    line, column = (mark.line + 1, mark.column + 1) if mark is not None else (0, 0)
    return Fault("", problem, remedy, line, column)


def position(node: Node) -> tuple[int, int]:
    """Line and column of a node, from 1."""
    return node.start_mark.line + 1, node.start_mark.column + 1


class Mappings:
    """Reads mappings: keys that occur once, with ``<<`` merges resolved (own keys win, then the first merged)."""

    def __init__(self) -> None:
        self._done: dict[int, dict[str, tuple[Node, Node]]] = {}
        self._open: set[int] = set()

    def entries(self, node: MappingNode, path: str) -> tuple[dict[str, tuple[Node, Node]], list[Fault]]:
        """Key → (key node, value node) of ``node``, and what is wrong with its keys."""
        if id(node) in self._done:
            return self._done[id(node)], []
        faults: list[Fault] = []
        own: dict[str, tuple[Node, Node]] = {}
        merged: dict[str, tuple[Node, Node]] = {}
        if len(node.value) > ENTRY_LIMIT:
            faults.append(
                Fault(path, f"{len(node.value)} keys", f"at most {ENTRY_LIMIT} keys", *position(node))
            )
        self._open.add(id(node))
        for key, value in node.value[:ENTRY_LIMIT]:
            if key.tag == _MERGE_TAG:
                self._merge(value, path, merged, faults)
            elif not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                shown = show_plain(key.value) if isinstance(key, yaml.ScalarNode) else "a collection"
                faults.append(
                    Fault(path, f"{shown} as a key", "keys are the names of the reference", *position(key))
                )
            elif key.value in own:
                first = position(own[key.value][0])[0]
                faults.append(
                    Fault(
                        child(path, key.value),
                        f"given twice, first in line {first}",
                        "keep one of the two",
                        *position(key),
                    )
                )
            else:
                own[key.value] = (key, value)
        self._open.discard(id(node))
        self._done[id(node)] = {**merged, **own}
        return self._done[id(node)], faults

    def _merge(self, value: Node, path: str, into: dict[str, tuple[Node, Node]], faults: list[Fault]) -> None:
        sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
        if len(sources) > MERGE_LIMIT:
            faults.append(
                Fault(path, f"<< merges {len(sources)} mappings", f"at most {MERGE_LIMIT}", *position(value))
            )
        for source in sources[:MERGE_LIMIT]:
            if not isinstance(source, yaml.MappingNode) or id(source) in self._open:
                faults.append(
                    Fault(
                        path,
                        "<< merges something that is no other mapping",
                        "write <<: *NAME with the anchor of a mapping, as in - &NAME {...}",
                        *position(value),
                    )
                )
                return
            entries, found = self.entries(source, path)
            faults.extend(found)
            for key, entry in entries.items():
                into.setdefault(key, entry)
