"""Prints the configuration reference as Markdown, from the same metadata that the reader checks against.

``python -m edged.config_reference`` prints it; ``--write FILE`` puts it between ``<!-- config:begin -->`` and
``<!-- config:end -->`` of FILE.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import typing
from pathlib import Path
from typing import Any

from edged.config import Config
from edged.config_schema import allowed_values, field_types, is_required, without_none
from edged.units import exact_duration, exact_size
from edged.whole_file import write_whole

BEGIN = "<!-- config:begin -->"
END = "<!-- config:end -->"


def reference() -> str:
    """One Markdown table a section, in the order of the file."""
    blocks: list[str] = []
    _section(Config, "", blocks)
    return "\n\n".join(blocks) + "\n"


def _section(kind: type[Any], path: str, blocks: list[str]) -> None:
    rows = ["| Key | Meaning | Allowed | Default |", "|---|---|---|---|"]
    inner: list[tuple[type[Any], str]] = []
    for field in dataclasses.fields(kind):
        hint = without_none(field_types(kind)[field.name])
        place = f"{path}{field.name}"
        is_list = typing.get_origin(hint) is tuple
        element = typing.get_args(hint)[0] if is_list else hint
        if dataclasses.is_dataclass(element):
            inner.append((typing.cast("type[Any]", element), place + ("[]." if is_list else ".")))
        allowed = "the keys below" if dataclasses.is_dataclass(hint) else allowed_values(hint, field.metadata)
        cells = [f"`{field.name}`", field.metadata["doc"], allowed, _default(field)]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    blocks.append((f"`{path.rstrip('.')}`:\n\n" if path else "The file:\n\n") + "\n".join(rows))
    for element, place in inner:
        _section(element, place, blocks)


def _default(field: dataclasses.Field[Any]) -> str:
    """The default as it would stand in the file."""
    if field.metadata["default"]:
        return str(field.metadata["default"])
    if is_required(field):
        return "required"
    if field.default is dataclasses.MISSING:
        return "all defaults"
    if field.metadata["unit"] == "size":
        return f"`{exact_size(field.default)}`"
    if field.metadata["unit"] == "duration":
        return f"`{exact_duration(field.default)}`"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def replaced(document: str) -> str:
    """``document`` with the reference between its markers.

    Raises:
        ValueError: The markers are not there, once each and in order.
    """
    if document.count(BEGIN) != 1 or document.count(END) != 1 or document.index(BEGIN) > document.index(END):
        raise ValueError(f"the document needs one line {BEGIN} and after it one line {END}")
    before, rest = document.split(BEGIN)
    return f"{before}{BEGIN}\n{reference()}{END}{rest.split(END)[1]}"


def main(arguments: list[str] | None = None) -> int:
    """Print the reference, or write it into a document."""
    parser = argparse.ArgumentParser(prog="python -m edged.config_reference", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="put it between the markers of FILE")
    options = parser.parse_args(arguments)
    if options.write is None:
        sys.stdout.write(reference())
    else:
        write_whole(options.write, replaced(options.write.read_text("utf-8")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
