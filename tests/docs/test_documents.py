"""What the documents name is there: links and their anchors, files, targets, keys, commands, and the rooms of the house."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from edged.cli.main import COMMANDS, LazyGroup
from edged.config_schema import known_keys

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
RECORDS = {"docs/gpu_runs.md"}
"""Say what ran at a commit: what they name need not be there any more."""
CURRENT = [each for each in DOCUMENTS if str(each.relative_to(ROOT)) not in RECORDS]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
INDENTED = re.compile(r"^ {4}(\S.*)$", re.MULTILINE)
FOLDERS = ("edged", "plugins_trt", "protos", "deploy", "tests", "bench", "docs", "examples")


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


def anchors(document: Path) -> set[str]:
    """Names of a document's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", document.read_text())):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")
        number = 0
        while (name := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(name)
    return found


def code_of(document: Path) -> list[str]:
    """What stands in code: spans, and lines of blocks, options on lines of their own with the command before them."""
    text = re.sub(r"\n +(?=\[--)", " ", document.read_text())
    prose = FENCE.sub("", text)
    return [*CODE.findall(prose), *INDENTED.findall(prose), *"\n".join(FENCE.findall(text)).splitlines()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(document):
    broken = []
    for target in LINK.findall(FENCE.sub("", document.read_text())):
        if re.match(r"[a-z]+:", target):
            continue  # another site; the tests ask nothing of the network
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        if (
            not file.exists()
            or not file.is_relative_to(ROOT)
            or (anchor and (file.suffix != ".md" or anchor not in anchors(file)))
        ):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("document", CURRENT, ids=name_of)
def test_files_that_are_named_exist(document):
    named = [
        word.rstrip(".,;:")
        for code in CODE.findall(FENCE.sub("", document.read_text()))
        for word in code.split()
        if word.startswith(tuple(f"{folder}/" for folder in FOLDERS))
    ]
    missing = [name for name in named if "NAME" not in name and not list(ROOT.glob(name.rstrip("/")))]
    assert not missing


@pytest.mark.parametrize("document", CURRENT, ids=name_of)
def test_targets_of_make_exist(document):
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {match[1] for code in code_of(document) if (match := re.match(r"make ([a-z0-9-]+)", code))}
    assert named <= targets


@pytest.mark.parametrize("document", CURRENT, ids=name_of)
def test_commands_of_edgectl_and_their_options_exist(document):
    wrong = []
    for code in code_of(document):
        for name, rest in re.findall(
            r"\bedgectl(?: --[a-z-]+ \S+)* ([a-z-]+)(.*?)(?= \||\s#|;|\bedgectl\b|$)", code
        ):
            if name not in COMMANDS:
                wrong.append(f"edgectl {name}")
                continue
            parameters = LazyGroup().get_command(None, name).params
            options = {
                "--help",
                *(option for each in parameters for option in (*each.opts, *each.secondary_opts)),
            }
            named = re.findall(r"(?<!\S)\[?(--[a-z0-9-]+)", rest)
            wrong += [f"edgectl {name} {option}" for option in named if option not in options]
    assert not wrong


@pytest.mark.parametrize("document", CURRENT, ids=name_of)
def test_keys_of_the_configuration_exist(document):
    keys = set(known_keys())
    rooms = {key.partition(".")[0].removesuffix("[]") for key in keys if "." in key}
    named = {
        match[0]
        for code in CODE.findall(FENCE.sub("", document.read_text()))
        if (match := re.match(rf"(?:{'|'.join(rooms)})(?:\[\])?(?:\.[a-z_]+(?:\[\])?)+(?=:|$)", code))
    }
    assert {name for name in named if name not in keys and f"{name}[]" not in keys} == set()


def picture() -> list[str]:
    """The paths of docs/design.md's picture of the house, with what stands beside each below it."""
    text = (ROOT / "docs" / "design.md").read_text()
    block = re.search(r"^## The house$.*?^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    named: list[str] = []
    for line in block[1].splitlines():
        folder = ""
        for word in re.split(r"\s{2,}", line)[0].split() if line[:1].strip() else []:
            # "edged/errors.py log.py": what follows lies in the same folder, unless it is one of its own.
            named.append(word if word.startswith(FOLDERS) else folder + word)
            folder = folder or word[: word.rfind("/") + 1]
    return named


def test_the_picture_of_the_house_is_the_house():
    named = picture()
    assert [path for path in named if not list(ROOT.glob(path.rstrip("/")))] == []
    drawn = {found for path in named for found in ROOT.glob(path.rstrip("/"))}
    rooms = [*(ROOT / "edged").glob("*/__init__.py"), *(ROOT / "edged").glob("*/[a-z]*.py")]
    there = {file.parent for file in rooms} | set((ROOT / "edged").glob("[a-z]*.py"))
    built = {ROOT / "edged" / "v1"}
    assert {str(each.relative_to(ROOT)) for each in there - drawn - built} == set()
