"""What every reader of files must hold for any bytes: it reads them rightly, or refuses them with an error of its own.

A target takes bytes and fails by raising. `run.py` drives targets with atheris, `test_readers.py` with hypothesis and with
the cases that were found.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import shutil
import struct
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors

from edged.checkpoint import awq, gptq, marlin
from edged.checkpoint.gguf_file import GgufFile, can_dequantize
from edged.checkpoint.gguf_llama import model_config, model_tensors
from edged.checkpoint.packed import Shape
from edged.checkpoint.safetensors_files import WeightFiles
from edged.checkpoint.safetensors_header import element_count
from edged.config_reader import ConfigFileError, parse_config
from edged.errors import CheckpointError
from edged.models.architecture import Architecture
from edged.models.weights import weight_parts, weight_specs

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_ELEMENTS = 1 << 20
"""Larger tensors are not read: reading a hole in a file is slow, and no fault."""


@functools.cache
def scratch() -> Path:
    """A folder for the files that are read, in memory where that can be; :func:`clean` removes it."""
    shared = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="edged-fuzz-", dir=shared if os.access(shared, os.W_OK) else None))


def clean() -> None:
    """Remove the scratch folder."""
    shutil.rmtree(scratch(), ignore_errors=True)
    scratch.cache_clear()


def _file(name: str, content: bytes) -> Path:
    path = scratch() / name
    path.write_bytes(content)
    return path


def read_safetensors(content: bytes) -> None:
    """Whatever is accepted is accepted by the format's own library, and read the same."""
    _file("model.safetensors", content)
    try:
        with WeightFiles.open(scratch()) as files:
            ours = {name: (files.info(name), files.read_array(name).tobytes()) for name in files.names()}
    except CheckpointError:
        return
    finally:
        (scratch() / "model.safetensors").unlink()
    deserialize: Any = safetensors.deserialize
    theirs = dict(deserialize(content))
    assert set(ours) == set(theirs)
    for name, (info, data) in ours.items():
        assert (info.dtype, list(info.shape)) == (theirs[name]["dtype"], list(theirs[name]["shape"]))
        assert data == bytes(theirs[name]["data"])


