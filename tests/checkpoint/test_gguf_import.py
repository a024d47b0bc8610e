"""GGUF files become model folders that others load the same; what is not supported is refused before any writing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from test_gguf_import_refusals import config_of
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from edged.checkpoint.gguf_import import import_gguf
from edged.checkpoint.gguf_llama import head_order
from edged.checkpoint.safetensors_files import WeightFiles
from edged.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path


# Its classes have no types.
LlamaConfig: Any = transformers.LlamaConfig
LlamaForCausalLM: Any = transformers.LlamaForCausalLM
Kind = gguf.GGMLQuantizationType
HEAD_DIM = 64


def permuted(weights: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter does to q and k: the two halves of each head are interleaved."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    interleaved: np.ndarray[Any, Any] = halves.swapaxes(1, 2).reshape(weights.shape)
    return interleaved


def random_model(recipe: Any, **options: Any) -> tuple[Any, Any]:
    """A random model of transformers, and the same as llama.cpp would write it."""
    torch.manual_seed(0)
    vocabulary = len(recipe.metadata["tokenizer.ggml.tokens"])
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=HEAD_DIM,
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
            max_position_embeddings=4096,
            **options,
        )
    ).eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    recipe.tensors = {}
    for name, tensor in model.state_dict().items():
        stem, suffix = name.rsplit(".", 1)
        if options.get("tie_word_embeddings") and stem == "lm_head":
            continue
        if suffix == "bias":
            torch.nn.init.normal_(tensor)
        array = tensor.numpy()
        if ".q_proj." in name:
            array = permuted(array, 4)
        elif ".k_proj." in name:
            array = permuted(array, 2)
        recipe.tensors[f"{names.get_name(stem)}.{suffix}"] = array
    return model, recipe


def test_demo_weights_equal_those_of_transformers_bit_for_bit(demo_reference: Any, demo_model: Path) -> None:
    weights = load_file(demo_model / "model.safetensors")
    expected = demo_reference.state_dict()
    expected.pop("lm_head.weight")  # tied
    assert set(weights) == set(expected)
    assert config_of(demo_model)["tie_word_embeddings"] is True
    for name, weight in weights.items():
        assert torch.equal(weight, expected[name]), name


def test_demo_configuration(demo_model: Path) -> None:
    config = config_of(demo_model)
    assert (config["rms_norm_eps"], config["rope_theta"], config["max_position_embeddings"]) == (
        1e-5,
        100000.0,
        8192,
    )
    generation = json.loads((demo_model / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "pad_token_id": 2, "eos_token_id": [2, 0]}
    assert transformers.GenerationConfig.from_pretrained(demo_model).eos_token_id == [2, 0]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("biases", [True, False])
def test_a_random_model_comes_back_from_llama_cpps_layout(
    tmp_path: Path, recipe: Any, tied: bool, biases: bool
) -> None:
    model, recipe = random_model(recipe, tie_word_embeddings=tied, attention_bias=biases, mlp_bias=biases)
    import_gguf(recipe.write(tmp_path / "m.gguf"), tmp_path / "model")
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    ids = torch.arange(7)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_head_order_undoes_the_permutation() -> None:
    rows = np.arange(4 * 10)
    assert np.array_equal(permuted(rows, 4)[head_order(40, 4)], rows)


WIDE = [f"blk.{layer}.{name}.weight" for layer in range(2) for name in ("attn_q", "attn_k", "ffn_down")]
NAMES = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "ffn_down": "mlp.down_proj"}
SUPPORTED = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K TQ1_0 TQ2_0".split()  # noqa: SIM905


@pytest.mark.parametrize("name", SUPPORTED)
def test_tensor_types_are_dequantized_as_by_the_gguf_library(tmp_path: Path, recipe: Any, name: str) -> None:
    kind = Kind.__members__[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(1)
    expected: dict[str, np.ndarray[Any, Any]] = {}
    for tensor in WIDE:
        rows, columns = recipe.tensors[tensor].shape
        if kind is Kind.F32:
            packed: np.ndarray[Any, Any] = recipe.tensors[tensor]
        elif kind is Kind.F16:
            packed = recipe.tensors[tensor].astype(np.float16)
        else:
            # Any bytes are a block; only the scales, which are float16 or BF16, must not be NaN or infinite.
            packed = generator.integers(0, 256, (rows, columns // block * size), np.uint8)
            with np.errstate(all="ignore"):
                values = gguf.dequantize(packed, kind).reshape(rows, -1, block)
            bad = ~np.isfinite(values).all(axis=2)
            packed.reshape(rows, -1, size)[bad] = 0
        recipe.tensors[tensor] = packed
        recipe.types[tensor] = kind
        expected[tensor] = gguf.dequantize(packed, kind)
    import_gguf(recipe.write(tmp_path / "m.gguf"), tmp_path / "model")
    with WeightFiles.open(tmp_path / "model") as files:
        for tensor, values in expected.items():
            _, layer, short, _ = tensor.split(".")
            got = files.read_array(f"model.layers.{layer}.{NAMES[short]}.weight")
            heads = {"attn_q": 4, "attn_k": 2}.get(short)
            assert np.array_equal(permuted(got, heads) if heads else got, values), tensor


def test_a_tensor_of_many_chunks_is_whole(
    tmp_path: Path, recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edged.checkpoint.gguf_file._CHUNK_ELEMENTS", 1000)
    import_gguf(recipe.write(tmp_path / "m.gguf"), tmp_path / "model")
    with WeightFiles.open(tmp_path / "model") as files:
        query = files.read_array("model.layers.1.self_attn.q_proj.weight")
        assert np.array_equal(permuted(query, 4), recipe.tensors["blk.1.attn_q.weight"])
        embedding = files.read_array("model.embed_tokens.weight")
        assert np.array_equal(embedding, recipe.tensors["token_embd.weight"])


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_narrow_dtypes_are_rounded_as_by_torch(
    tmp_path: Path, recipe: Any, dtype: str, torch_dtype: torch.dtype
) -> None:
    source = recipe.write(tmp_path / "m.gguf")
    import_gguf(source, tmp_path / "wide")
    import_gguf(source, tmp_path / "narrow", dtype=dtype)
    assert config_of(tmp_path / "narrow")["torch_dtype"] == dtype
    wide, narrow = (
        load_file(tmp_path / "wide/model.safetensors"),
        load_file(tmp_path / "narrow/model.safetensors"),
    )
    assert {tensor.dtype for tensor in narrow.values()} == {torch_dtype}
    for name, tensor in wide.items():
        assert torch.equal(tensor.to(torch_dtype), narrow[name]), name


def rope_of(folder: Path) -> tuple[np.ndarray[Any, Any], float]:
    """Inverse frequencies and attention factor as transformers reads them from the written configuration."""
    config = LlamaConfig.from_pretrained(folder)
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        return 1.0 / (500000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)), 1.0
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies.numpy(), factor


PLAIN = 1.0 / (500000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM))


def test_linear_rope(tmp_path: Path, recipe: Any) -> None:
    recipe.metadata |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    import_gguf(recipe.write(tmp_path / "m.gguf"), tmp_path / "model")
    frequencies, factor = rope_of(tmp_path / "model")
    assert np.allclose(frequencies, PLAIN / 4, rtol=1e-6)
    assert factor == 1.0


def test_yarn_rope(tmp_path: Path, recipe: Any) -> None:
    recipe.metadata |= {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 1024,
    }
    import_gguf(recipe.write(tmp_path / "m.gguf"), tmp_path / "model")
    frequencies, factor = rope_of(tmp_path / "model")
    assert np.isclose(factor, 0.1 * np.log(4) + 1)
    assert np.isclose(frequencies[0], PLAIN[0])
    assert np.isclose(frequencies[-1], PLAIN[-1] / 4)
    recipe.metadata["llama.rope.scaling.attn_factor"] = 0.5
    import_gguf(recipe.write(tmp_path / "m.gguf"), tmp_path / "half")
    assert np.isclose(rope_of(tmp_path / "half")[1], 0.5 * (0.1 * np.log(4) + 1))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_is_recognized(tmp_path: Path, recipe: Any, factor: float) -> None:
    rule = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        rope_theta=500000.0,
        rope_scaling=dict(rule),
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    recipe.tensors["rope_freqs.weight"] = (PLAIN / frequencies.double().numpy()).astype(np.float32)
    import_gguf(recipe.write(tmp_path / "m.gguf"), tmp_path / "model")
    assert config_of(tmp_path / "model")["rope_scaling"] == rule
    assert np.allclose(rope_of(tmp_path / "model")[0], frequencies.numpy(), rtol=1e-6)


def test_other_frequency_factors_are_kept_as_they_are(tmp_path: Path, recipe: Any) -> None:
    factors = np.linspace(1.0, 7.0, HEAD_DIM // 2, dtype=np.float32)
    recipe.tensors["rope_freqs.weight"] = factors
    import_gguf(recipe.write(tmp_path / "m.gguf"), tmp_path / "model")
    frequencies, attention = rope_of(tmp_path / "model")
    assert np.allclose(frequencies, PLAIN / factors, rtol=1e-6)
    assert attention == 1.0


def test_longrope(tmp_path: Path, recipe: Any) -> None:
    recipe.tensors["rope_factors_long.weight"] = np.linspace(1.0, 60.0, HEAD_DIM // 2, dtype=np.float32)
    recipe.tensors["rope_factors_short.weight"] = np.linspace(1.0, 2.0, HEAD_DIM // 2, dtype=np.float32)
    recipe.metadata |= {
        "llama.rope.scaling.original_context_length": 1024,
        "llama.rope.scaling.attn_factor": 1.25,
    }
    import_gguf(recipe.write(tmp_path / "m.gguf"), tmp_path / "model")
    frequencies, attention = rope_of(tmp_path / "model")
    assert np.allclose(frequencies, PLAIN / recipe.tensors["rope_factors_short.weight"], rtol=1e-6)
    assert attention == 1.25


def test_sampling_defaults_are_carried_over(tmp_path: Path, recipe: Any) -> None:
    recipe.metadata |= {
        "general.sampling.temp": 0.7,
        "general.sampling.top_k": 20,
        "general.sampling.top_p": 0.95,
    }
    import_gguf(recipe.write(tmp_path / "m.gguf"), tmp_path / "model")
    generation = json.loads((tmp_path / "model/generation_config.json").read_text())
    assert (generation["temperature"], generation["top_k"], generation["top_p"]) == (0.7, 20, 0.95)
    assert generation["do_sample"] is True


def test_numbers_that_are_given_for_each_layer(tmp_path: Path, recipe: Any) -> None:
    recipe.metadata |= {"llama.attention.head_count_kv": [2, 2], "llama.feed_forward_length": [512, 512]}
    import_gguf(recipe.write(tmp_path / "m.gguf"), tmp_path / "model")
    assert config_of(tmp_path / "model")["num_key_value_heads"] == 2
    recipe.metadata["llama.feed_forward_length"] = [512, 256]
    with pytest.raises(CheckpointError, match=r"llama\.feed_forward_length differs"):
        import_gguf(recipe.write(tmp_path / "m.gguf"), tmp_path / "other")


def test_a_written_folder_can_be_read_by_others(tmp_path: Path, recipe: Any) -> None:
    import_gguf(recipe.write(tmp_path / "m.gguf"), tmp_path / "model")
    expected = [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert sorted(entry.name for entry in (tmp_path / "model").iterdir()) == expected
    (tmp_path / "probe").touch()
    wanted = (tmp_path / "probe").stat().st_mode & 0o666
    for entry in (tmp_path / "model").iterdir():
        assert entry.stat().st_mode & 0o666 == wanted, entry
    assert (tmp_path / "model").stat().st_mode & 0o444 == wanted & 0o444
