"""``edgectl doctor``: looks at everything that edged needs, and says what to do about what is wrong."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from edged.cli import checks
from edged.cli.checks import FAILURE, NOTE, OK, WARNING, Finding
from edged.cli.exit_codes import ExitCode
from edged.cli.hardware_checks import check_hardware
from edged.cli.needs import Needs
from edged.cli.options import AddressOption
from edged.cli.service_checks import check_unit
from edged.cli.terminal import show

_STYLES = {OK: "green", NOTE: "cyan", WARNING: "yellow", FAILURE: "bold red"}


def command(
    *,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-f",
            metavar="FILE",
            help="Check this configuration and its models too.",
            show_default=False,
        ),
    ] = None,
    address: AddressOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with every finding.", show_default=False)
    ] = False,
) -> int:
    """Look at everything that edged needs, and say what to do about what is wrong.

    Python, packages, torch, driver, CUDA, TensorRT, board, power, memory, disk, socket and service; with --config also
    the configuration, its models, certificates, tokens and sockets.

    The exit status is 1 when a check failed; warnings do not change it.
    """
    findings = examine(config, address)
    failed = sum(finding.level == FAILURE for finding in findings)
    if as_json:
        content = {"ok": not failed, "findings": [asdict(finding) for finding in findings]}
        sys.stdout.write(json.dumps(content, ensure_ascii=False, indent=2) + "\n")
    else:
        _print(findings)
    return ExitCode.NO if failed else ExitCode.DONE


def examine(config: Path | None, address: str | None) -> list[Finding]:
    """Every finding.

    Args:
        config: A configuration to look at too.
        address: Where the daemon should be; None looks at the configuration's socket, or else at the default place.
    """
    findings = [*checks.check_python(), *checks.check_packages()]
    needs = Needs()
    socket: Path | None = None
    config_findings: list[Finding] = []
    if config is not None:
        # numpy, tokenizers and gguf: the doctor has to work where one of them is what is broken.
        from edged.cli.config_checks import check_config  # noqa: PLC0415

        config_findings, needs, socket = check_config(config.expanduser())
    findings += checks.check_torch(needs)
    findings += check_hardware(needs)
    findings += [*checks.check_memory(), *checks.check_limits(), *checks.check_disk()]
    findings += [*checks.check_socket(address, socket), *check_unit()]
    if config is None:
        findings.append(
            Finding("configuration", NOTE, "not checked", "name one: edgectl doctor --config FILE")
        )
    return findings + config_findings


def _print(findings: list[Finding]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column()
    table.add_column(overflow="fold")
    for finding in findings:
        style = _STYLES[finding.level]
        table.add_row(Text(finding.level, style=style), finding.check, finding.found)
        if finding.remedy:
            table.add_row("", "", Text(f"-> {finding.remedy}", style=style if finding.level != NOTE else ""))
    failed = sum(finding.level == FAILURE for finding in findings)
    warned = sum(finding.level == WARNING for finding in findings)
    verdict = Text("all is well", style=_STYLES[OK])
    if failed:
        verdict = Text(f"{failed} of {len(findings)} checks failed", style=_STYLES[FAILURE])
    elif warned:
        verdict = Text(f"nothing failed; {warned} warnings", style=_STYLES[WARNING])
    show(table, verdict)
