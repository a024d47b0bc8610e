"""The program: finds the command's module when it is named, and turns every error into one line and an exit status."""

import difflib
import importlib
import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from edged import __version__
from edged.cli.credential_options import with_credentials
from edged.cli.exit_codes import EPILOG, ExitCode, exit_code_of
from edged.cli.options import AddressOption, checked_address
from edged.cli.terminal import detach_stdout, prepare_streams, say_error
from edged.errors import EdgedError

COMMANDS = {
    "status": "edged.cli.status",
    "generate": "edged.cli.generate",
    "chat": "edged.cli.chat",
    "tokenize": "edged.cli.tokenizing",
    "embed": "edged.cli.embed",
    "plan": "edged.cli.plan",
    "pull": "edged.cli.pull",
    "import": "edged.cli.importing",
    "models": "edged.cli.models",
    "quantize": "edged.cli.quantize",
    "draft": "edged.cli.draft",
    "build": "edged.cli.build",
    "engines": "edged.cli.engines",
    "load": "edged.cli.load",
    "unload": "edged.cli.unload",
    "sessions": "edged.cli.sessions",
    "bench": "edged.cli.bench",
    "doctor": "edged.cli.doctor",
    "support-bundle": "edged.cli.support_bundle",
    "service": "edged.cli.service",
    "token": "edged.cli.token",
}
"""Command → the module that holds it as ``command``; imported when the command is named."""

_HINTS = {
    "serve": "edgectl does not start the daemon; run: edged --config FILE",
    "start": "edgectl does not start the daemon; run: edged --config FILE",
    "run": "edgectl does not start the daemon; run: edged --config FILE; to generate text: edgectl generate PROMPT",
    "stop": "edgectl does not stop the daemon; send it SIGTERM, or: systemctl stop edged",
    "version": "the version is: edgectl --version",
    "ask": "did you mean generate --chat?",
    "complete": "did you mean generate?",
    "convert": "did you mean import?",
    "compress": "did you mean quantize?",
    "health": "did you mean status?",
    "ps": "did you mean status?",
    "list": "did you mean models?",
    "rm": "did you mean models remove?",
    "show": "did you mean models inspect?",
    "download": "did you mean pull?",
    "ledger": "did you mean plan?",
    "check": "to check a configuration: edgectl plan --config FILE, or edged --config FILE --check",
}

# Typer carries its own copy of Click from some version on; its public names lead to the class in either.
_UsageError: Any = typer.BadParameter.__mro__[1]
_ClickError: Any = typer.BadParameter.__mro__[2]


class PipeClosedError(Exception):
    """Whoever read the output went away. Click would make exit status 1 of Python's own exception."""


class LazyGroup(TyperGroup):
    """Imports the module of a command when that command is asked for."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - Click's context
        """Read the command line; ``--help`` prints here."""
        try:
            return super().make_context(*args, **kwargs)
        except BrokenPipeError as error:
            raise PipeClosedError from error

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - Click's context
        """Run the command."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise PipeClosedError from error
        except KeyboardInterrupt:
            raise typer.Exit(ExitCode.INTERRUPTED) from None

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401, ARG002 - Click's context
        """Every command, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ANN401 - Click's command
        """The command of that name; a UsageError with a hint when there is none."""
        if cmd_name not in COMMANDS:
            if ctx.resilient_parsing:
                return None
            close = difflib.get_close_matches(cmd_name, COMMANDS, n=1)
            hint = _HINTS.get(cmd_name) or (
                f"did you mean {close[0]}?" if close else f"the commands are {', '.join(COMMANDS)}"
            )
            raise _UsageError(f"there is no command {cmd_name!r}; {hint}", ctx=ctx)
        module = importlib.import_module(COMMANDS[cmd_name])
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(cmd_name, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})(
            with_credentials(module.command)
        )
        return typer.main.get_command(single)


app = typer.Typer(
    cls=LazyGroup,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EPILOG,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"edgectl {__version__}\n")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def edgectl(
    context: typer.Context,
    *,
    address: AddressOption = None,
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-V",
            help="Print the version.",
            is_eager=True,
            callback=_print_version,
            show_default=False,
        ),
    ] = False,
) -> None:
    """Ask, watch and prepare edged, the daemon that serves language models inside a fixed memory budget."""
    if address is not None:
        # The command reads it as its own --address's default; --address behind the command still wins.
        os.environ["EDGED_ADDRESS"] = checked_address(address)
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Run edgectl.

    Args:
        arguments: The command line without the program's name; that of the process for None.

    Returns:
        The exit status, a value of :class:`~edged.cli.exit_codes.ExitCode`.
    """
    prepare_streams()
    try:
        status = _run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except (PipeClosedError, BrokenPipeError):
        detach_stdout()
        return ExitCode.PIPE_CLOSED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except OSError as error:
        detach_stdout()
        name = f"{error.filename}: " if error.filename else ""
        say_error(f"the system refused: {name}{error.strerror or error}")
        return ExitCode.FILE
    return status


def _run(arguments: list[str]) -> int:
    try:
        status = typer.main.get_command(app)(arguments, prog_name="edgectl", standalone_mode=False)
    except EdgedError as error:
        say_error(error.message)
        return exit_code_of(error)
    except _ClickError as error:
        _say_usage(error)
        return ExitCode.USAGE
    except typer.Abort:
        return ExitCode.INTERRUPTED
    except (PipeClosedError, OSError, KeyboardInterrupt):
        raise
    except ImportError as error:
        say_error(
            f"a package is missing or broken: {error}; edgectl doctor says which, pip install edged repairs it"
        )
        return ExitCode.INTERNAL
    except Exception as error:  # noqa: BLE001 - the last line of defence: a user never sees a traceback unasked
        if os.environ.get("EDGED_DEBUG"):
            traceback.print_exc()
        say_error(
            f"a fault of edgectl itself: {type(error).__name__}: {error}; "
            "EDGED_DEBUG=1 in the environment shows where; please report it"
        )
        return ExitCode.INTERNAL
    return status if isinstance(status, int) else ExitCode.DONE


def _say_usage(error: Any) -> None:  # noqa: ANN401 - Click's UsageError
    message = error.format_message().strip()
    message = message[:1].lower() + message[1:].rstrip(".")
    path = error.ctx.command_path if getattr(error, "ctx", None) is not None else "edgectl"
    say_error(f"{message}; see {path} --help")
