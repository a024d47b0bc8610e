"""The configuration's keys of one model's attention and rotary embeddings."""

from __future__ import annotations

from dataclasses import dataclass, field

from edged.config_keys import key as _key


@dataclass(frozen=True)
class AttentionConfig:
    """How a model attends; ``auto`` follows the model's own ``sparse_config``."""

    mode: str = field(default="auto", metadata=_key("Which attention", choices=("auto", "dense", "sparse")))
    dense_below: int = field(
        default=8192,
        metadata=_key("A query at a position below this attends densely (tokens)", low=0, high=4_194_304),
    )
    top_k: int = field(default=64, metadata=_key("Blocks of 64 tokens chosen by score", low=1, high=1024))
    window: int = field(
        default=2048, metadata=_key("Local window (tokens)", low=64, high=4_194_304, multiple=64)
    )
    init_blocks: int = field(
        default=1, metadata=_key("First blocks that are always attended", low=0, high=1024)
    )
    lse: str = field(
        default="approximate",
        metadata=_key("Softmax statistics of the block scores", choices=("approximate", "exact")),
    )


@dataclass(frozen=True)
class RopeScalingConfig:
    """How rotary embeddings reach beyond the training length, in the place of the model's own ``rope_scaling``."""

    preset: str | None = field(
        default=None,
        metadata=_key(
            "A published list of LongRoPE factors, for 131072 tokens",
            choices=("minicpm4-128k", "minicpm4.1-128k"),
            default="none",
        ),
    )
    type: str | None = field(
        default=None,
        metadata=_key(
            "The method, where no preset is named; the keys below are its parameters, named as in config.json",
            choices=("default", "linear", "llama3", "yarn", "longrope"),
            default="none",
        ),
    )
    factor: float | None = field(
        default=None,
        metadata=_key(
            "How much longer than at training (linear, llama3, yarn, longrope)", default="the method's own"
        ),
    )
    original_max_position_embeddings: int | None = field(
        default=None,
        metadata=_key(
            "Longest sequence at training (llama3, yarn, longrope)",
            low=1,
            high=4_194_304,
            default="what config.json says",
        ),
    )
    attention_factor: float | None = field(
        default=None,
        metadata=_key(
            "Multiplies cos and sin (yarn, longrope)",
            default="the method's formula; 1 in minicpm models",
        ),
    )
    low_freq_factor: float | None = field(default=None, metadata=_key("llama3", default="none"))
    high_freq_factor: float | None = field(default=None, metadata=_key("llama3", default="none"))
    beta_fast: float | None = field(default=None, metadata=_key("yarn", default="32"))
    beta_slow: float | None = field(default=None, metadata=_key("yarn", default="1"))
    short_factor: tuple[float, ...] = field(
        default=(),
        metadata=_key(
            "longrope: a factor for each pair of a head's elements, up to the training length",
            low=1,
            high=512,
            default="long_factor",
        ),
    )
    long_factor: tuple[float, ...] = field(
        default=(),
        metadata=_key(
            "longrope: likewise, where context_length is above it", low=1, high=512, default="short_factor"
        ),
    )
