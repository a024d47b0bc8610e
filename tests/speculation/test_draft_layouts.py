"""EAGLE-3 drafts, heads for multi-token prediction and drafts in 4 bits: held to the papers' formulas, lossless, refused by name."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from eagle_files import write_draft
from layout_files import add_to_model, enter, forward, in_four_bits, tensors, write
from requests_with_drafts import Job, answer_all
from test_eagle import eagle_speculator, run_prompt
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from edged.config import ModelConfig, SpeculationConfig
from edged.decoding.stops import Stops
from edged.errors import CheckpointError, UnsupportedError
from edged.executor.torch_executor import TorchExecutor
from edged.memory.buffers import ModelPlan
from edged.memory.model_rows import model_rows
from edged.models.architecture import Architecture

SIZES = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
CONFIG = {**SIZES, "model_type": "llama", "hidden_act": "silu", "rope_theta": 10000.0}
OWN = [3, 9, 17, 44, 60, 90, 120, 121, 200, 250]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A folder, and transformers' model of it, which says what enters each layer."""
    folder = tmp_path_factory.mktemp("target") / "model"
    torch.manual_seed(3)
    config = LlamaConfig(**SIZES, initializer_range=0.15)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    model.save_pretrained(folder)
    return folder, model


def load(folder, draft, method="eagle", dtype="float64", **speculation):
    executor = TorchExecutor(
        ModelConfig(
            name="m",
            path=folder,
            dtype=dtype,
            context_length=512,
            max_sequences=4,
            prefill_chunk=64,
            threads=1,
            speculation=SpeculationConfig(method, 16, draft=draft, **speculation),
        )
    )
    executor.load(lambda *_: None)
    return executor


