"""The options of TLS and tokens, which every command that speaks to the daemon has."""

from __future__ import annotations

import functools
import inspect
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

_OPTIONS = {
    "tls_ca": (
        "--tls-ca",
        "EDGED_TLS_CA",
        "FILE",
        "Authorities (PEM) of the daemon's certificate; uses TLS.",
    ),
    "tls_certificate": (
        "--tls-certificate",
        "EDGED_TLS_CERTIFICATE",
        "FILE",
        "Certificate to show the daemon (PEM).",
    ),
    "tls_key": ("--tls-key", "EDGED_TLS_KEY", "FILE", "Its private key (PEM)."),
    "tls_server_name": (
        "--tls-server-name",
        "EDGED_TLS_SERVER_NAME",
        "NAME",
        "Name in the daemon's certificate, where it is not the address's.",
    ),
    "token_file": ("--token-file", "EDGED_TOKEN_FILE", "FILE", "File of the token to show the daemon."),
}
_SWITCH = ("tls", "--tls", "EDGED_TLS", "Use TLS, with the usual authorities.")


def with_credentials(command: Callable[..., Any]) -> Callable[..., Any]:
    """``command`` with the options of TLS and tokens, if it has an address; the client reads them as its defaults."""
    signature = inspect.signature(command)
    if "address" not in signature.parameters:
        return command
    annotations: dict[str, Any] = {
        name: Annotated[
            str | None,
            typer.Option(flag, envvar=variable, metavar=metavar, help=text, show_default=False),
        ]
        for name, (flag, variable, metavar, text) in _OPTIONS.items()
    }
    name, flag, variable, text = _SWITCH
    annotations[name] = Annotated[bool, typer.Option(flag, envvar=variable, help=text, show_default=False)]
    added = [
        inspect.Parameter(
            key,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if key == name else None,
            annotation=annotation,
        )
        for key, annotation in annotations.items()
    ]

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - the command's
        for key, (_, environment, _, _) in _OPTIONS.items():
            value = options.pop(key)
            if value is not None:
                os.environ[environment] = value
        if options.pop(name):
            os.environ[variable] = "1"
        return command(*arguments, **options)

    wrapper: Any = run
    wrapper.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *added])
    wrapper.__annotations__ = {**command.__annotations__, **annotations}
    return run
