"""EAGLE-3 drafts and heads for multi-token prediction: folders, and their forward written down plainly from the papers."""

from __future__ import annotations

import json

import numpy as np
import torch
from eagle_files import layer_shapes
from quantized_files import Integers, gptq_tensors
from safetensors.numpy import load_file, save_file

NAMES = {
    # fc, embedding's norm, hidden state's norm, attention's norm, norm before the head, in front of the layer's tensors
    "eagle3": ("fc", "midlayer.input_layernorm", "midlayer.hidden_norm", None, "norm", "midlayer."),
    "deepseek": (
        "model.layers.6.eh_proj",
        "model.layers.6.enorm",
        "model.layers.6.hnorm",
        "model.layers.6.input_layernorm",
        "model.layers.6.shared_head.norm",
        "model.layers.6.",
    ),
    "mimo": (
        "model.mtp_layers.0.input_proj",
        "model.mtp_layers.0.token_layernorm",
        "model.mtp_layers.0.hidden_layernorm",
        "model.mtp_layers.0.input_layernorm",
        "model.mtp_layers.0.final_layernorm",
        "model.mtp_layers.0.",
    ),
}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def tensors(kind, config, *, seed=0, biases=False, head_norms=False, own_tokens=None):
    """Random ones in the layout's spelling."""
    fc, embedding_norm, hidden_norm, attention_norm, final_norm, layer = NAMES[kind]
    r = np.random.default_rng(seed)
    h, size = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes = {
        f"{fc}.weight": (h, (3 if kind == "eagle3" else 2) * h),
        **layer_shapes(layer, config, inputs=2 * h if kind == "eagle3" else h),
    }
    norms = (embedding_norm, hidden_norm, attention_norm, final_norm)
    shapes |= {f"{name}.weight": (h,) for name in norms if name is not None}
    if biases:
        shapes |= {
            f"{layer}self_attn.{n}_proj.bias": (rows,) for n, rows in zip("qkv", (q, kv, kv), strict=True)
        }
    if head_norms:
        shapes |= {f"{layer}self_attn.{n}_norm.weight": (size,) for n in "qk"}
    made = {}
    for name, shape in shapes.items():
        values = r.standard_normal(shape)
        made[name] = (values / shape[-1] ** 0.5 if len(shape) > 1 else 1 + 0.2 * values).astype(np.float32)
    if kind == "eagle3":
        vocabulary = config["vocab_size"]
        ids = np.arange(vocabulary) if own_tokens is None else np.array(own_tokens)
        made["lm_head.weight"] = r.standard_normal((len(ids), h)).astype(np.float32) / 4
        if own_tokens is not None:
            made["d2t"] = ids - np.arange(len(ids))
            made["t2d"] = np.isin(np.arange(vocabulary), ids)
    return made


def write(folder, config, made, **changes):
    """A draft's folder; ``changes`` to its configuration, where None takes a key away."""
    folder.mkdir(exist_ok=True)
    whole = {**config, "num_hidden_layers": 1, **changes}
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in whole.items() if value is not None})
    )
    save_file({name: np.ascontiguousarray(each) for name, each in made.items()}, folder / "model.safetensors")


def add_to_model(folder, made):
    """The head in the target's own file, as such models are published."""
    file = folder / "model.safetensors"
    save_file({**load_file(file), **made}, file)


def in_four_bits(made, group=32, modules=LINEARS, seed=5):
    """The linears as GPTQ's tensors, and what these stand for."""
    r, packed, plain = np.random.default_rng(seed), {}, dict(made)
    for name, weight in made.items():
        module = name.removesuffix(".weight")
        if weight.ndim == 2 and module.rpartition(".")[2] in modules:
            linear = Integers(r, *weight.shape, group, scale=0.3 / weight.shape[1] ** 0.5)
            packed |= gptq_tensors(module, linear)
            plain[name] = linear.weight().astype(np.float32)
        else:
            packed[name] = weight
    return packed, plain


def enter(kind, made, states):
    """What stands for the target's hidden states: EAGLE-3 makes one of three (section 3.1), the others take it as it is."""
    return states @ torch.from_numpy(made["fc.weight"]).double().T if kind == "eagle3" else states


def forward(kind, made, config, *, embedding, tokens, hidden):
    """Outputs ``[n, H]`` of rows (hidden state at position i, token i + 1), and what the LM head and the next level see."""
    fc, embedding_norm, hidden_norm, attention_norm, final_norm, layer = NAMES[kind]
    w = {name: torch.from_numpy(each).double() for name, each in made.items() if each.dtype == np.float32}
    size, heads = config["head_dim"], config["num_attention_heads"]

    def norm(x, name):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config["rms_norm_eps"]) * w[f"{name}.weight"]

    e, h = norm(embedding[tokens].double(), embedding_norm), norm(hidden.double(), hidden_norm)
    if kind == "eagle3":
        x, y = hidden.double(), torch.cat([e, h], -1)
    else:
        x = torch.cat([h, e] if kind == "mimo" else [e, h], -1) @ w[f"{fc}.weight"].T
        y = norm(x, attention_norm)

    def project(name):
        made_of = y @ w[f"{layer}self_attn.{name}_proj.weight"].T
        return (made_of + w.get(f"{layer}self_attn.{name}_proj.bias", 0)).view(len(tokens), -1, size)

    q, k, v = (project(name) for name in "qkv")
    if f"{layer}self_attn.q_norm.weight" in w:
        q, k = norm(q, f"{layer}self_attn.q_norm"), norm(k, f"{layer}self_attn.k_norm")
    angles = torch.arange(len(tokens))[:, None] / config["rope_theta"] ** (
        torch.arange(0, size, 2).double() / size
    )
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def rotate(each):
        turned = torch.complex(*each.chunk(2, -1)) * turn
        return torch.cat([turned.real, turned.imag], -1)

    q, k = rotate(q), rotate(k)
    k, v = (each.repeat_interleave(heads // config["num_key_value_heads"], 1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / size**0.5
    scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
    x = (
        x
        + torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        @ w[f"{layer}self_attn.o_proj.weight"].T
    )
    y = norm(x, f"{layer}post_attention_layernorm")
    gate, up = (y @ w[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    x = x + (torch.nn.functional.silu(gate) * up) @ w[f"{layer}mlp.down_proj.weight"].T
    normed = norm(x, final_norm)
    return normed, normed if kind == "mimo" else x
