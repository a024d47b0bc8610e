"""The description beside a stored plan: its key, its bytes' hash, and what is known of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edged.engine.key import EngineKey

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT = 1
"""Of the store's folders; a folder of another format is built again."""


class DamagedError(ValueError):
    """A stored engine is not what was written; the message says what is wrong."""


@dataclass(frozen=True)
class Manifest:
    """What is known of one plan.

    Attributes:
        key: What it depends on.
        slot: What it is for (:func:`edged.engine.key.slot_of`).
        label: The model's name, for people.
        plan_bytes: Size of the plan.
        plan_sha256: Hash of the plan, in hex.
        activation_bytes: Device memory of a context, by profile.
        build_seconds: How long the build took.
        created: When, in ISO 8601 (UTC).
        refitted: The plan lacks weights, which who loads it has to put in.
        serial: Larger than that of every engine that was there before: clocks of robots jump.
    """

    key: EngineKey
    slot: str
    label: str
    plan_bytes: int
    plan_sha256: str
    activation_bytes: Mapping[str, int] = field(default_factory=dict)
    build_seconds: float = 0.0
    created: str = ""
    serial: int = 0
    refitted: bool = False

    @property
    def context_bytes(self) -> int | None:
        """Device memory that one context needs in its largest profile; None where the build did not say."""
        return max(self.activation_bytes.values(), default=None)

    def to_bytes(self) -> bytes:
        """As the file holds it; its last line is the hash of all before."""
        content = {
            "format": FORMAT,
            "key": self.key.to_json(),
            "slot": self.slot,
            "label": self.label,
            "plan": {"bytes": self.plan_bytes, "sha256": self.plan_sha256},
            "activation_bytes": dict(self.activation_bytes),
            "build_seconds": round(self.build_seconds, 3),
            "created": self.created,
            "serial": self.serial,
            "refitted": self.refitted,
        }
        text = json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"
        return text + hashlib.sha256(text).hexdigest().encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read back.

        Raises:
            DamagedError: Not byte for byte what :meth:`to_bytes` wrote, or of another format.
        """
        text, _, rest = data.rstrip(b"\n").rpartition(b"\n")
        text += b"\n"
        if not data.endswith(b"\n") or hashlib.sha256(text).hexdigest().encode() != rest:
            raise DamagedError("the manifest is damaged or cut short")
        try:
            content: dict[str, Any] = json.loads(text)
            _check_format(content["format"])
            return cls(
                key=EngineKey.from_json(content["key"]),
                slot=str(content["slot"]),
                label=str(content["label"]),
                plan_bytes=int(content["plan"]["bytes"]),
                plan_sha256=str(content["plan"]["sha256"]),
                activation_bytes={name: int(size) for name, size in content["activation_bytes"].items()},
                build_seconds=float(content["build_seconds"]),
                created=str(content["created"]),
                serial=int(content["serial"]),
                refitted=bool(content.get("refitted", False)),
            )
        except DamagedError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError(f"the manifest cannot be read: {error}") from None


def _check_format(found: object) -> None:
    if found != FORMAT:
        raise DamagedError(f"the manifest has format {found!r}, this edged writes {FORMAT}")
