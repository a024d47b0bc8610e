"""What several configuration keys must hold together; each rule names the keys, the values and the remedy."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Protocol

from edged.config import UNIX_PATH_LIMIT
from edged.config_faults import show
from edged.units import exact_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edged.config import Config, ListenConfig, ModelConfig, RopeScalingConfig


class Report(Protocol):
    """How a rule reads the state of keys and refuses one."""

    def refuse(self, path: str, problem: str, remedy: str) -> None:
        """Add a fault at a key."""

    def sound(self, *paths: str) -> bool:
        """Whether these keys were read without a fault."""


def check(config: Config, report: Report) -> None:
    """Report every combination that cannot work. Keys that already have a fault take no part."""
    _check_listen(config.listen, report)
    _check_metrics(config.metrics.listen, report)
    _check_memory(config, report)
    seen: dict[str, int] = {}
    for index, model in enumerate(config.models):
        path = f"models[{index}]"
        if report.sound(f"{path}.name"):
            first = seen.setdefault(model.name, index)
            if first != index:
                report.refuse(
                    f"{path}.name",
                    f"found {show(model.name)}, which models[{first}] has too",
                    "give each model a name of its own",
                )
        _check_model(model, path, report)
    if config.default_model and config.default_model not in seen and report.sound("default_model", "models"):
        names = ", ".join(seen) or "none has a name"
        close = get_close_matches(config.default_model, seen, n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        report.refuse(
            "default_model",
            f"found {show(config.default_model)}, which no model is named",
            f"write one of: {names}{meant}",
        )


def _check_memory(config: Config, report: Report) -> None:
    budget, host, least = config.memory.budget, config.host, config.least_host
    if host < least and report.sound("memory.host", "limits.prompt_size", "models"):
        report.refuse(
            "memory.host",
            f"found {exact_size(host)}, and a prompt of {exact_size(config.prompt_size)} (limits.prompt_size) takes the "
            f"daemon to {exact_size(least)}",
            f"set at least {exact_size(least)}, or lower limits.prompt_size",
        )
    if budget is not None and host >= budget and report.sound("memory.budget", "memory.host"):
        report.refuse(
            "memory.budget",
            f"found {exact_size(budget)}, which memory.host ({exact_size(host)}) uses up",
            "raise memory.budget, so that weights and KV pages fit beside the host share",
        )


def _check_model(model: ModelConfig, path: str, report: Report) -> None:
    if model.rope_scaling is not None:
        _check_rope(model.rope_scaling, f"{path}.rope_scaling", report)
    _check_speculation(model, f"{path}.speculation", report)
    if model.prefill_chunk > model.context_length and report.sound(
        f"{path}.prefill_chunk", f"{path}.context_length"
    ):
        report.refuse(
            f"{path}.prefill_chunk",
            f"found {model.prefill_chunk}, more than context_length ({model.context_length})",
            f"write at most {model.context_length}",
        )
    if (
        model.max_step_tokens is not None
        and model.max_step_tokens < model.max_sequences
        and report.sound(f"{path}.max_step_tokens", f"{path}.max_sequences")
    ):
        report.refuse(
            f"{path}.max_step_tokens",
            f"found {model.max_step_tokens}, and a step holds a token of each of {model.max_sequences} sequences "
            "(max_sequences)",
            f"write at least {model.max_sequences}, or leave it out",
        )
    if (
        model.device == "cpu"
        and model.executor == "tensorrt"
        and report.sound(f"{path}.device", f"{path}.executor")
    ):
        report.refuse(
            f"{path}.executor",
            "found tensorrt with device: cpu, and TensorRT needs a GPU",
            "write executor: torch, or device: cuda",
        )
    if (
        model.embeddings != "none"
        and model.executor == "tensorrt"
        and report.sound(f"{path}.embeddings", f"{path}.executor")
    ):
        report.refuse(
            f"{path}.embeddings",
            f"found {model.embeddings} with executor: tensorrt, whose graph gives logits alone",
            "write embeddings: none, or executor: torch",
        )


def _check_speculation(model: ModelConfig, path: str, report: Report) -> None:
    speculation = model.speculation
    depth, size = speculation.depth, speculation.tree_size
    if depth is not None and depth >= size and report.sound(f"{path}.depth", f"{path}.tree_size"):
        report.refuse(
            f"{path}.depth",
            f"found {depth}, and a tree of {size} tokens (tree_size) holds {size - 1} below its root",
            f"write at most {size - 1}" if size > 1 else "write method: off, or a larger tree_size",
        )
    eagle = speculation.method == "eagle"
    if eagle and speculation.draft is None and report.sound(path, f"{path}.draft"):
        report.refuse(f"{path}.draft", "is missing, and method is eagle", "write the draft's folder")
    for key in ("draft", "token_map"):
        if (
            not speculation.has_model
            and getattr(speculation, key) is not None
            and report.sound(f"{path}.{key}")
        ):
            report.refuse(f"{path}.{key}", f"has no effect with method: {speculation.method}", "remove it")
    if (
        model.executor == "tensorrt"
        and speculation.method != "off"
        and report.sound(f"{path}.method", path.rpartition(".")[0] + ".executor")
    ):
        report.refuse(
            f"{path}.method",
            f"found {speculation.method} with executor: tensorrt, which verifies no drafts yet",
            "write method: off, or executor: torch",
        )


_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
    "longrope": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "short_factor",
        "long_factor",
    ),
}
"""The parameters of each method."""


def _check_rope(scaling: RopeScalingConfig, path: str, report: Report) -> None:
    """A preset or a method, and no parameter that it does not have."""
    if not report.sound(path, f"{path}.preset", f"{path}.type"):
        return
    if (scaling.preset is None) == (scaling.type is None):
        found = "neither preset nor type" if scaling.preset is None else "both preset and type"
        report.refuse(path, f"found {found}", "write one of them")
        return
    method = "a preset" if scaling.type is None else f"type: {scaling.type}"
    known = ("preset",) if scaling.type is None else ("type", *_ROPE_KEYS[scaling.type])
    for each in fields(scaling):
        if each.name not in known and getattr(scaling, each.name) not in (None, ()):
            report.refuse(f"{path}.{each.name}", f"has no effect with {method}", "remove it")


def _check_listen(listen: ListenConfig, report: Report) -> None:
    paths: dict[str, str] = {}
    for place, path in [
        ("listen.unix", listen.unix),
        *((f"listen.sockets[{index}].path", socket.path) for index, socket in enumerate(listen.sockets)),
    ]:
        if path is None or not report.sound(place):
            continue
        length = len(os.fsencode(path))
        if length > UNIX_PATH_LIMIT:
            report.refuse(
                place,
                f"found a path of {length} bytes ({show(str(path))})",
                f"write one of at most {UNIX_PATH_LIMIT} bytes, which is what Linux allows for a socket",
            )
        first = paths.setdefault(os.path.abspath(path), place)  # noqa: PTH100 - links are not followed
        if first != place:
            report.refuse(
                place, f"found {show(str(path))}, which {first} has too", "give each socket a path of its own"
            )
    _check_tls(listen, report)
    if listen.tcp is not None and report.sound("listen.tcp"):
        for problem, remedy in _tcp_faults(listen):
            report.refuse("listen.tcp", problem, remedy)


def _check_metrics(listen: str, report: Report) -> None:
    if not listen or not report.sound("metrics.listen"):
        return
    path = listen.removeprefix("unix:")
    if path != listen:
        if not path.startswith("/") or len(os.fsencode(path)) > UNIX_PATH_LIMIT:
            report.refuse(
                "metrics.listen",
                f"found {show(listen)}",
                f"write unix: and an absolute path of at most {UNIX_PATH_LIMIT} bytes",
            )
        return
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]]+):([0-9]{1,5})", listen)
    if match is None or int(match[2]) > 65535:
        report.refuse(
            "metrics.listen",
            f"found {show(listen)}, which is neither HOST:PORT nor unix:PATH",
            "write 127.0.0.1:9464 or unix:/run/edged/metrics.sock",
        )
    elif not is_loopback(match[1]):
        report.refuse(
            "metrics.listen",
            f"found host {show(match[1])}, which is not loopback",
            "write 127.0.0.1, [::1] or localhost: the page has no guard; a reverse proxy or an agent takes it further",
        )


def _check_tls(listen: ListenConfig, report: Report) -> None:
    tls = listen.tls
    for have, other, value in (
        ("certificate", "key", (tls.certificate, tls.key)),
        ("key", "certificate", (tls.key, tls.certificate)),
        ("client_ca", "certificate", (tls.client_ca, tls.certificate)),
    ):
        if value[0] is not None and value[1] is None and report.sound(f"listen.tls.{other}"):
            report.refuse(f"listen.tls.{have}", f"found it without {other}", f"write listen.tls.{other} too")
    for key, given in (
        ("listen.tls", tls.certificate is not None),
        ("listen.tokens", listen.tokens is not None),
        ("listen.tcp_scopes", bool(listen.tcp_scopes)),
    ):
        if given and listen.tcp is None and report.sound("listen.tcp"):
            report.refuse(
                key,
                "found it without listen.tcp, to which alone it applies",
                "write listen.tcp, or leave it out: the rights on a unix socket are its guard",
            )


def _tcp_faults(listen: ListenConfig) -> Iterator[tuple[str, str]]:
    tcp = str(listen.tcp)
    form = "write HOST:PORT, such as 127.0.0.1:50051 or [::1]:50051"
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]]+)):([0-9]{1,6})", tcp)
    if match is None:
        yield f"found {show(tcp)}, which is no HOST:PORT", form
        return
    host, port = match[1] or match[2], int(match[3])
    if port > 65535:
        yield f"found port {port}", "write a port from 1 to 65535, or 0 for a free one"
    if is_loopback(host) or listen.i_accept_off_host_access_without_tls_and_authentication:
        return
    missing = []
    if listen.tls.certificate is None:
        missing.append("listen.tls.certificate and listen.tls.key")
    if listen.tokens is None and listen.tls.client_ca is None:
        missing.append("listen.tokens or listen.tls.client_ca")
    if missing:
        yield (
            f"found host {show(host)}, which is not loopback",
            f"write {' and '.join(missing)}, so that nobody listens in and not everybody may call; or listen on 127.0.0.1",
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host's address, as far as its text says."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
