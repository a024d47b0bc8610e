"""Which linears of a checkpoint are 4-bit or ternary, and how: read from ``quantization_config``.

GPTQ (arXiv 2210.17323; the files of AutoGPTQ, GPTQModel and optimum) and AWQ (arXiv 2306.00978; the files of AutoAWQ)
are read. A file of CPM.cu in Marlin's layout has the configuration of the GPTQ checkpoint that it was made from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edged.errors import CheckpointError

if TYPE_CHECKING:
    from edged.models.config_values import ConfigValues

TERNARY = "ternary"
METHODS = ("gptq", "awq", TERNARY)
WORD_WEIGHTS = 8
"""4-bit weights of a 32-bit word."""
TERNARY_WORD_WEIGHTS = 16
"""Ternary weights, of two bits each, of a 32-bit word."""


@dataclass(frozen=True)
class Quantization:
    """The 4-bit linears of a model: ``w = scale * (q - zero)`` with one scale and zero point a group of inputs.

    Or its ternary ones (:mod:`edged.checkpoint.ternary`), which have scales alone.

    Attributes:
        method: One of :data:`METHODS`: how the files are laid out. In memory there is one form.
        group: Input channels that share a scale; 0: all of them.
        act_order: Groups are not consecutive inputs; each linear says which inputs are (``g_idx``).
        zero_offset: What is added to a stored zero point, modulo 16 (1 in the first GPTQ format).
        skipped: Parts of the names of modules that are not quantized.
        only: The only modules of a layer that are (``self_attn.q_proj``); empty: all.
        head: Whether the LM head is quantized too.
    """

    method: str
    group: int
    act_order: bool = False
    zero_offset: int = 0
    skipped: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    head: bool = False

    @classmethod
    def from_config(cls, values: ConfigValues) -> Quantization:
        """Read a ``quantization_config``.

        Raises:
            CheckpointError: Another method, another width than 4 bits, or a layout that is not read; ``field`` is the key.
        """
        method = values.text("quant_method")
        if method not in METHODS:
            raise values.refusal(
                "quant_method",
                f"is not supported; supported are {', '.join(METHODS)}, or weights in float32, bfloat16 or float16",
            )
        width = _first(values, "bits", "w_bit")
        if values.count(width) != (2 if method == TERNARY else 4):
            raise values.refusal(
                width,
                f"is not supported: {'ternary weights have 2' if method == TERNARY else '4-bit weights are'}",
            )
        key = _first(values, "group_size", "q_group_size")
        group = values.raw(key)
        if isinstance(group, bool) or not isinstance(group, int) or (group != -1 and not 1 <= group < 2**31):
            raise values.refusal(key, "must be a whole number of at least 1, or -1 for one group a row")
        word = TERNARY_WORD_WEIGHTS if method == TERNARY else WORD_WEIGHTS
        if group > 0 and group % word:
            raise values.refusal(key, f"is not supported: groups are multiples of {word} inputs")
        skipped = _names(values, "modules_to_not_convert")
        only = _names(values, "modules_in_block_to_quantize")
        group = max(group, 0)
        if method == TERNARY:
            head = values.flag("lm_head", default=False)
            return cls(method, group, skipped=skipped, only=only, head=head)
        if method == "awq":
            if values.has("version") and values.text("version").lower() != "gemm":
                raise values.refusal("version", "is not supported: the layout gemm is")
            if not values.flag("zero_point", default=True):
                raise values.refusal("zero_point", "is not supported: files of AutoAWQ hold zero points")
            return cls(method, group, skipped=skipped, only=only)
        return cls(
            method,
            group,
            act_order=values.flag("desc_act", default=False),
            zero_offset=_zero_offset(values),
            skipped=skipped,
            only=only,
            head=values.flag("lm_head", default=False),
        )

    @property
    def ternary(self) -> bool:
        """Whether the linears are ternary, in 2 bits a weight, and not 4-bit."""
        return self.method == TERNARY

    @property
    def word_weights(self) -> int:
        """Weights of a 32-bit word."""
        return TERNARY_WORD_WEIGHTS if self.ternary else WORD_WEIGHTS

    def covers(self, module: str) -> bool:
        """Whether a module (``model.layers.0.self_attn.q_proj``, ``lm_head``) is 4-bit or ternary."""
        # By substring, as AutoAWQ and those that read its files do.
        if any(part in module for part in self.skipped):
            return False
        if module == "lm_head":
            return self.head
        return not self.only or any(module.endswith("." + name) for name in self.only)

    def group_of(self, inputs: int) -> int:
        """Inputs of a group of a linear with so many inputs."""
        return self.group or inputs

    def check(self, inputs: dict[str, int], outputs: dict[str, int]) -> None:
        """Refuse sizes that do not cut into groups and words.

        Args:
            inputs: Numbers of inputs that linears of the model have, by the name of the key they come from.
            outputs: Likewise of outputs.

        Raises:
            CheckpointError: Names the key.
        """
        for key, count in inputs.items():
            if count % self.group_of(count) or count % self.word_weights:
                raise CheckpointError(
                    f"quantization_config.group_size {self.group or -1} does not divide the {count} inputs that {key} gives",
                    field="quantization_config.group_size",
                )
        for key, count in outputs.items():
            if count % WORD_WEIGHTS and not self.ternary:
                raise CheckpointError(
                    f"{key} gives linears of {count} outputs; 4-bit linears have multiples of {WORD_WEIGHTS}",
                    field=key,
                )


def _first(values: ConfigValues, *keys: str) -> str:
    """The first of several spellings that the file has, or the first of all."""
    return next((key for key in keys if values.has(key)), keys[0])


def _zero_offset(values: ConfigValues) -> int:
    """The first GPTQ format stores zero points less one; its second, as they are."""
    key = _first(values, "checkpoint_format", "format")
    kind = values.text(key) if values.has(key) else "gptq"
    if kind not in ("gptq", "gptq_v2"):
        raise values.refusal(key, "is not supported; supported are gptq and gptq_v2")
    if values.flag("is_marlin_format", default=False):
        raise values.refusal("is_marlin_format", "is not supported: convert from the GPTQ checkpoint instead")
    if values.has("dynamic") and values.raw("dynamic") != {}:
        raise values.refusal("dynamic", "is not supported: name modules in modules_to_not_convert instead")
    return 1 if kind == "gptq" else 0


def _names(values: ConfigValues, key: str) -> tuple[str, ...]:
    """A list of names, or of lists of them; nothing where the key is missing."""
    if not values.has(key):
        return ()
    found: list[str] = []
    content = values.raw(key)
    for item in content if isinstance(content, list) else [None]:
        for name in item if isinstance(item, list) else [item]:
            if not isinstance(name, str) or not name:
                raise values.refusal(key, "must list the names of modules")
            found.append(name)
    return tuple(found)
