"""Who calls: whose cached pages a request may see, and whose requests are counted together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edged.server.guard import caller_name

if TYPE_CHECKING:
    from edged.server.methods import AnyContext


@dataclass(frozen=True)
class Caller:
    """One caller.

    Attributes:
        tenant: Whose pages and sessions it may see: what it has proved to be; empty where clients do not authenticate.
        client: Whose requests are counted for ``limits.requests_per_client``.
    """

    tenant: str
    client: str


def caller_of(context: AnyContext) -> Caller:
    """Who makes this call: its identity if it has proved one, else the address that its connection comes from."""
    tenant = identity_of(context)
    return Caller(tenant, tenant or str(context.peer()))


def identity_of(context: AnyContext) -> str:
    """What the caller has proved to be: its token's name, or the name in its certificate; empty for neither."""
    name = caller_name()
    if name:
        return f"token:{name}"
    shown = next(iter(context.auth_context().get("x509_common_name") or ()), b"")
    return f"certificate:{shown.decode('utf-8', 'replace')}" if shown else ""


def traceparent_of(context: AnyContext) -> str:
    """The client's trace, if it sends one (W3C Trace Context)."""
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent" and isinstance(value, str):
            return value
    return ""
