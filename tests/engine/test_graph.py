"""The emitted ONNX graph, held to the torch executor that runs the same definition."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from packed_inputs import MODELS as PACKED
from reference_attention import Attention, LayerPages
from safetensors.numpy import load_file
from small_models import CONFIGS, Sequences, graph_inputs, mask_words, write_model

from edged.config import AttentionConfig, ModelConfig
from edged.engine.graph import GraphSpec, emit, serialize
from edged.engine.held_weights import FILE, write_blank
from edged.engine.rope_tables import rope_tables
from edged.engine.selection import selection_of
from edged.errors import UnsupportedError
from edged.models.architecture import Architecture
from edged.models.weights import weight_specs
from plugins_trt.contract import SelectionRule

if TYPE_CHECKING:
    from pathlib import Path

CONTEXT = 256


class GraphRunner:
    """Runs the graph of a model folder with ONNX's reference evaluator."""

    def __init__(
        self,
        folder: Path,
        architecture: Architecture,
        pages: int,
        rule: SelectionRule | None = None,
        context: int = CONTEXT,
    ) -> None:
        self.pages = LayerPages(architecture.layers, pages, architecture.kv_heads, architecture.head_dim)
        tensors = load_file(folder / "model.safetensors")
        self.constants = {
            spec.name: np.concatenate([tensors[source.name] for source in spec.sources])
            for spec in weight_specs(architecture)
        }
        self.constants["rope_cosine"], self.constants["rope_sine"] = rope_tables(architecture, context)
        spec = GraphSpec(architecture, "float32", rule)
        self.constants.update({name: self.constants[source] for name, source in spec.aliases().items()})
        model = emit(spec)
        onnx.checker.check_model(model, full_check=True)
        self.evaluator = ReferenceEvaluator(model, new_ops=[Attention])

    def logits(self, inputs: dict[str, Any]) -> Any:
        LayerPages.current = self.pages
        outputs: list[Any] = list(self.evaluator.run(None, {**self.constants, **inputs}))
        return outputs[0]