# kind, tensors' options, configuration's changes, layers whose inputs it sees
KINDS = {
    "eagle3": ("eagle3", {}, {}, (2, 3, 3)),
    "eagle3 with its vocabulary": (
        "eagle3",
        {"own_tokens": OWN},
        {"draft_vocab_size": len(OWN), "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 5]}},
        (0, 1, 5),
    ),
    "deepseek": ("deepseek", {}, {}, ()),
    "deepseek, head norms": ("deepseek", {"head_norms": True}, {"num_hidden_layers": 6}, ()),
    "mimo, biases": ("mimo", {"biases": True}, {}, ()),
}


def check_tree(executor, kind, made, model, layers, *, config=CONFIG):
    """A path of three levels against the layer on whole sequences."""
    r = np.random.default_rng(1)
    tokens = r.integers(0, 257, 31).tolist()  # the last one is the root
    draft = executor.draft_model
    slot = draft.open()
    run_prompt(executor, tokens[:-1], slot, cut=20)
    tree = draft.start(slot, tokens)
    with torch.no_grad():
        found = model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    states = torch.cat([found[layer][0] for layer in layers], -1) if layers else found[-1][0]
    hidden = enter(kind, made, states)
    embedding = model.get_input_embeddings().weight.detach()
    own = "lm_head.weight" in made
    head = torch.from_numpy(made["lm_head.weight"]).double() if own else model.lm_head.weight.detach()
    ids = made["d2t"] + np.arange(len(made["d2t"])) if "d2t" in made else np.arange(257)
    path, node = [], -1
    for level in range(3):
        after = torch.tensor([*tokens[1:], *path])
        outs, fed = forward(kind, made, config, embedding=embedding, tokens=after, hidden=hidden)
        expected = (outs[-1] @ head.T).softmax(-1).topk(5)
        got = tree.likeliest(node, 5)
        assert got[0] == ids[expected.indices.numpy()].tolist(), level
        np.testing.assert_allclose(got[1], expected.values.numpy(), rtol=2e-4)
        hidden = torch.cat([hidden, fed[-1:]])
        path.append(got[0][1])
        tree.expand([level], [path[-1]], [node])
        node = level
    draft.close(slot)


@pytest.mark.parametrize("name", KINDS)
def test_a_tree_is_what_the_papers_formulas_say_of_each_path(name, target, tmp_path):
    folder, model = target
    kind, options, changes, layers = KINDS[name]
    made = tensors(kind, CONFIG, **options)
    write(tmp_path / "draft", CONFIG, made, **changes)
    executor = load(folder, tmp_path / "draft", "eagle" if kind == "eagle3" else "mtp")
    check_tree(executor, kind, made, model, layers)
    if name in ("eagle3 with its vocabulary", "mimo, biases"):
        jobs = [
            Job(np.random.default_rng(n).integers(0, 257, 5 + 20 * n).tolist(), Stops(24)) for n in range(5)
        ]
        expected = [one.tokens for one in answer_all(executor, jobs, together=1)]
        speculator = eagle_speculator(executor, 12)
        assert [one.tokens for one in answer_all(executor, jobs, speculator)] == expected
        assert speculator.drafted > 50


@pytest.mark.parametrize("kind", ["deepseek", "mimo"])
def test_a_head_in_the_models_own_files(kind, target, tmp_path):
    folder, model = target
    shutil.copytree(folder, tmp_path / "model")
    made = tensors(kind, CONFIG)
    shared = {"deepseek": {"model.layers.6.embed_tokens.weight": np.zeros((257, 64), np.float32)}, "mimo": {}}
    add_to_model(tmp_path / "model", {**made, **shared[kind]})
    check_tree(load(tmp_path / "model", None, "mtp"), kind, made, model, ())
    load(tmp_path / "model", None, "off").close()  # a model is served without its head, too


def test_a_model_of_the_family_mimo(tmp_path):
    """Qwen2's layers, whose biases are those of q, k and v, and a head with the same in the model's own file."""
    torch.manual_seed(4)
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    config = Qwen2Config(
        **{**sizes, "num_attention_heads": 2, "num_key_value_heads": 1}, initializer_range=0.15
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    model.save_pretrained(tmp_path / "model")
    known = {**CONFIG, "num_attention_heads": 2, "num_key_value_heads": 1}
    made = tensors("mimo", known, biases=True)
    add_to_model(tmp_path / "model", made)
    said = {**known, "model_type": "mimo", "attention_bias": True, "num_nextn_predict_layers": 1}
    (tmp_path / "model" / "config.json").write_text(json.dumps({**said, "tie_word_embeddings": False}))
    check_tree(load(tmp_path / "model", None, "mtp"), "mimo", made, model, (), config=known)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "deepseek"])
def test_drafts_in_four_bits(name, target, tmp_path):
    """GPTQ's integers stay packed in memory, and the draft says what the weights that they stand for say."""
    folder, model = target
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
    if name == "eagle":
        made = write_draft(tmp_path / "plain", CONFIG, minicpm=True)
        packed, plain = in_four_bits(
            made, modules=("fc", "q_proj", "k_proj", "v_proj", "o_proj", "down_proj")
        )
        write(tmp_path / "draft", CONFIG, packed, quantization_config=quantization)
        write(tmp_path / "wide", CONFIG, plain)
        executors = [load(folder, tmp_path / each, dtype="float32") for each in ("draft", "wide")]
        tokens = list(range(40))
        said = []
        for executor in executors:
            slot = executor.draft_model.open()
            run_prompt(executor, tokens[:-1], slot)
            said.append(executor.draft_model.start(slot, tokens).likeliest(-1, 20))
        assert said[0][0] == said[1][0]
        np.testing.assert_allclose(said[0][1], said[1][1], rtol=1e-4)
        packed_bytes, wide_bytes = (
            sum(
                each.nbytes
                for part, each in executor.buffers.items()
                if part.startswith("draft.") and "packed" not in part and part != "draft.kv"
            )
            for executor in executors
        )
        assert packed_bytes < 0.6 * wide_bytes  # gate and up are not packed here
        return
    packed, plain = in_four_bits(tensors(name, CONFIG))
    write(tmp_path / "draft", CONFIG, packed, quantization_config=quantization)
    executor = load(folder, tmp_path / "draft", "eagle" if name == "eagle3" else "mtp")
    check_tree(executor, name, plain, model, (2, 3, 3) if name == "eagle3" else ())