def read_index(content: bytes) -> None:
    """An index names files of its own folder that hold what it says."""
    folder = scratch() / "sharded"
    folder.mkdir(exist_ok=True)
    for name, tensor in (("one", "a"), ("two", "b")):
        header = json.dumps({tensor: {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}).encode()
        (folder / f"{name}.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"xy")
    (folder / "model.safetensors.index.json").write_bytes(content)
    try:
        with WeightFiles.open(folder) as files:
            names = files.names()
            assert set(names) <= {"a", "b"}
            assert all(files.info(name).file.parent == folder for name in names)
    except CheckpointError:
        pass


def read_gguf(content: bytes) -> None:
    """A container is read whole; one that is a model gives a configuration that the decoder's reader takes or refuses."""
    path = _file("m.gguf", content)
    try:
        with GgufFile(path) as file:
            for tensor in file.tensors.values():
                if element_count(tensor.shape) <= MOST_ELEMENTS and can_dequantize(tensor.type):
                    count = sum(rows.size for rows in file.read_rows(tensor))
                    assert count == element_count(tensor.shape)
            config = model_config(file)
            sources = model_tensors(file, config)
            assert all(source.tensor.shape == source.shape for source in sources.values())
            json.dumps(config, allow_nan=False)
            Architecture.from_config(config)
    except CheckpointError:
        pass


class Choices:
    """Takes decisions from bytes; zeros when they are used up."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 0

    @property
    def is_empty(self) -> bool:
        """Whether all bytes are used."""
        return self._at >= len(self._content)

    def take(self, count: int) -> bytes:
        """The next bytes."""
        piece = self._content[self._at : self._at + count]
        self._at += count
        return piece + bytes(count - len(piece))

    def below(self, limit: int) -> int:
        """A number below ``limit`` (at most 256)."""
        return self.take(1)[0] % limit


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 80,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
}
_TOP = (
    *LLAMA,
    "scale_emb",
    "scale_depth",
    "dim_model_base",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "rope_scaling",
    "rope_parameters",
    "quantization_config",
    "layer_types",
    "use_sliding_window",
    "original_max_position_embeddings",
    "partial_rotary_factor",
)
_ROPE = (
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "truncate",
    "mscale",
    "mscale_all_dim",
    "short_factor",
    "long_factor",
)
_QUANTIZATION = (
    "quant_method",
    "bits",
    "w_bit",
    "group_size",
    "q_group_size",
    "desc_act",
    "sym",
    "zero_point",
    "version",
    "checkpoint_format",
    "lm_head",
    "modules_to_not_convert",
    "modules_in_block_to_quantize",
    "dynamic",
)
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, 4, 8, 16, 32, 64, 96, 128, -1, 2**31, 2**63, 10**400, 0.0, 1.0, 0.5, 4.0, 1e-300,
    1e300, float("nan"), float("inf"), "", "llama", "minicpm", "qwen2", "qwen3", "silu", "default", "linear", "llama3",
    "yarn", "longrope", "gptq", "gptq_v2", "awq", "gemm", "lm_head", "mlp", [], [1.0] * 8, [2] * 32, ["mlp"], [["a"]], {},
)  # fmt: skip


def _value(choices: Choices, depth: int) -> Any:
    kind = choices.below(8)
    if kind == 0 and depth:
        keys = _ROPE if choices.below(2) else _QUANTIZATION
        return {
            keys[choices.below(len(keys))]: _value(choices, depth - 1) for _ in range(choices.below(6) + 1)
        }
    if kind == 1:
        return struct.unpack("<d", choices.take(8))[0]
    if kind == 2:
        return int.from_bytes(choices.take(3), "little", signed=True)
    if kind == 4:
        item = _VALUES[choices.below(len(_VALUES))]
        return [item] * (1, 2, 8, 32)[choices.below(4)]
    if kind == 3:
        return [struct.unpack("<f", choices.take(4))[0] for _ in range(choices.below(9))]
    return _VALUES[choices.below(len(_VALUES))]


def _config(content: bytes) -> dict[str, Any]:
    """A configuration: what a JSON object changes in a small Llama, or what other bytes decide."""
    if content[:1] == b"{":
        try:
            return {**LLAMA, **json.loads(content)}
        except (ValueError, RecursionError):
            return {}
    choices = Choices(content)
    config: dict[str, Any] = dict(LLAMA)
    if choices.below(2):
        config |= {"model_type": "minicpm", "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16}
    if choices.below(3) == 0:
        config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    while not choices.is_empty:
        config[_TOP[choices.below(len(_TOP))]] = _value(choices, 2)
    return config


def read_config(content: bytes) -> None:
    """A configuration is refused, or its weights and its rotary table can be made."""
    config = _config(content)
    try:
        architecture = Architecture.from_config(config)
        specs = weight_specs(architecture) if architecture.layers < 64 else ()
    except CheckpointError:
        return
    for spec in specs:
        assert all(math.prod(part.shape) > 0 for part in weight_parts(spec))
    if architecture.head_dim < 4096:
        for context in (64, 131072):
            table = architecture.rope.inverse_frequencies(architecture.head_dim, context)
            assert table.shape == (architecture.head_dim // 2,)
            assert np.isfinite(table).all()
    assert math.isfinite(architecture.rope.attention_factor)
    assert all(
        math.isfinite(scale) and scale > 0
        for scale in (architecture.embedding_scale, architecture.residual_scale, architecture.logit_divisor)
    )


def read_packed(content: bytes) -> None:
    """A 4-bit module of any content is refused, or gives every output once, with numbers that are numbers."""
    choices = Choices(content)
    layout = choices.below(3)
    shape = Shape(64 * (1 + choices.below(2)), 64, (16, 32, 64)[choices.below(3)])
    act_order = bool(choices.below(2))
    expected = (
        gptq.expected("m", shape, act_order=act_order),
        awq.expected("m", shape),
        marlin.expected("m", shape),
    )[layout]
    header: dict[str, Any] = {}
    data = b""
    for name, item in expected.items():
        dtype = item.dtypes[choices.below(len(item.dtypes))]
        size = element_count(item.shape) * {"I32": 4, "F16": 2, "BF16": 2, "F32": 4}[dtype]
        piece = choices.take(min(size, 1 + 4 * choices.below(256)))
        piece = (piece * (size // len(piece) + 1))[:size]
        if name.endswith("g_idx") and choices.below(2):
            piece = (np.arange(shape.inputs, dtype=np.int32) // shape.group).tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(item.shape),
            "data_offsets": [len(data), len(data) + size],
        }
        data += piece
    raw = json.dumps(header).encode()
    _file("model.safetensors", struct.pack("<Q", len(raw)) + raw + data)
    try:
        with WeightFiles.open(scratch()) as files:
            if layout == 0:
                module = gptq.read(files, "m", shape, act_order=act_order, zero_offset=1)
            else:
                module = awq.read(files, "m") if layout == 1 else marlin.read(files, "m", shape)
            held = np.zeros((shape.outputs, shape.inputs // 8), np.uint8)
            for output, word, packed in module.tiles:
                held[output : output + len(packed), word : word + packed.shape[1]] += 1
            assert (held == 1).all()
            assert np.isfinite(module.scales).all()
            assert module.zeros.max() < 16
            if module.order is not None:
                assert sorted(module.order.tolist()) == list(range(shape.inputs))
    except CheckpointError:
        pass
    finally:
        (scratch() / "model.safetensors").unlink()


def read_yaml(content: bytes) -> None:
    """The daemon's own configuration: every fault is told with its key."""
    with contextlib.suppress(ConfigFileError):
        parse_config(content.decode("utf-8", "replace"), folder=Path("/srv"))


TARGETS: dict[str, Callable[[bytes], None]] = {
    "safetensors": read_safetensors,
    "index": read_index,
    "gguf": read_gguf,
    "config": read_config,
    "packed": read_packed,
    "yaml": read_yaml,
}


def seeds(target: str) -> list[bytes]:
    """Good files, from which a fuzzer starts."""
    if target == "safetensors":
        header = {
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
            "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
            "c": {"dtype": "I32", "shape": [], "data_offsets": [32, 36]},
        }
        raw = json.dumps(header).encode()
        return [struct.pack("<Q", len(raw)) + raw + bytes(range(36))]
    if target == "index":
        return [json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}).encode()]
    if target == "gguf":
        return [_gguf_seed()]
    if target == "config":
        yarn = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 1e6}
        return [
            json.dumps(yarn).encode(),
            bytes([0, 1]),
            bytes([1, 1, 18, 0, 1, 5, 0, 4, 33]),
            bytes([0, 0, 20, 0, 0, 3, 3, 4, 7]),
        ]
    if target == "packed":
        return [bytes([layout, 1, 1, 1]) + bytes(range(64)) for layout in range(3)]
    return [
        b"models:\n  - {name: a, path: b, rope_scaling: {type: yarn, factor: 4}}\nmemory: {budget: 2GiB}\n",
        b"models: [{name: a, path: b, context_length: 64, attention: {mode: dense}}]\nlisten: {tcp: '[::1]:1'}\n",
    ]