@pytest.mark.parametrize("family", CONFIGS)
def test_the_graph_gives_the_logits_of_the_torch_executor(family: str, tmp_path: Path) -> None:
    from edged.executor.torch_executor import TorchExecutor

    architecture = write_model(tmp_path, family)
    config = ModelConfig(
        family, tmp_path, context_length=CONTEXT, max_sequences=3, prefill_chunk=CONTEXT, threads=1
    )
    executor = TorchExecutor(config)
    executor.load(lambda *_: None)
    graph = GraphRunner(tmp_path, architecture, executor.limits.pages)
    sequences = Sequences(3, CONTEXT // 64, architecture.vocabulary)
    # A long prompt and short ones; the long one goes on beside decoding; all decode; across a page's end.
    for new in ({0: 70, 1: 5, 2: 1}, {0: 57, 1: 1, 2: 1}, {0: 1, 1: 1, 2: 1}, {2: 3, 0: 1}, {1: 1}):
        batch = sequences.step(new)
        expected = executor.logits(batch)
        found = graph.logits(graph_inputs(batch))
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize("family", ["minicpm", "qwen3"])
def test_a_graph_that_chooses_few_blocks_gives_the_logits_of_the_torch_executor_that_does(
    family: str, tmp_path: Path
) -> None:
    from edged.executor.torch_executor import TorchExecutor

    architecture = write_model(tmp_path, family)
    attention = AttentionConfig(mode="sparse", dense_below=100, top_k=2, window=64, init_blocks=1)
    config = ModelConfig(
        family,
        tmp_path,
        context_length=448,
        max_sequences=2,
        prefill_chunk=256,
        threads=1,
        attention=attention,
    )
    executor = TorchExecutor(config)
    executor.load(lambda *_: None)
    rule = selection_of(tmp_path, attention)
    graph = GraphRunner(tmp_path, architecture, executor.limits.pages, rule, context=448)
    dense = GraphRunner(tmp_path, architecture, executor.limits.pages, context=448)
    sequences = Sequences(2, 7, architecture.vocabulary)
    for new in ({0: 200, 1: 30}, {0: 190, 1: 40}, {0: 1, 1: 1}, {1: 60, 0: 1}, {0: 1, 1: 1}):
        batch = sequences.step(new)
        inputs, expected = graph_inputs(batch), executor.logits(batch)
        np.testing.assert_allclose(
            graph.logits(inputs), expected, rtol=2e-4, atol=2e-4 * np.abs(expected).max()
        )
        without = dense.logits(inputs)
    assert np.abs(without - expected).max() > 1e-2 * np.abs(expected).max()
    executor.close()


def test_sparse_attention_that_chooses_every_block_gives_the_dense_logits_and_few_blocks_do_not(
    tmp_path: Path,
) -> None:
    architecture = write_model(tmp_path, "qwen3")
    steps = [{0: 120}, {0: 80, 1: 30}, {0: 1, 1: 1}]

    def run(rule: SelectionRule | None) -> list[Any]:
        graph = GraphRunner(tmp_path, architecture, 8, rule)
        sequences = Sequences(2, 4, architecture.vocabulary)
        return [graph.logits(graph_inputs(sequences.step(new))) for new in steps]

    dense = run(None)
    every = run(SelectionRule(init_blocks=1, window=64, top_k=8, dense_below=0))
    few = run(SelectionRule(init_blocks=0, window=0, top_k=1, dense_below=0))
    for mine, theirs in zip(every, dense, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    assert np.abs(few[2] - dense[2]).max() > 1e-2


def test_logits_do_not_depend_on_how_a_prompt_is_cut(tmp_path: Path) -> None:
    architecture = write_model(tmp_path, "llama")
    rule = SelectionRule(init_blocks=1, window=64, top_k=2, dense_below=150)

    def run(cuts: list[int]) -> Any:
        graph = GraphRunner(tmp_path, architecture, 4, rule)
        sequences = Sequences(1, 4, architecture.vocabulary)
        ids = np.random.default_rng(0).integers(0, architecture.vocabulary, 230).astype(np.int32)
        logits = None
        for size in cuts:
            first = sequences.lengths[0]
            inputs = graph_inputs(sequences.step({0: size}))
            inputs["token_ids"] = ids[first : first + size]
            inputs["logit_rows"] = np.array([size - 1], np.int32)
            logits = graph.logits(inputs)
        return logits

    whole = run([230])
    for cuts in ([100, 130], [64, 64, 64, 38], [229, 1]):
        np.testing.assert_allclose(run(cuts), whole, rtol=1e-4, atol=1e-5)


def test_padding_rows_and_empty_sequences_change_nothing(tmp_path: Path) -> None:
    architecture = write_model(tmp_path, "llama")
    graph = GraphRunner(tmp_path, architecture, 8)
    sequences = Sequences(2, 2, architecture.vocabulary)
    exact = graph_inputs(sequences.step({0: 5, 1: 2}))
    padded = {
        **exact,
        **{
            name: np.append(exact[name], [0]).astype(exact[name].dtype) for name in ("token_ids", "positions")
        },
        "tree_masks": np.vstack([exact["tree_masks"], [[0, 0]]]).astype(np.int32),
        "sequence_starts": np.append(exact["sequence_starts"], [7]).astype(np.int32),
        "lengths": np.append(exact["lengths"], [0]).astype(np.int32),
        "page_tables": np.vstack([exact["page_tables"], [[0, 0]]]).astype(np.int32),
    }
    np.testing.assert_allclose(graph.logits(padded), graph.logits(exact), rtol=1e-5, atol=1e-5)


def test_a_tree_gives_each_node_the_logits_of_its_own_path(tmp_path: Path) -> None:
    architecture = write_model(tmp_path, "qwen3")
    graph = GraphRunner(tmp_path, architecture, 4)
    sequences = Sequences(1, 2, architecture.vocabulary)
    graph.logits(graph_inputs(sequences.step({0: 9})))
    #     0
    #    / \
    #   1   2
    #   |   |
    #   3   4
    parents = {0: None, 1: 0, 2: 0, 3: 1, 4: 2}
    paths = {0: [0], 1: [0, 1], 2: [0, 2], 3: [0, 1, 3], 4: [0, 2, 4]}
    assert all(paths[node][-2:-1] == ([] if parent is None else [parent]) for node, parent in parents.items())
    tree = sequences.step({0: 5})
    ids = tree.token_ids.copy()
    inputs = graph_inputs(tree, [sum(1 << ancestor for ancestor in path) for path in paths.values()])
    inputs["positions"] = np.array([9 + len(path) - 1 for path in paths.values()], np.int32)
    inputs["logit_rows"] = np.arange(5, dtype=np.int32)
    found = graph.logits(inputs)
    for node, path in paths.items():
        chain = {
            **inputs,
            "token_ids": ids[path],
            "positions": np.arange(9, 9 + len(path), dtype=np.int32),
            "sequence_starts": np.array([0, len(path)], np.int32),
            "tree_masks": mask_words([(2 << depth) - 1 for depth in range(len(path))]),
            "logit_rows": np.array([len(path) - 1], np.int32),
        }
        np.testing.assert_allclose(found[node], graph.logits(chain)[0], rtol=1e-4, atol=1e-5)


def test_attention_nodes_carry_everything_a_plugin_needs() -> None:
    architecture = Architecture.from_config(CONFIGS["qwen3"])
    rule = SelectionRule(init_blocks=1, window=512, top_k=8, dense_below=1024, lse="exact")
    model = emit(GraphSpec(architecture, "bfloat16", rule))
    nodes = [node for node in model.graph.node if node.domain == "edged"]
    assert [node.op_type for node in nodes] == ["Attention"] * architecture.layers
    for layer, node in enumerate(nodes):
        attributes = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        assert attributes.pop("epsilon") == pytest.approx(1e-5)
        assert attributes == {
            "plugin_version": b"1",
            "plugin_namespace": b"edged",
            "layer": layer,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 32,
            "qk_norm": 1,
            "dense_below": 1024,
            "init_blocks": 1,
            "window": 512,
            "top_k": 8,
            "local_blocks": 9,
            "lse": b"exact",
        }
        assert list(node.input)[-2:] == [f"layers.{layer}.q_norm", f"layers.{layer}.k_norm"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_tensor_between_operators_has_the_graphs_dtype(dtype: str) -> None:
    architecture = Architecture.from_config(CONFIGS["minicpm"])
    model = onnx.shape_inference.infer_shapes(emit(GraphSpec(architecture, dtype)), strict_mode=True)
    onnx.checker.check_model(model, full_check=True)
    types = {value.name: value.type.tensor_type.elem_type for value in model.graph.value_info}
    wanted = getattr(onnx.TensorProto, dtype.upper())
    products = [node.output[0] for node in model.graph.node if node.op_type in ("Gemm", "Attention")]
    assert len(products) == architecture.layers * 5 + 1
    assert {types[name] for name in products} == {wanted}
    assert model.graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT


def test_a_tied_table_is_two_inputs_of_one_memory() -> None:
    spec = GraphSpec(Architecture.from_config(CONFIGS["llama"]), "float16")
    assert spec.aliases() == {"head": "embedding"}
    readers = [node.op_type for node in emit(spec).graph.node if "embedding" in node.input]
    assert readers == ["Gather"]
    assert GraphSpec(Architecture.from_config(CONFIGS["qwen3"]), "float16").aliases() == {}


def test_weights_are_inputs_and_the_file_holds_none() -> None:
    architecture = Architecture.from_config(CONFIGS["llama"])
    model = emit(GraphSpec(architecture, "float16"))
    inputs = {value.name for value in model.graph.input}
    assert {spec.name for spec in weight_specs(architecture)} <= inputs
    assert sum(len(tensor.raw_data) for tensor in model.graph.initializer) < 200


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_graph_with_constant_weights_gives_the_same_logits_and_holds_none(
    family: str, tmp_path: Path
) -> None:
    architecture = write_model(tmp_path, family)
    runner = GraphRunner(tmp_path, architecture, 4)
    batch = Sequences(2, 2, architecture.vocabulary).step({0: 9, 1: 3})
    expected = runner.logits(graph_inputs(batch))
    spec = GraphSpec(architecture, "float32", refitted=True)
    model = emit(spec)
    held = {each.name: each for each in spec.held}
    # The tied table of "llama" is read by rows, so it stays an input on both of its ways.
    parts = {f"layers.{i}.{part}" for i in range(3) for part in ("qkv", "output", "gate_up", "down")}
    assert set(held) == parts | ({"head"} if family == "qwen3" else set())
    assert not set(held) & {each.name for each in model.graph.input}
    places = sorted((each.offset, each.offset + each.nbytes) for each in held.values())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
    assert len(serialize(model)) < 100_000

    write_blank(tmp_path, spec.held)
    with (tmp_path / FILE).open("r+b") as file:
        for each in held.values():
            file.seek(each.offset)
            file.write(runner.constants.pop(each.name).astype(np.float32).tobytes())
    onnx.save(model, tmp_path / "graph.onnx")
    onnx.checker.check_model(tmp_path / "graph.onnx")
    runner.evaluator = ReferenceEvaluator(onnx.load(tmp_path / "graph.onnx"), new_ops=[Attention])
    np.testing.assert_allclose(runner.logits(graph_inputs(batch)), expected, rtol=1e-6, atol=1e-6)


def test_a_model_without_dense_products_cannot_be_refitted() -> None:
    config = {**PACKED["ternary"], "tie_word_embeddings": True}
    with pytest.raises(UnsupportedError, match="refit: every product of this model has packed weights"):
        GraphSpec(Architecture.from_config(config), "float16", refitted=True)


def test_equal_models_give_equal_bytes_and_different_ones_do_not() -> None:
    def key(family: str, dtype: str = "float16", rule: SelectionRule | None = None) -> bytes:
        return serialize(emit(GraphSpec(Architecture.from_config(CONFIGS[family]), dtype, rule)))

    assert key("llama") == key("llama")
    assert (
        len({key("llama"), key("llama", "bfloat16"), key("qwen2"), key("llama", rule=SelectionRule())}) == 4
    )


def test_an_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="dtype 'int8': a graph has one of float32, float16, bfloat16"):
        GraphSpec(Architecture.from_config(CONFIGS["llama"]), "int8")


def test_emitting_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from edged.engine.graph import GraphSpec, emit\n"
        "from edged.models.architecture import Architecture\n"
        f"emit(GraphSpec(Architecture.from_config({CONFIGS['minicpm']!r}), 'bfloat16'))\n"
        "loaded = {'torch', 'tensorrt', 'tensorrt_rtx', 'pycuda'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_graph_of_the_demo_model_gives_the_logits_of_the_torch_executor(demo_model: Path) -> None:
    from edged.executor.torch_executor import TorchExecutor

    executor = TorchExecutor(ModelConfig("demo", demo_model, context_length=CONTEXT, threads=1))
    executor.load(lambda *_: None)
    architecture = Architecture.read(demo_model)
    batch = Sequences(1, CONTEXT // 64, architecture.vocabulary).step({0: 12})
    expected = executor.logits(batch)
    executor.close()
    found = GraphRunner(demo_model, architecture, CONTEXT // 64).logits(graph_inputs(batch))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())
