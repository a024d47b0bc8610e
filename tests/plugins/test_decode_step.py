"""One layer's attention as a step calls it: append, choose, select and attend."""

import random

import pytest
import torch
from decode_cases import TOLERANCE, array, error, gpu, make_case, random_parents
from test_append import assert_pages_agree, reference_of, tables

from plugins_trt.append.reference import Pages
from plugins_trt.attention.contract import Attention, Layout
from plugins_trt.attention.launch import Attender
from plugins_trt.contract import LaunchError, SelectionRule
from plugins_trt.decode_attention.reference import attend
from plugins_trt.decode_selection.reference import block_scores, choose

H200 = 132


def arguments(case, rule, multiprocessors=H200):
    layout = Layout.of(
        case.bucket(multiprocessors),
        rule,
        trees=case.masks is not None,
        quantized=case.kv_dtype is not None,
    )
    workspace = torch.full((layout.total // 4,), float("nan"), device=case.device)
    out = torch.full_like(case.q, float("nan"))
    arrived = torch.zeros(len(case.lengths), case.kv_heads, dtype=torch.int32, device=case.device)
    cosine, sine = tables(case.dim, case.device)
    case.keep += [workspace, arrived, cosine, sine]
    return Attention(
        batch=case.batch,
        arena=case.arena,
        layer=0,
        q=array(case.q),
        k=array(case.k),
        v=array(case.v),
        out=array(out),
        cosine=array(cosine),
        sine=array(sine),
        workspace=array(workspace),
        arrived=array(arrived),
        rule=rule,
    ), out


def attender_of(case):
    rig = gpu()
    dtype = str(case.dtype).removeprefix("torch.")
    return Attender(
        rig.kernels,
        dtype=dtype,
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.dim,
        kv_dtype=case.kv_dtype,
    )


def run(case, rule):
    rig = gpu()
    args, out = arguments(case, rule, rig.kernels.multiprocessors)
    attender_of(case)(args, rig.stream)
    rig.stream.synchronize()
    return out


def expected_of(case, rule):
    """Every row by the references, from the pages that the reference of `append` leaves."""
    pages, appended = reference_of(case)
    out = torch.zeros(case.tokens, case.heads, case.dim, device=case.device)
    for token, sequence, position, mask in case.queries():
        place = {"length": case.lengths[sequence], "position": position, "mask": mask}
        chosen = None
        if rule is not None and position + 1 >= rule.dense_below:
            scores = block_scores(
                pages,
                appended.q[token],
                case.tables[sequence],
                rule=rule,
                start=case.starts[sequence],
                node_fine=appended.node_fine,
                node_coarse=appended.node_coarse,
                **place,
            )
            chosen = choose(scores, rule)
        out[token] = attend(pages, appended.q[token], case.tables[sequence], chosen=chosen, **place)
    return pages, out


def assert_rows_agree(out, expected, dtype):
    """Nearly all rows: a block whose score is within rounding of the last one in may be swapped, in a few."""
    rows = (out - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1).clamp(min=1e-6)
    assert not rows.isnan().any()
    assert float(rows.median()) < TOLERANCE[dtype]
    assert int((rows > 2 * TOLERANCE[dtype]).sum()) <= len(rows) // 20


RULE = SelectionRule(init_blocks=1, window=128, top_k=8, dense_below=700)
GENEROUS = SelectionRule(init_blocks=1, window=128, top_k=200, dense_below=0)


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
def test_sparse_equals_dense_when_every_block_is_selected():
    for sequences, tokens in (([(5000, 1)], 1), ([(5000, 9)], 16)):
        outs = [
            run(make_case(sequences, tokens=tokens, device="cuda", appended=False), rule)
            for rule in (None, GENEROUS)
        ]
        assert error(outs[1], outs[0]) < 5e-3


@pytest.mark.gpu
def test_a_graph_replayed_over_a_thousand_tokens_keeps_the_compressed_keys_complete():
    rig = gpu()
    first, steps = 200, 1000
    whole = make_case([(0, first + steps)], device="cuda", appended=False)
    rule = SelectionRule(window=128, top_k=8, dense_below=512)
    chunk = run(whole, rule)  # what every token should leave, and see

    prompt = make_case([(0, first)], device="cuda", appended=False)
    pages = Pages(*(torch.full_like(pool, float("nan")) for pool in vars(whole.pages).values()))
    prompt.pages, prompt.tables = pages, whole.tables
    prompt.q, prompt.k, prompt.v = (x[:first].contiguous() for x in (whole.q, whole.k, whole.v))
    run(prompt, rule)

    step = make_case([(first, 1)], device="cuda", appended=False)
    step.pages, step.tables = pages, whole.tables
    args, out = arguments(step, rule, rig.kernels.multiprocessors)
    lengths, positions = step.keep[-2:]  # the batch's, made last
    assert lengths.tolist() == positions.tolist() == [first]
    attender = attender_of(step)
    stream = torch.cuda.ExternalStream(rig.stream.handle)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        attender(args, rig.stream)
        lengths += 1
        positions += 1
    got = torch.empty(steps, 32, 128, device="cuda")
    with torch.cuda.stream(stream):
        for index in range(steps):
            for mine, all_of in ((step.q, whole.q), (step.k, whole.k), (step.v, whole.v)):
                mine.copy_(all_of[first + index : first + index + 1])
            graph.replay()
            got[index] = out[0]
        stream.synchronize()
    for name, pool in vars(pages).items():
        assert torch.equal(pool.nan_to_num(7.0), getattr(whole.pages, name).nan_to_num(7.0)), name

    assert_rows_agree(got, chunk[first:].float(), "bfloat16")


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