def _gguf_seed() -> bytes:
    """The smallest model of architecture llama."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    numbers = {
        "context_length": 64,
        "block_count": 1,
        "embedding_length": 4,
        "feed_forward_length": 4,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
    }
    keys = [text("general.architecture") + struct.pack("<I", 8) + text("llama")]
    keys += [text(f"llama.{name}") + struct.pack("<II", 4, value) for name, value in numbers.items()]
    keys.append(text("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5))
    shapes = {
        "token_embd": (8, 4),
        "output_norm": (4,),
        "blk.0.attn_norm": (4,),
        "blk.0.attn_q": (4, 4),
        "blk.0.attn_k": (2, 4),
        "blk.0.attn_v": (2, 4),
        "blk.0.attn_output": (4, 4),
        "blk.0.ffn_norm": (4,),
        "blk.0.ffn_gate": (4, 4),
        "blk.0.ffn_up": (4, 4),
        "blk.0.ffn_down": (4, 4),
    }
    entries, data = [], b""
    for name, shape in shapes.items():
        dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        entries.append(text(f"{name}.weight") + dimensions + struct.pack("<IQ", 0, len(data)))
        data += bytes(4 * math.prod(shape))
        data += bytes(-len(data) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(entries), len(keys)) + b"".join(keys + entries)
    return head + bytes(-len(head) % 32) + data
