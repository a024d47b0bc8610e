"""Rotary position embeddings: the frequency of each pair of a head's elements, with every scaling that is supported.

Nothing here depends on how long a sequence happens to be: a table is fixed when the model is loaded, so that a token's
keys never depend on what follows it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edged.errors import CheckpointError

if TYPE_CHECKING:
    from edged.models.config_values import ConfigValues

FloatArray = npt.NDArray[np.float32]
_Float64Array = npt.NDArray[np.float64]

KINDS = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True)
class Rope:
    """Parameters of the rotary embedding; which of them count depends on ``kind``.

    Attributes:
        theta: Base of the frequencies ``theta ** (-2i / head_dim)``.
        kind: One of :data:`KINDS`.
        factor: How much longer than at training a sequence may be.
        original_max_position: Longest sequence at training.
        attention_factor: Multiplies cos and sin (so the scores by its square).
        low_freq_factor: llama3: ``original_max_position / low_freq_factor`` is the wavelength above which a pair is
            slowed by ``factor``.
        high_freq_factor: llama3: likewise, the wavelength below which a pair is left alone.
        beta_fast: yarn: rotations over the original length above which a pair is left alone.
        beta_slow: yarn: rotations below which a pair is slowed by ``factor``.
        truncate: yarn: round the bounds between the two outwards to whole pairs.
        short_factor: longrope: how much each pair is slowed while sequences fit ``original_max_position``.
        long_factor: longrope: likewise, once ``context_length`` is larger.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @classmethod
    def from_config(
        cls,
        values: ConfigValues,
        *,
        head_dim: int,
        max_position: int,
        theta_default: float | None,
        attention_factor: float | None = None,
    ) -> Rope:
        """Read ``rope_parameters``, or ``rope_theta`` and ``rope_scaling``.

        Args:
            values: The whole configuration.
            head_dim: Elements of a head.
            max_position: ``max_position_embeddings``.
            theta_default: ``rope_theta`` where the file does not say it; None refuses that.
            attention_factor: Overrides what longrope and yarn would compute.

        Raises:
            CheckpointError: An unknown type, or a key that is missing or wrong.
        """
        scaling = next(
            (values.part(key) for key in ("rope_parameters", "rope_scaling") if values.has(key)), None
        )
        source = scaling if scaling is not None and scaling.has("rope_theta") else values
        theta = source.number("rope_theta", above=0.0, default=theta_default)
        for place in (values, scaling):
            if place is not None and place.number("partial_rotary_factor", default=1.0) != 1.0:
                raise place.refusal("partial_rotary_factor", "is not supported: heads rotate as a whole")
        if scaling is None:
            return cls(theta=theta)
        # Old files spell the key "type".
        key = "rope_type" if scaling.has("rope_type") or not scaling.has("type") else "type"
        kind = scaling.text(key) if scaling.has(key) or not scaling.has("rope_theta") else "default"
        if kind not in KINDS:
            raise scaling.refusal(key, f"is not supported; supported are {', '.join(KINDS)}")
        if kind == "default":
            return cls(theta=theta)
        if kind == "linear":
            return cls(theta=theta, kind=kind, factor=scaling.number("factor", above=0.0))
        original = _original_max_position(values, scaling, kind, max_position)
        if kind == "llama3":
            return cls._llama3(scaling, theta, original)
        if attention_factor is None and scaling.has("attention_factor"):
            attention_factor = scaling.number("attention_factor", above=0.0)
        if kind == "yarn":
            return cls._yarn(scaling, theta, original, max_position, attention_factor)
        return cls._longrope(
            scaling,
            theta,
            original,
            head_dim=head_dim,
            max_position=max_position,
            attention_factor=attention_factor,
        )

    @classmethod
    def _llama3(cls, scaling: ConfigValues, theta: float, original: int) -> Rope:
        low = scaling.number("low_freq_factor", above=0.0)
        return cls(
            theta=theta,
            kind="llama3",
            factor=scaling.number("factor", above=0.0),
            original_max_position=original,
            low_freq_factor=low,
            high_freq_factor=scaling.number("high_freq_factor", above=low),
        )

    @classmethod
    def _yarn(
        cls,
        scaling: ConfigValues,
        theta: float,
        original: int,
        max_position: int,
        attention_factor: float | None,
    ) -> Rope:
        factor = scaling.number("factor", above=0.0, default=max_position / original)
        if attention_factor is None:
            mscale = scaling.number("mscale", default=0.0)
            all_dim = scaling.number("mscale_all_dim", default=0.0)
            attention_factor = _yarn_scale(factor, 1.0)
            if mscale and all_dim:
                # A quotient by zero becomes NaN, which check() refuses.
                whole = _yarn_scale(factor, all_dim)
                attention_factor = _yarn_scale(factor, mscale) / whole if whole else math.nan
        return cls(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_position=original,
            attention_factor=attention_factor,
            beta_fast=scaling.number("beta_fast", above=0.0, default=32.0),
            beta_slow=scaling.number("beta_slow", above=0.0, default=1.0),
            truncate=scaling.flag("truncate", default=True),
        )

    @classmethod
    def _longrope(
        cls,
        scaling: ConfigValues,
        theta: float,
        original: int,
        *,
        head_dim: int,
        max_position: int,
        attention_factor: float | None,
    ) -> Rope:
        factor = scaling.number("factor", above=0.0, default=max_position / original)
        if attention_factor is None and factor <= 1.0:
            attention_factor = 1.0
        elif attention_factor is None:
            if original < 2:
                raise scaling.refusal("original_max_position_embeddings", "must be above 1")
            attention_factor = math.sqrt(1.0 + math.log(factor) / math.log(original))
        return cls(
            theta=theta,
            kind="longrope",
            factor=factor,
            original_max_position=original,
            attention_factor=attention_factor,
            short_factor=scaling.numbers("short_factor", head_dim // 2),
            long_factor=scaling.numbers("long_factor", head_dim // 2),
        )

    def check(self, head_dim: int) -> None:
        """Refuse parameters of which no table can be made.

        Raises:
            CheckpointError: A frequency, or the factor on cos and sin, would be no positive finite number.
        """
        key = "rope_theta" if self.kind == "default" else "rope_scaling"
        try:
            with np.errstate(all="ignore"):
                tables = [self.inverse_frequencies(head_dim, context) for context in (1, 2**31 - 1)]
            sound = all(np.isfinite(table).all() and (table >= 0).all() for table in tables)
        except (ArithmeticError, ValueError):  # yarn's logarithms
            sound = False
        if not sound:
            raise CheckpointError(f"{key} gives rotary frequencies that are no numbers", field=key)
        if not (math.isfinite(self.attention_factor) and self.attention_factor > 0):
            raise CheckpointError(
                f"{key} gives the factor {self.attention_factor} on cos and sin; it must be a positive number",
                field=key,
            )

    def reach(self, max_position: int) -> int:
        """Longest sequence that the scaling is made for, where the model's own maximum is ``max_position``."""
        original = self.original_max_position or max_position
        reach = original * self.factor
        return max(max_position, min(int(reach), 2**31 - 1))

    def inverse_frequencies(self, head_dim: int, context_length: int) -> FloatArray:
        """Radians a position of each pair (i, i + head_dim / 2), fp32 ``[head_dim / 2]``.

        Args:
            head_dim: Elements of a head.
            context_length: Longest sequence that will be run; chooses longrope's factors once for all positions.
        """
        exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
        plain: _Float64Array = 1.0 / self.theta**exponents
        if self.kind == "linear":
            plain = plain / self.factor
        elif self.kind == "llama3":
            plain = self._llama3_frequencies(plain)
        elif self.kind == "yarn":
            plain = self._yarn_frequencies(plain, head_dim)
        elif self.kind == "longrope":
            is_long = context_length > self.original_max_position
            plain = plain / np.array(self.long_factor if is_long else self.short_factor)
        return plain.astype(np.float32)

    def _llama3_frequencies(self, plain: _Float64Array) -> _Float64Array:
        """Llama 3.1: slow pairs by ``factor``, fast pairs untouched, between them a linear blend in 1 / wavelength."""
        wavelength = 2 * math.pi / plain
        blend = (self.original_max_position / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        blend = np.clip(blend, 0.0, 1.0)
        return (1 - blend) * plain / self.factor + blend * plain

    def _yarn_frequencies(self, plain: _Float64Array, head_dim: int) -> _Float64Array:
        """YaRN (arXiv 2309.00071, section 3.2, "NTK-by-parts")."""

        def pair_of(rotations: float) -> float:
            """The (fractional) pair that turns this often over the original length."""
            return (
                head_dim
                * math.log(self.original_max_position / (rotations * 2 * math.pi))
                / (2 * math.log(self.theta))
            )

        low, high = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0.0), min(high, head_dim - 1.0)
        if low == high:
            high += 0.001  # the published code's guard against a division by zero
        ramp = np.clip((np.arange(head_dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
        return plain / self.factor * ramp + plain * (1 - ramp)


def _yarn_scale(factor: float, mscale: float) -> float:
    """YaRN's temperature, as a factor on cos and sin (equation 22, with DeepSeek's ``mscale``)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _original_max_position(values: ConfigValues, scaling: ConfigValues, kind: str, max_position: int) -> int:
    """``original_max_position_embeddings`` of the whole file (some longrope files have it there), or of the scaling."""
    key = "original_max_position_embeddings"
    for place in (values, scaling):
        if place.has(key):
            return place.count(key)
    if kind == "yarn":  # the published code takes this where the file is silent
        return max_position
    raise CheckpointError(f"{kind} rope scaling needs {key}: the configuration must say it", field=key)
