"""A tree is many chains: each node sees what it would see if its path had been decoded token by token."""

from dataclasses import replace

import pytest
import torch
from decode_cases import TOLERANCE, error, gpu, make_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_append import reference_of
from test_decode_attention import expected_output
from test_decode_attention import run as run_attention
from test_decode_selection import check as check_selection

from plugins_trt.append.reference import Pages
from plugins_trt.contract import SelectionRule
from plugins_trt.decode_attention.reference import attend
from plugins_trt.decode_selection.reference import block_scores, choose

RULE = SelectionRule(init_blocks=0, window=0, top_k=2, dense_below=0)


@st.composite
def trees(draw, most):
    """Parents of up to `most` nodes; often a long path, as drafts are."""
    nodes = draw(st.integers(1, most))
    return [-1] + [
        node - 1 if draw(st.booleans()) else draw(st.integers(0, node - 1)) for node in range(1, nodes)
    ]


def decoded(case, token, lse):
    """What the last token of a node's path sees, when the path is decoded as a chain over the same pages."""
    rule = replace(RULE, lse=lse)
    pages = Pages(*(pool.clone() for pool in vars(case.pages).values()))
    path = [node for node in range(64) if case.masks[token] >> node & 1]
    length = case.lengths[0]
    for depth, node in enumerate(path):
        step = make_case([(length + depth, 1)], heads=2, kv_heads=1, dim=64, dtype="float16", appended=False)
        rows = {name: getattr(case, name)[node : node + 1] for name in ("q", "k", "v")}
        step = replace(step, pages=pages, tables=case.tables, **rows)
        pages, appended = reference_of(step)
    place = {"length": length + len(path) - 1, "position": length + len(path) - 1}
    scores = block_scores(pages, appended.q[0], case.tables[0], rule=rule, **place)
    chosen = choose(scores, rule)
    return scores, attend(pages, appended.q[0], case.tables[0], chosen=chosen, **place)


@settings(max_examples=15, deadline=None)
@given(
    trees(20), st.sampled_from([0, 5, 20, 60, 110, 120, 127, 180]), st.sampled_from(["approximate", "exact"])
)
def test_a_node_sees_what_decoding_its_path_would_show(parents, length, lse):
    case = make_case(
        [(length, len(parents))],
        heads=2,
        kv_heads=1,
        dim=64,
        dtype="float16",
        parents=[parents],
        appended=False,
    )
    pages, appended = reference_of(case)
    token = len(parents) - 1
    place = {"length": length, "position": case.positions[token], "mask": case.masks[token]}
    scores = block_scores(
        pages,
        appended.q[token],
        case.tables[0],
        rule=replace(RULE, lse=lse),
        node_fine=appended.node_fine,
        node_coarse=appended.node_coarse,
        **place,
    )
    out = attend(pages, appended.q[token], case.tables[0], chosen=choose(scores, RULE), **place)
    expected_scores, expected = decoded(case, token, lse)
    assert torch.allclose(scores, expected_scores, rtol=1e-3, atol=1e-6)
    assert error(out, expected) < 1e-3


@pytest.mark.gpu
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(trees(64), st.integers(0, 400), st.sampled_from([0, 64]))
def test_any_tree_equals_the_reference(parents, length, window):
    assert gpu().kernels is not None
    case = make_case([(length, len(parents))], parents=[parents], tokens=64, device="cuda")
    assert error(run_attention(case), expected_output(case)) < TOLERANCE["bfloat16"]
    check_selection(case, SelectionRule(init_blocks=0, window=window, top_k=3, dense_below=0))
