"""Reads a configuration file into :class:`edged.config.Config`, or says everything that is wrong with it at once.

The types and the metadata of :mod:`edged.config` are all that is known of the keys. Decisions that the types cannot
express:

* A relative path is relative to the folder of the file, so a configuration works from any working directory.
* ``~`` and ``~user`` at the start of a path mean a home folder. Environment variables are refused, not expanded: the
  daemon under systemd and ``edgectl plan`` in a shell would read two different files.
* A section with nothing under it has its defaults; a key with nothing behind it is refused.
* ``<<`` merges and anchors work. Values are read as YAML 1.1 without its surprises: no octal, no base 60.
"""

from __future__ import annotations

import dataclasses
import typing
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import yaml

from edged import config_rules
from edged.config import Config, ModelConfig
from edged.config_faults import ConfigFileError, Fault, FaultList, TooManyFaultsError, child, show
from edged.config_schema import allowed_values, field_types, is_required, known_keys, without_none
from edged.config_values import Refusal, describe, is_null, scalar
from edged.config_yaml import TEXT_LIMIT, Mappings, YamlFaultError, compose, position

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from yaml.nodes import Node

__all__ = ["ConfigFileError", "Fault", "parse_config", "read_config"]


def read_config(path: Path) -> Config:
    """The configuration in a file.

    Args:
        path: The YAML file. Relative paths in it are relative to its folder.

    Raises:
        ConfigFileError: It cannot be read or is refused; the message has one line for each fault.
    """
    source = str(path)
    try:
        with path.open("rb") as file:
            raw = file.read(4 * TEXT_LIMIT + 1)
    except IsADirectoryError:
        raise _whole_file("is a folder", "give the YAML file in it", source) from None
    except FileNotFoundError:
        raise _whole_file("no such file", "give the path of a configuration file", source) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise _whole_file(f"cannot be read ({reason})", "check the path and its rights", source) from error
    if len(raw) > 4 * TEXT_LIMIT:
        raise _whole_file(f"longer than {TEXT_LIMIT} characters", "give a configuration file", source)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - raw.rfind(b"\n", 0, error.start)
        fault = Fault("", f"the byte 0x{raw[error.start]:02X} is no UTF-8", "save as UTF-8", line, column)
        raise ConfigFileError([fault], source=source) from None
    return parse_config(text, folder=path.absolute().parent, source=source)


def parse_config(text: str, *, folder: Path, source: str = "configuration") -> Config:
    """The configuration in a YAML text.

    Args:
        text: The YAML document.
        folder: Absolute folder that relative paths start from.
        source: Name of the text in messages.

    Raises:
        ConfigFileError: It is refused; ``faults`` holds every fault, the message one line for each.
    """
    try:
        root = compose(text)
    except YamlFaultError as error:
        raise ConfigFileError([error.fault], source=source) from error.__cause__
    if root is None or is_null(root):
        raise _whole_file("nothing is in it", "write at least models: with one name and path", source)
    if not isinstance(root, yaml.MappingNode):
        kind = "a list" if isinstance(root, yaml.SequenceNode) else f"the value {show(root.value)}"
        raise _whole_file(f"found {kind} instead of keys", "begin with keys such as models:", source)
    reader = _Reader(folder)
    try:
        config: Config = reader.section(root, Config, "")
        config_rules.check(config, reader)
    except TooManyFaultsError:
        pass
    if reader.faults.faults:
        raise ConfigFileError(reader.faults.faults, source=source)
    return config


def _whole_file(problem: str, remedy: str, source: str) -> ConfigFileError:
    return ConfigFileError([Fault("", problem, remedy)], source=source)


