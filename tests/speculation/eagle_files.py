"""Drafts in EAGLE's and MiniCPM4's layouts, and their forward written down plainly from the papers, on whole sequences."""

from __future__ import annotations

import json

import numpy as np
import torch
from safetensors.numpy import save_file


def layer_shapes(prefix, config, *, inputs):
    """The weights that a draft's layer has in every layout, by name; attention reads ``inputs`` channels."""
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", hidden // config["num_attention_heads"])
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return {
        f"{prefix}self_attn.q_proj.weight": (q, inputs),
        f"{prefix}self_attn.k_proj.weight": (kv, inputs),
        f"{prefix}self_attn.v_proj.weight": (kv, inputs),
        f"{prefix}self_attn.o_proj.weight": (hidden, q),
        f"{prefix}mlp.gate_proj.weight": (wide, hidden),
        f"{prefix}mlp.up_proj.weight": (wide, hidden),
        f"{prefix}mlp.down_proj.weight": (hidden, wide),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
    }


def write_draft(folder, target, *, seed=0, minicpm=False, changes=None, tensors=None):
    """A random draft of a target's configuration; ``changes`` to its configuration, ``tensors`` to its tensors."""
    folder.mkdir(exist_ok=True)
    config = {**target, "num_hidden_layers": 1, **(changes or {})}
    (folder / "config.json").write_text(json.dumps(config))
    r = np.random.default_rng(seed)
    hidden = target["hidden_size"]
    layer = "eagle_layers.0." if minicpm else "layers.0."
    shapes = {"fc.weight": (hidden, 2 * hidden), **layer_shapes(layer, target, inputs=hidden)}
    if minicpm:
        norms = ("input_norm1.weight", "input_norm2.weight", f"{layer}input_layernorm.weight")
        shapes |= dict.fromkeys(norms, (hidden,))
    else:
        shapes["fc.bias"] = (hidden,)
    made = {
        name: (
            r.standard_normal(shape) / shape[-1] ** 0.5
            if len(shape) > 1
            else 1 + 0.1 * r.standard_normal(shape)
        ).astype(np.float32)
        for name, shape in shapes.items()
    }
    made = {**made, **(tensors or {})}
    save_file(
        {name: array for name, array in made.items() if array is not None}, folder / "model.safetensors"
    )
    return made


def plain_forward(
    made, target, embedding, tokens, hidden, *, minicpm=False, window=10**9, residual=1.0, scale=1.0
):
    """Outputs ``[n, H]`` for rows of (hidden at position i, token i + 1): ``tokens`` and ``hidden`` of one length."""
    weights = {
        name.replace("eagle_layers", "layers"): torch.from_numpy(array).double()
        for name, array in made.items()
    }
    eps, heads, kv_heads = (
        target["rms_norm_eps"],
        target["num_attention_heads"],
        target["num_key_value_heads"],
    )
    size = target.get("head_dim", target["hidden_size"] // heads)

    def norm(x, name):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weights[name] if name in weights else x

    e = norm(embedding[tokens].double() * scale, "input_norm1.weight")
    h = norm(hidden.double(), "input_norm2.weight")
    x = torch.cat([e, h], -1) @ weights["fc.weight"].T + weights.get("fc.bias", torch.zeros(()).double())
    y = norm(x, "layers.0.input_layernorm.weight")
    q, k, v = (
        (y @ weights[f"layers.0.self_attn.{name}_proj.weight"].T).view(len(tokens), -1, size)
        for name in "qkv"
    )
    places = torch.arange(len(tokens))
    angles = places[:, None] / target["rope_theta"] ** (torch.arange(0, size, 2).double() / size)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def rotate(each):
        turned = torch.complex(*each.chunk(2, -1)) * turn
        return torch.cat([turned.real, turned.imag], -1)

    q, k = rotate(q), rotate(k)
    k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / size**0.5
    distance = places[:, None] - places[None, :]
    scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    x = x + residual * attended @ weights["layers.0.self_attn.o_proj.weight"].T
    y = norm(x, "layers.0.post_attention_layernorm.weight")
    gate, up = (y @ weights[f"layers.0.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + residual * (torch.nn.functional.silu(gate) * up) @ weights["layers.0.mlp.down_proj.weight"].T
