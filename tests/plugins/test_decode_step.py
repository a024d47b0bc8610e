"""One layer's attention as a step calls it: append, choose, select and attend."""

import random

import pytest
import torch
from decode_cases import array, error, make_case, random_parents
from step_cases import GENEROUS, H200, RULE, arguments, assert_rows_agree, check_replay, expected_of, run
from test_append import assert_pages_agree

from plugins_trt.attention.contract import Attention
from plugins_trt.contract import LaunchError, SelectionRule


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", [(32, 2, 128), (16, 2, 64)])
@pytest.mark.parametrize("rule", [None, RULE, GENEROUS])
@pytest.mark.parametrize(
    "step",
    [
        ([(2900, 1)], 1),
        ([(698, 1)], 1),
        ([(699, 1)], 1),
        ([(1023, 1), (690, 20), (100, 3)], 32),
        ([(600, 200)], 256),
    ],
)
def test_a_step_equals_the_references(dtype, layout, rule, step):
    heads, kv_heads, dim = layout
    sequences, tokens = step
    case = make_case(
        sequences, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, tokens=tokens, device="cuda",
        appended=False,
    )  # fmt: skip
    pages, expected = expected_of(case, rule)
    out = run(case, rule)
    assert_pages_agree(case.pages, pages, 2e-3)
    assert_rows_agree(out.float(), expected, dtype)
    assert not out[case.starts[-1] :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("rule", [None, RULE, GENEROUS])
def test_a_tree_step_equals_the_references(rule):
    rng = random.Random(1)
    parents = [random_parents(40, rng, 0.9), random_parents(20, rng, 0.5)]
    case = make_case([(1000, 40), (690, 20)], parents=parents, tokens=64, device="cuda", appended=False)
    _, expected = expected_of(case, rule)
    assert_rows_agree(run(case, rule).float(), expected, "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [(40, 20), (9, 3)])
def test_a_step_without_dense_queries_attends_to_the_blocks_that_it_chose(nodes):
    """The scratch memory is poisoned: blocks that are read before all are chosen lie nowhere."""
    rng = random.Random(2)
    parents = [random_parents(count, rng, 0.7) for count in nodes]
    sequences = [(1000, nodes[0]), (790, nodes[1])]
    case = make_case(sequences, parents=parents, tokens=sum(nodes), device="cuda", appended=False)
    out = run(case, RULE, all_sparse=True)
    _, expected = expected_of(case, RULE)
    assert_rows_agree(out.float(), expected, "bfloat16")
    assert torch.equal(out, run(case, RULE))


@pytest.mark.gpu
def test_sparse_equals_dense_when_every_block_is_selected():
    for sequences, tokens in (([(5000, 1)], 1), ([(5000, 9)], 16)):
        outs = [
            run(make_case(sequences, tokens=tokens, device="cuda", appended=False), rule)
            for rule in (None, GENEROUS)
        ]
        assert error(outs[1], outs[0]) < 5e-3


@pytest.mark.gpu
def test_a_graph_replayed_over_a_thousand_tokens_keeps_the_compressed_keys_complete():
    whole = make_case([(0, 1200)], device="cuda", appended=False)
    check_replay(whole, SelectionRule(window=128, top_k=8, dense_below=512), first=200)


def test_a_layout_keeps_its_parts_apart_and_arguments_are_refused_by_name():
    case = make_case([(100, 1)], appended=False)
    args, _ = arguments(case, RULE)
    layout = args.layout(H200)
    places = list(vars(layout).values())
    assert places == sorted(places)
    assert all(place % 256 == 0 for place in places)
    good = dict(vars(args))

    def refused(**changes):
        with pytest.raises(LaunchError) as caught:
            Attention(**{**good, **changes}).layout(H200)
        return str(caught.value)

    assert refused(workspace=array(torch.zeros(100))).startswith("workspace: 400 bytes")
    assert refused(out=array(case.q.float())).startswith("out: dtype")
    assert refused(arrived=None).startswith("arrived: missing")
    assert refused(rule=None, all_sparse=True).startswith("all_sparse: True")