class _Reader:
    """One walk over one file."""

    def __init__(self, folder: Path) -> None:
        self.faults = FaultList()
        self._folder = folder
        self._mappings = Mappings()
        self._positions: dict[str, tuple[int, int]] = {}

    def sound(self, *paths: str) -> bool:
        """Whether no fault was found at these keys."""
        return self.faults.sound(*paths)

    def refuse(self, path: str, problem: str, remedy: str) -> None:
        """Add a fault at ``path``, or at the nearest key around it that stands in the file."""
        place = path
        while place and place not in self._positions:
            place = place[: max(place.rfind("."), place.rfind("["), 0)]
        line, column = self._positions.get(place, (0, 0))
        self.faults.add(Fault(path, problem, remedy, line, column))

    def section(self, node: Node, kind: type[Any], path: str) -> Any:  # noqa: ANN401 - an instance of kind
        """An instance of the dataclass ``kind``; keys at fault hold their default or a placeholder."""
        self._positions.setdefault(path, position(node))
        entries: Mapping[str, tuple[Node, Node]] = {}
        if isinstance(node, yaml.MappingNode):
            entries, found = self._mappings.entries(node, path)
            for fault in found:
                self.faults.add(fault)
        elif not is_null(node):
            self.refuse(
                path, f"found {describe(node)}", f"write keys under it: {', '.join(field_types(kind))}"
            )
            return _placeholder(kind)
        values: dict[str, Any] = {}
        guessed: set[str] = set()
        for key, (key_node, value_node) in entries.items():
            place = child(path, key)
            self._positions[place] = position(key_node)
            if key not in field_types(kind):
                self.refuse(place, "unknown key", _meant(key, kind, path, guessed))
                continue
            metadata = kind.__dataclass_fields__[key].metadata
            value = self._value(value_node, field_types(kind)[key], metadata, place)
            if value is not dataclasses.MISSING:
                values[key] = value
        for field in dataclasses.fields(kind):
            if field.name not in values and is_required(field):
                if field.name not in entries and field.name not in guessed:
                    allowed = allowed_values(field_types(kind)[field.name], field.metadata)
                    remedy = f"write {field.name} ({field.metadata['doc']}): {allowed}"
                    self.refuse(child(path, field.name), "missing", remedy)
                values[field.name] = _placeholder(field_types(kind)[field.name])
        return kind(**_derived(values, kind))

    def _value(self, node: Node, kind: Any, metadata: Mapping[str, Any], path: str) -> Any:  # noqa: ANN401
        """The value of one key, or ``MISSING`` after a fault."""
        kind = without_none(kind)
        if dataclasses.is_dataclass(kind):
            return self.section(node, typing.cast("type[Any]", kind), path)
        if typing.get_origin(kind) is tuple:
            return self._list(node, typing.get_args(kind)[0], metadata, path)
        try:
            return scalar(node, kind, metadata, self._folder)
        except Refusal as refusal:
            line, column = position(node)
            found = refusal.found or describe(node)
            self.faults.add(Fault(path, f"found {found}", refusal.remedy, line, column))
            return dataclasses.MISSING

    def _list(self, node: Node, kind: Any, metadata: Mapping[str, Any], path: str) -> Any:  # noqa: ANN401
        low, high = int(metadata["low"] or 0), int(metadata["high"] or 64)
        if not isinstance(node, yaml.SequenceNode):
            shape = "- KEY: VALUE" if dataclasses.is_dataclass(kind) else "- VALUE"
            self.refuse(path, f"found {describe(node)}", f"write a list under it, each entry as {shape}")
            return dataclasses.MISSING
        if not low <= len(node.value) <= high:
            self.refuse(path, f"found {len(node.value)} entries", f"write {low} to {high} entries")
        if not dataclasses.is_dataclass(kind):  # the limits were those of the list
            metadata = {**metadata, "low": None, "high": None}
        values = [
            self._value(entry, kind, metadata, f"{path}[{index}]")
            for index, entry in enumerate(node.value[:high])
        ]
        return tuple(value for value in values if value is not dataclasses.MISSING)


def _derived(values: dict[str, Any], kind: type[Any]) -> dict[str, Any]:
    """Values with the defaults that follow from other keys."""
    if kind is ModelConfig and "context_length" in values:
        values.setdefault("prefill_chunk", min(values["context_length"], ModelConfig.prefill_chunk))
    return values


def _meant(key: str, kind: type[Any], path: str, guessed: set[str]) -> str:
    """The remedy for an unknown key: the nearest known one (also put into ``guessed``), here or elsewhere."""
    here = list(field_types(kind))
    close = get_close_matches(key[:64].lower(), here, n=1, cutoff=0.7)
    if close:
        guessed.update(close)
        return f"did you mean {close[0]}?"
    elsewhere = [place for place in known_keys() if place.rsplit(".", 1)[-1] == key]
    if elsewhere:
        return f"it belongs at {elsewhere[0]}"
    return f"the keys {'of ' + path if path else 'of the file'} are {', '.join(here)}"


def _placeholder(kind: Any) -> Any:  # noqa: ANN401 - a value of kind
    """Stands for a value that was refused; the configuration that holds it is never returned."""
    if dataclasses.is_dataclass(kind):
        cls = typing.cast("type[Any]", kind)
        fields = [field for field in dataclasses.fields(cls) if is_required(field)]
        return cls(**{field.name: _placeholder(field_types(cls)[field.name]) for field in fields})
    return () if typing.get_origin(kind) is tuple else kind()
