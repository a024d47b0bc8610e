"""What a quantization is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edged.errors import InvalidArgumentError
from edged.models.weights import EMBEDDING, HEAD, weight_specs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from edged.models.architecture import Architecture
    from edged.models.weights import WeightSpec

RTN, GPTQ, P_GPTQ, AWQ_GPTQ = "rtn", "gptq", "p-gptq", "awq-gptq"
METHODS = (RTN, GPTQ, P_GPTQ, AWQ_GPTQ)
STATIC, FREE, PLAIN = "static", "free", "none"
ACT_ORDERS = (STATIC, FREE, PLAIN)
P_GPTQ_POSITIONS = 4
"""Positions that P-GPTQ leaves out (arXiv 2506.07900, section 4.1): their activations are some ten times as large."""
WORD = 8
"""4-bit numbers of a 32-bit word."""
USUAL_GROUPS = (128, 64, 32)


@dataclass(frozen=True)
class Recipe:
    """How linears become 4-bit.

    Attributes:
        method: ``rtn`` rounds to nearest; ``gptq`` (arXiv 2210.17323) spreads each column's error over those after it;
            ``p-gptq`` is GPTQ with a Hessian without the first positions of each sequence (arXiv 2506.07900);
            ``awq-gptq`` scales input channels first (AWQ, arXiv 2306.00978), folding the scales into what comes before.
        group: Input channels that share a scale and zero point; 0: all of a row.
        symmetric: The zero point is 8; otherwise each group has its own, 1 to 15.
        act_order: In which order GPTQ goes through input channels. ``static``: by falling activation, with groups of
            consecutive channels; ``free``: likewise, and groups follow that order (``desc_act``, with its ``g_idx``);
            ``none``: as they come.
        damping: What is added to the Hessian's diagonal, in parts of its mean.
        skip_first: Positions of each sequence that the Hessian leaves out; None: 4 for ``p-gptq``, else 0.
        head: Quantize the LM head too, where it is not tied to the embedding.
    """

    method: str = GPTQ
    group: int = 128
    symmetric: bool = True
    act_order: str = STATIC
    damping: float = 0.01
    skip_first: int | None = None
    head: bool = False

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("method", self.method, METHODS),
            ("act_order", self.act_order, ACT_ORDERS),
        ):
            if value not in allowed:
                raise InvalidArgumentError(f"{name} {value!r} is not one of {', '.join(allowed)}", field=name)
        if self.group < 0 or self.group % WORD:
            raise InvalidArgumentError(
                f"group {self.group} is not a multiple of {WORD} input channels, or 0 for a row",
                field="group",
            )
        if not 0 < self.damping <= 1:
            raise InvalidArgumentError(
                f"damping {self.damping} is not above 0 and at most 1", field="damping"
            )

    @property
    def calibrated(self) -> bool:
        """Whether the method looks at activations."""
        return self.method != RTN

    @property
    def smooths(self) -> bool:
        """Whether input channels are scaled first."""
        return self.method == AWQ_GPTQ

    @property
    def skipped(self) -> int:
        """Positions of each sequence that the Hessian leaves out."""
        if self.skip_first is not None:
            return self.skip_first
        return P_GPTQ_POSITIONS if self.method == P_GPTQ else 0

    def group_of(self, inputs: int) -> int:
        """Input channels of a group of a linear with so many."""
        return self.group or inputs

    def covers(self, spec: WeightSpec) -> bool:
        """Whether a weight becomes 4-bit: the linears of the layers, and the LM head where it is asked for."""
        if len(spec.shape) != 2 or spec.name == EMBEDDING:
            return False
        return self.head if spec.name == HEAD else True

    def check(self, architecture: Architecture) -> None:
        """Refuse a model that the recipe does not fit.

        Raises:
            InvalidArgumentError: The group does not divide a linear's inputs, its sizes do not cut into words, or there
                is no LM head to quantize.
        """
        if self.head and architecture.tied:
            raise InvalidArgumentError(
                "the LM head of this model is its embedding (tie_word_embeddings), which GPTQ's format cannot hold in 4 "
                "bits; leave the head wide",
                field="head",
            )
        covered = [spec for spec in weight_specs(architecture) if self.covers(spec)]
        for spec in covered:
            check_sizes(spec, self.group_of(spec.shape[1]), covered)


def check_sizes(spec: WeightSpec, group: int, covered: Iterable[WeightSpec]) -> None:
    """Refuse a linear that does not cut into groups and words.

    Raises:
        InvalidArgumentError: With the sizes, and the groups that would do.
    """
    inputs = spec.shape[1]
    if inputs % group:
        fitting = [str(size) for size in USUAL_GROUPS if all(each.shape[1] % size == 0 for each in covered)]
        remedy = (
            f"groups of {' or '.join(fitting)} do" if fitting else "no usual group does: use one group a row"
        )
        raise InvalidArgumentError(
            f"group {group} does not divide the {inputs} input channels of {spec.name}; {remedy}",
            field="group",
        )
    for source in spec.sources:
        if source.shape[0] % WORD or inputs % WORD:
            raise InvalidArgumentError(
                f"{source.module} has {source.shape[0]} outputs and {inputs} inputs; 4-bit linears have multiples of {WORD}",
                field="group",
            )
