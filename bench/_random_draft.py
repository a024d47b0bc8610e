"""An EAGLE draft of a model's shape in a folder: its tensors are holes of a file, all zeros, for somebody to fill once loaded.

Its linears are in 4 bits in GPTQ's layout, as MiniCPM4's published draft of that size has them.
"""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TOKENS = 18362
"""Of the token map: a quarter of MiniCPM4's vocabulary."""
GROUP = 128
_BYTES = {"BF16": 2, "F16": 2, "I32": 4}


def write_draft(folder: Path, target: Mapping[str, object], sizes: Mapping[str, tuple[int, ...]]) -> Path:
    """Write configuration and weights; return the token map's file.

    Args:
        folder: Where; it is made.
        target: The target's `config.json`.
        sizes: Shape of each tensor, by its name in MiniCPM4's layout.
    """
    folder.mkdir()
    quantization = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "desc_act": False,
        "sym": True,
    }
    own = {"num_hidden_layers": 1, "mup_denominator": 32, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps({**target, **own}))
    header, end = {}, 0
    for name, (dtype, shape) in _tensors(sizes).items():
        size = _BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    tokens = folder / "map.json"
    tokens.write_text(json.dumps(list(range(TOKENS))))
    return tokens


def _tensors(sizes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of each tensor of the file."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in sizes.items():
        if len(shape) == 1:
            tensors[name] = "BF16", shape
            continue
        module, (outputs, inputs) = name.removesuffix(".weight"), shape
        tensors |= {
            f"{module}.qweight": ("I32", (inputs // 8, outputs)),
            f"{module}.qzeros": ("I32", (inputs // GROUP, outputs // 8)),
            f"{module}.scales": ("F16", (inputs // GROUP, outputs)),
        }
    return tensors


def minicpm_sizes(hidden: int, intermediate: int, q_width: int, kv_width: int) -> dict[str, tuple[int, ...]]:
    """The tensors of MiniCPM4's layout."""
    layer = "eagle_layers.0."
    norms = ("input_norm1", "input_norm2", f"{layer}input_layernorm", f"{layer}post_attention_layernorm")
    return {
        "fc.weight": (hidden, 2 * hidden),
        f"{layer}self_attn.q_proj.weight": (q_width, hidden),
        f"{layer}self_attn.k_proj.weight": (kv_width, hidden),
        f"{layer}self_attn.v_proj.weight": (kv_width, hidden),
        f"{layer}self_attn.o_proj.weight": (hidden, q_width),
        f"{layer}mlp.gate_proj.weight": (intermediate, hidden),
        f"{layer}mlp.up_proj.weight": (intermediate, hidden),
        f"{layer}mlp.down_proj.weight": (hidden, intermediate),
        **{f"{name}.weight": (hidden,) for name in norms},
    }