def test_the_ledger_counts_what_an_eagle3_draft_sees(target, tmp_path):
    write(tmp_path / "draft", CONFIG, tensors("eagle3", CONFIG))
    write_draft(tmp_path / "eagle", CONFIG)
    rows = []
    for name in ("draft", "eagle"):
        config = ModelConfig(
            name="m",
            path=target[0],
            context_length=512,
            prefill_chunk=256,
            speculation=SpeculationConfig("eagle", draft=tmp_path / name),
        )
        plan = ModelPlan.of(config, Architecture.of(config))
        rows.append({row.name: row.bytes for row in model_rows(plan)}["draft model"])
    states, attention, head = 257 * 3 * 64 * 4, 256 * 64 * 4, 257 * 64 * 4
    assert rows[0] - rows[1] > states + attention + head


def changed(made, **changes):
    return {name: each for name, each in {**made, **changes}.items() if each is not None}


# kind, tensors' options, changes to the tensors and to the configuration, method, what the refusal says
REFUSALS = {
    "fc": ("eagle3", {}, {"fc.weight": np.zeros((64, 128), np.float32)}, {}, "eagle", r"fc.weight is \[64, 128\] instead of \[64, 192\]"),
    "attention": ("eagle3", {}, {"midlayer.self_attn.q_proj.weight": np.zeros((128, 64), np.float32)}, {}, "eagle", r"q_proj.weight is \[128, 64\] instead of \[128, 128\]"),
    "no norm": ("eagle3", {}, {"norm.weight": None}, {}, "eagle", "norm.weight is missing"),
    "no head": ("eagle3", {}, {"lm_head.weight": None}, {}, "eagle", "lm_head.weight is missing"),
    "no map": ("eagle3", {"own_tokens": OWN}, {"d2t": None, "t2d": None}, {"draft_vocab_size": 10}, "eagle", "d2t is missing, and draft_vocab_size is 10"),
    "a token twice": ("eagle3", {"own_tokens": [3, 9, 9]}, {}, {"draft_vocab_size": 3}, "eagle", "token id 9 is in it more than once"),
    "a token outside": ("eagle3", {"own_tokens": [3, 257]}, {}, {"draft_vocab_size": 2}, "eagle", "token id 257 is outside the vocabulary"),
    "t2d": ("eagle3", {"own_tokens": OWN}, {"t2d": np.arange(257) < 10}, {"draft_vocab_size": 10}, "eagle", "t2d does not mark the tokens that d2t names"),
    "d2t's type": ("eagle3", {"own_tokens": OWN}, {"d2t": np.zeros(10, np.float32)}, {"draft_vocab_size": 10}, "eagle", "d2t is F32 instead of I64 or I32"),
    "d2t's length": ("eagle3", {"own_tokens": OWN}, {}, {"draft_vocab_size": 12}, "eagle", r"lm_head.weight is \[10, 64\] instead of \[12, 64\]"),
    "layers": ("eagle3", {}, {}, {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}, "eagle", r"\[1, 2, 6\] must name three layers of the target, which has 6"),
    "two layers": ("eagle3", {}, {}, {"eagle_aux_hidden_state_layer_ids": [1, 2]}, "eagle", "must name three layers"),
    "hidden size": ("eagle3", {}, {}, {"hidden_size": 128}, "eagle", "hidden_size gives 128 and the target has 64"),
    "a stray": ("eagle3", {}, {"midlayer.gate": np.zeros(3, np.float32)}, {}, "eagle", "midlayer.gate has no place in an EAGLE-3 draft"),
    "mtp's stray": ("deepseek", {}, {"model.layers.6.mlp.experts.0.up_proj.weight": np.zeros((3, 3), np.float32)}, {}, "mtp", "experts.0.up_proj.weight has no place in an MTP head"),
    "mtp's norm": ("mimo", {}, {"model.mtp_layers.0.final_layernorm.weight": None}, {}, "mtp", "mtp_layers.0.final_layernorm.weight is missing"),
    "one bias": ("mimo", {"biases": True}, {"model.mtp_layers.0.self_attn.k_proj.bias": None}, {}, "mtp", "q_proj, k_proj and v_proj come together"),
    "an mtp head as eagle": ("deepseek", {}, {}, {}, "eagle", "holds an MTP head, and speculation.method is eagle"),
    "eagle3 as mtp": ("eagle3", {}, {}, {}, "mtp", "holds no MTP head, and speculation.method is mtp"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_a_draft_that_does_not_fit_is_refused_at_load(name, target, tmp_path):
    kind, options, change, config, method, message = REFUSALS[name]
    write(tmp_path / "draft", CONFIG, changed(tensors(kind, CONFIG, **options), **change), **config)
    with pytest.raises(CheckpointError, match=message):
        load(target[0], tmp_path / "draft", method)


def test_a_model_without_a_head_is_refused_for_mtp(target):
    with pytest.raises(CheckpointError):
        load(target[0], None, "mtp")


@pytest.mark.parametrize("kind", ["eagle3", "deepseek", "biases"])
def test_a_gpu_is_refused_what_it_does_not_run(kind, target, tmp_path):
    if kind == "biases":
        made = write_draft(tmp_path / "draft", CONFIG)
        biases = {
            f"layers.0.self_attn.{n}_proj.bias": np.zeros(rows, np.float32)
            for n, rows in zip("qkv", (128, 64, 64), strict=True)
        }
        write(tmp_path / "draft", CONFIG, {**made, **biases})
    else:
        write(tmp_path / "draft", CONFIG, tensors(kind, CONFIG))
    config = ModelConfig(
        name="m",
        path=target[0],
        device="cuda",
        dtype="bfloat16",
        context_length=512,
        speculation=SpeculationConfig("mtp" if kind == "deepseek" else "eagle", draft=tmp_path / "draft"),
    )
    with pytest.raises(UnsupportedError, match="device cuda runs EAGLE and EAGLE-2 drafts"):
        ModelPlan.of(config, Architecture.of(config))


def test_a_token_map_beside_a_vocabulary_of_its_own_is_refused(target, tmp_path):
    write(tmp_path / "draft", CONFIG, tensors("eagle3", CONFIG))
    (tmp_path / "map.json").write_text("[1, 2]")
    with pytest.raises(CheckpointError, match="has a vocabulary of its own; remove token_map"):
        load(target[0], tmp_path / "draft", token_map=tmp_path / "map.json")


QUANTIZATION = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}


@pytest.mark.parametrize(
    ("quantization", "without", "message"),
    [
        (None, None, "in 4 bits, and config.json has no quantization_config"),
        ({**QUANTIZATION, "desc_act": True}, None, "desc_act is true, and 4-bit drafts"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, None, "quant_method is awq"),
        (QUANTIZATION, "midlayer.mlp.down_proj.scales", "down_proj.scales is missing"),
        ({**QUANTIZATION, "group_size": 16}, None, "instead of"),
    ],
)
def test_four_bits_that_are_not_read_are_refused(quantization, without, message, target, tmp_path):
    packed, _ = in_four_bits(tensors("eagle3", CONFIG))
    write(
        tmp_path / "draft",
        CONFIG,
        changed(packed, **({without: None} if without else {})),
        quantization_config=quantization,
    )
    with pytest.raises(CheckpointError, match=message):
        load(target[0], tmp_path / "draft")


def test_linears_of_one_product_are_packed_together(target, tmp_path):
    packed, _ = in_four_bits(tensors("eagle3", CONFIG), modules=("q_proj", "k_proj"))
    write(tmp_path / "draft", CONFIG, packed, quantization_config=QUANTIZATION)
    with pytest.raises(CheckpointError, match="of 3 linears that are one product here are in 4 bits"):
        load(target[0], tmp_path / "draft")
