"""The README's transcript of `make demo`: what does not depend on the machine is what the demo prints today."""

from __future__ import annotations

import re
from pathlib import Path

from edged.config_reader import parse_config
from edged.memory.ledger import compute_ledger
from edged.units import format_size

ROOT = Path(__file__).resolve().parents[2]


def transcript() -> list[str]:
    """Its lines, each with one space between words."""
    block = re.search(r"^```text\n(==> .*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    return [" ".join(line.split()) for line in block[1].splitlines()]


def test_every_heading_of_the_demo_is_there_in_its_order():
    script = (ROOT / "examples" / "demo.sh").read_text()
    said = [line.partition(" (log")[0] for line in re.findall(r'echo "(==> .*)"$', script, re.MULTILINE)]
    found = [line.partition(" (log")[0] for line in transcript() if line.startswith("==>")]
    assert found == said


def test_the_ledger_is_the_demos(demo_model):
    text = (ROOT / "examples" / "demo.yaml").read_text()
    here = re.sub(r"^(    path: )\S+", rf"\g<1>{demo_model}", text, flags=re.MULTILINE)
    ledger = compute_ledger(parse_config(here, folder=ROOT))
    lines = transcript()
    first = lines.index("memory size how") + 1
    rows = [f"{row.name} {format_size(row.bytes)} {row.note}" for row in ledger.rows]
    total = f"total {format_size(ledger.total)} of a budget of {format_size(ledger.budget)}"
    assert lines[first : first + len(rows) + 1] == [*rows, total]
