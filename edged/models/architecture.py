"""Hyper-parameters of a model, read from the ``config.json`` of its folder.

Every supported model is one decoder switched by these numbers. What the file must say and does not, and what it says
and the decoder does not do, is refused by the key's name: a guess here would be a wrong answer later.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from edged.errors import CheckpointError
from edged.models.config_values import ConfigValues
from edged.models.quantization import Quantization
from edged.models.rope import Rope
from edged.models.rope_scaling import with_rope_scaling

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from edged.config import ModelConfig, RopeScalingConfig

CONFIG_FILE = "config.json"
QUANTIZER_FILES = {"gptq": "quantize_config.json", "awq": "quant_config.json"}
"""Where AutoGPTQ and AutoAWQ said how a folder is quantized before ``config.json`` did."""
MOST_LAYERS = 1024
"""Layers that are believed; the deepest published decoders have some 130."""
MOST_HEAD_ELEMENTS = 4096
"""Elements of a head that are believed; published ones have up to 512."""
_MAX_CONFIG_BYTES = 4 << 20


@dataclass(frozen=True)
class Family:
    """What one ``model_type`` leaves unsaid in its configuration, as its published code fixes it."""

    tie_default: bool = False
    rope_theta_default: float | None = None
    """None: the file must say it."""
    head_dim_required: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    """Biases on q, k and v alone, whatever ``attention_bias`` says."""
    mup: bool = False
    """Has ``scale_emb``, ``scale_depth`` and ``dim_model_base``."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family(rope_theta_default=10000.0),
    "mimo": Family(qkv_bias=True),
    "minicpm": Family(tie_default=True, rope_theta_default=10000.0, mup=True),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True, head_dim_required=True),
}


