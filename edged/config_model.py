"""The configuration of one model: its weights, the steps that it runs, and what its answers look like."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path  # noqa: TC003 - the reader resolves the annotations

from edged.config_attention import AttentionConfig, RopeScalingConfig
from edged.config_keys import SIZE_LIMIT
from edged.config_keys import key as _key
from edged.config_speculation import SpeculationConfig

KV_DTYPES = ("auto", "bf16", "fp16", "fp32", "int8", "fp8")
"""What keys and values may be stored in."""

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}"
"""A model's name also names a health service and a metric label, so it holds no spaces or control characters."""


@dataclass(frozen=True)
class ModelConfig:
    """One model."""

    name: str = field(
        metadata=_key("Name that requests use: letters, digits and . _ : / @ + -", pattern=NAME_PATTERN)
    )
    path: Path = field(metadata=_key("Model folder (config.json, safetensors, tokenizer.json)"))
    executor: str = field(
        default="auto", metadata=_key("What runs the steps", choices=("auto", "torch", "tensorrt"))
    )
    device: str = field(default="cpu", metadata=_key("Where it runs", choices=("cpu", "cuda")))
    dtype: str = field(
        default="float32",
        metadata=_key("Type of weights and KV", choices=("float32", "bfloat16", "float16")),
    )
    kv_dtype: str = field(
        default="auto",
        metadata=_key(
            "Type of keys and values in their pages; auto: dtype. int8 and fp8 (e4m3) take half the bytes of bf16, with a "
            "scale for each token and KV head; on device cuda the others must be dtype's own",
            choices=KV_DTYPES,
        ),
    )
    context_length: int = field(
        default=4096, metadata=_key("Most tokens of prompt and answer together", low=64, high=4_194_304)
    )
    max_sequences: int = field(default=1, metadata=_key("Most requests that share steps", low=1, high=256))
    prefill_chunk: int = field(
        default=512,
        metadata=_key(
            "Most prompt tokens in one step, at most context_length",
            low=1,
            high=8192,
            default="512, or context_length where that is smaller",
        ),
    )
    max_step_tokens: int | None = field(
        default=None,
        metadata=_key(
            "Most tokens in one step, of prompts and streams together, at least max_sequences",
            low=1,
            high=16384,
            default="prefill_chunk and max_sequences together",
        ),
    )
    prefill_share: float = field(
        default=0.5,
        metadata=_key(
            "Part of a step's time that prompts may take while streams run (measured; 0.5 at most doubles the time between "
            "their tokens); 1 lets prompts have whole chunks",
            low=0.05,
            high=1,
        ),
    )
    prefix_cache: bool = field(
        default=True,
        metadata=_key(
            "Remember the pages of prompts and answers, and share them with prompts that begin alike"
        ),
    )
    session_share: float = field(
        default=0.5,
        metadata=_key("Part of the KV pages that sessions may keep pinned", low=0, high=0.9),
    )
    host_kv: int = field(
        default=0,
        metadata=_key(
            "Host memory for the pages of running requests that are suspended for others of higher priority",
            unit="size",
            low=0,
            high=SIZE_LIMIT,
            default="0B: none are suspended",
        ),
    )
    residency: str = field(
        default="reserved",
        metadata=_key(
            "reserved: its memory is kept for it; evictable: it shares a room with others of its kind and is unloaded for "
            "another one (edgectl load)",
            choices=("reserved", "evictable"),
        ),
    )
    threads: int = field(
        default=0, metadata=_key("CPU threads of the step; 0 takes every core", low=0, high=1024)
    )
    attention: AttentionConfig = field(
        default_factory=AttentionConfig, metadata=_key("Dense or block-sparse attention")
    )
    speculation: SpeculationConfig = field(
        default_factory=SpeculationConfig,
        metadata=_key("Draft tokens that are verified together (speculative decoding)"),
    )
    rope_scaling: RopeScalingConfig | None = field(
        default=None,
        metadata=_key("Rotary embeddings for longer contexts", default="the model's own"),
    )
    tool_format: str = field(
        default="auto",
        metadata=_key(
            "How the model writes tool calls; auto takes it from its chat template",
            choices=("auto", "none", "hermes", "llama3", "minicpm4", "minicpm5"),
        ),
    )
    reasoning_format: str = field(
        default="auto",
        metadata=_key(
            "What stands around the model's thoughts: <think> or <|thought_start|>; auto takes it from its chat template or "
            "tokens",
            choices=("auto", "none", "think", "thought"),
        ),
    )
    embeddings: str = field(
        default="none",
        metadata=_key(
            "How texts become vectors (Embed): the final norm's output at the last token, or its mean over all; none: "
            "they do not",
            choices=("none", "last", "mean"),
        ),
    )