@dataclass(frozen=True)
class Architecture:
    """Hyper-parameters of one model; sizes are counts of elements.

    The forward (``[T, hidden]`` for T tokens): the embedding times ``embedding_scale``; in each layer
    ``h += residual_scale * attention(norm(h))`` and ``h += residual_scale * mlp(norm(h))``; the LM head sees the
    final norm's output divided by ``logit_divisor``. The three scales are 1 except for muP models (``minicpm``).
    """

    model_type: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    norm_eps: float
    max_position: int
    rope: Rope
    tied: bool
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    quantization: Quantization | None = None
    """Which linears are 4-bit; None: none."""

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def q_width(self) -> int:
        """Elements of all query heads of a token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of all key (or value) heads of a token."""
        return self.kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Elements of ``[q; k; v]`` of a token."""
        return self.q_width + 2 * self.kv_width

    @classmethod
    def of(cls, model: ModelConfig) -> Architecture:
        """The architecture of a configured model: its folder's, with the configuration's ``rope_scaling``.

        Raises:
            CheckpointError: The folder's ``config.json`` is refused, or does not go with ``rope_scaling``.
        """
        return cls.read(model.path, rope_scaling=model.rope_scaling)

    @classmethod
    def read(cls, folder: Path, *, rope_scaling: RopeScalingConfig | None = None) -> Architecture:
        """Read ``config.json`` of a model folder.

        Where it does not say how the folder is quantized, the quantizer's own file does (:data:`QUANTIZER_FILES`).

        Args:
            folder: The model folder.
            rope_scaling: Takes the place of the file's.

        Raises:
            CheckpointError: The file is missing or unreadable, or :meth:`from_config` refuses it.
        """
        file = folder / CONFIG_FILE
        config = _read_json(file, "; give the folder that holds config.json")
        if config.get("quantization_config") is None:
            for method, name in QUANTIZER_FILES.items():
                if (folder / name).exists():
                    config["quantization_config"] = {"quant_method": method, **_read_json(folder / name)}
        try:
            return cls.from_config(config, rope_scaling=rope_scaling)
        except CheckpointError as error:
            raise CheckpointError(f"{file}: {error.message}", field=error.field) from None

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, rope_scaling: RopeScalingConfig | None = None
    ) -> Architecture:
        """Check a Hugging Face configuration and take what the decoder needs from it.

        Both spellings of the rope keys are read: ``rope_theta`` with ``rope_scaling``, and ``rope_parameters``.

        Args:
            config: The content of ``config.json``.
            rope_scaling: Takes the place of the file's.

        Raises:
            CheckpointError: A needed key is missing, has a wrong type or value, or asks for what the decoder does not
                do; ``field`` is the key.
        """
        values = ConfigValues(config if rope_scaling is None else with_rope_scaling(config, rope_scaling))
        model_type = values.text("model_type")
        if model_type not in FAMILIES:
            raise values.refusal("model_type", f"is not supported; supported are {', '.join(FAMILIES)}")
        family = FAMILIES[model_type]
        _refuse_unsupported(values)

        hidden = values.count("hidden_size")
        layers = values.count("num_hidden_layers", most=MOST_LAYERS)
        heads = values.count("num_attention_heads")
        kv_heads = values.count("num_key_value_heads")
        if heads % kv_heads:
            raise values.refusal(
                "num_attention_heads", f"must be a multiple of num_key_value_heads ({kv_heads})"
            )
        head_dim = _head_dim(values, family, hidden, heads)
        max_position = values.count("max_position_embeddings")
        attention_bias = values.flag("attention_bias", default=False)
        tied = values.flag("tie_word_embeddings", default=family.tie_default)
        rope = Rope.from_config(
            values,
            head_dim=head_dim,
            max_position=max_position,
            theta_default=family.rope_theta_default,
            # The released minicpm code never scales cos and sin, whatever the context.
            attention_factor=1.0 if family.mup else None,
        )
        rope.check(head_dim)
        if rope_scaling is not None:
            max_position = rope.reach(max_position)
            if family.mup and rope_scaling.attention_factor not in (None, 1.0):
                raise CheckpointError(
                    f"rope_scaling.attention_factor {rope_scaling.attention_factor} is not supported: {model_type} models "
                    "have 1.0 at every context length",
                    field="rope_scaling.attention_factor",
                )
        architecture = cls(
            model_type=model_type,
            hidden=hidden,
            intermediate=values.count("intermediate_size"),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocabulary=values.count("vocab_size"),
            norm_eps=values.number("rms_norm_eps", above=0.0),
            max_position=max_position,
            rope=rope,
            tied=tied,
            qk_norm=family.qk_norm,
            qkv_bias=family.qkv_bias or attention_bias,
            output_bias=attention_bias and not family.qkv_bias,
            mlp_bias=values.flag("mlp_bias", default=False),
            **(_mup(values, hidden, layers) if family.mup else {}),
        )
        if values.has("quantization_config"):
            return replace(architecture, quantization=_quantization(values, architecture))
        return architecture


def _read_json(file: Path, advice: str = "") -> dict[str, Any]:
    """The JSON object in a small file."""
    try:
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            raise CheckpointError(f"{file}: larger than {_MAX_CONFIG_BYTES >> 20} MiB")
        config = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file}: this file is missing{advice}") from None
    except NotADirectoryError:
        raise CheckpointError(
            f"{file.parent}: is a file, and a model is a folder; make one of it with: edgectl import {file.parent} DEST"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{file}: must hold a JSON object, not a {type(config).__name__}")
    return config


def _quantization(values: ConfigValues, a: Architecture) -> Quantization:
    """The 4-bit linears, whose sizes must cut into groups and words."""
    quantization = Quantization.from_config(values.part("quantization_config"))
    if quantization.head and a.tied:
        raise values.part("quantization_config").refusal(
            "lm_head", "is not supported where tie_word_embeddings is true"
        )
    outputs = {
        "num_attention_heads": a.q_width,
        "num_key_value_heads": a.kv_width,
        "hidden_size": a.hidden,
        "intermediate_size": a.intermediate,
    }
    quantization.check(
        {"hidden_size": a.hidden, "num_attention_heads": a.q_width, "intermediate_size": a.intermediate},
        {**outputs, "vocab_size": a.vocabulary} if quantization.head else outputs,
    )
    return quantization


def _mup(values: ConfigValues, hidden: int, layers: int) -> dict[str, Any]:
    """The three muP scales (Tensor Programs V, as MiniCPM applies them)."""
    depth = values.number("scale_depth", above=0.0) / layers**0.5
    divisor = hidden / values.number("dim_model_base", above=0.0)
    for key, scale in (("scale_depth", depth), ("dim_model_base", divisor)):
        if not (math.isfinite(scale) and scale > 0):  # the number itself was, and is of no model
            raise values.refusal(key, f"gives a scale of {scale}")
    return {
        "embedding_scale": values.number("scale_emb", above=0.0),
        "residual_scale": depth,
        "logit_divisor": divisor,
    }


def _head_dim(values: ConfigValues, family: Family, hidden: int, heads: int) -> int:
    if values.has("head_dim") or family.head_dim_required:
        head_dim = values.count("head_dim")
    else:
        if hidden % heads:
            raise values.refusal(
                "hidden_size", f"is no multiple of num_attention_heads ({heads}) and there is no head_dim"
            )
        head_dim = hidden // heads
    if head_dim > MOST_HEAD_ELEMENTS:
        raise values.refusal("head_dim", f"gives heads of {head_dim}: at most {MOST_HEAD_ELEMENTS} are read")
    if head_dim % 2:
        raise values.refusal("head_dim", f"gives heads of {head_dim}: rotary embeddings need an even number")
    return head_dim


def _refuse_unsupported(values: ConfigValues) -> None:
    """Refuse keys that would change the forward in a way the decoder does not follow."""
    activation = values.text("hidden_act")
    if activation not in ("silu", "swish"):
        raise values.refusal("hidden_act", "is not supported; supported is silu")
    if values.flag("use_sliding_window", default=False):
        raise values.refusal("use_sliding_window", "is not supported: every layer attends to all it sees")
    if values.flag("rope_interleaved", default=False):
        raise values.refusal("rope_interleaved", "is not supported: a head's two halves rotate together")
    if values.has("layer_types"):
        kinds = values.raw("layer_types")
        if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
            raise values.refusal("layer_types", "is not supported except for full_attention in every layer")
    if values.has("num_experts") or values.has("num_local_experts"):
        key = "num_experts" if values.has("num_experts") else "num_local_experts"
        raise values.refusal(key, "is not supported: the decoder has one MLP a layer")
