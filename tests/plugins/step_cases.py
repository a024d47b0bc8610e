"""Whole steps of one layer's attention: their arguments, what they should give, and prompts that are cut or replayed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from decode_cases import TOLERANCE, array, assert_same_pages, gpu, make_case, nothing_stored
from test_append import reference_of, tables

from plugins_trt.attention.contract import Attention, Layout
from plugins_trt.attention.launch import Attender
from plugins_trt.contract import SelectionRule
from plugins_trt.decode_attention.reference import attend
from plugins_trt.decode_selection.reference import block_scores, choose

if TYPE_CHECKING:
    from decode_cases import Case

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


def run(case, rule, **changes):
    rig = gpu()
    args, out = arguments(case, rule, rig.kernels.multiprocessors)
    attender_of(case)(replace(args, **changes), rig.stream)
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


def check_cuts(whole: Case, rule: SelectionRule | None) -> None:
    """A prompt gives the same rows and pages whatever pieces it comes in."""
    length = whole.tokens
    expected = run(whole, rule).float()
    for size in (64, 512, 2048):
        pages = nothing_stored(whole.pages)
        got = torch.empty_like(expected)
        for start in range(0, length, size):
            rows = slice(start, min(start + size, length))
            part = make_case(
                [(start, rows.stop - start)], tokens=size, max_pages=whole.tables.shape[1], device=str(whole.device),
                appended=False,
            )  # fmt: skip
            part.pages, part.tables = pages, whole.tables
            for name in ("q", "k", "v"):
                getattr(part, name)[: rows.stop - start] = getattr(whole, name)[rows]
            got[rows] = run(part, rule).float()[: rows.stop - start]
        assert_same_pages(pages, whole.pages, size)
        apart = (got - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
        assert float(apart.median()) < TOLERANCE["bfloat16"]
        # (Blocks whose scores are within rounding of each other may be swapped.)
        assert int((apart > 2 * TOLERANCE["bfloat16"]).sum()) <= length // 200


def check_replay(whole: Case, rule: SelectionRule, *, first: int) -> None:
    """One captured step, replayed for each token behind the ``first``, leaves and gives what one chunk does."""
    rig, steps = gpu(), whole.tokens - first
    chunk = run(whole, rule)  # what every token should leave, and see
    pages = nothing_stored(whole.pages)
    prompt = make_case([(0, first)], device="cuda", appended=False)
    rows = {name: getattr(whole, name)[:first].contiguous() for name in ("q", "k", "v")}
    run(replace(prompt, pages=pages, tables=whole.tables, **rows), rule)
    step = replace(make_case([(first, 1)], device="cuda", appended=False), pages=pages, tables=whole.tables)
    args, out = arguments(step, rule, rig.kernels.multiprocessors)
    lengths, positions = step.keep[-2:]  # the batch's, made last
    assert lengths.tolist() == positions.tolist() == [first]
    attender, stream = attender_of(step), torch.cuda.ExternalStream(rig.stream.handle)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        attender(args, rig.stream)
        lengths += 1
        positions += 1
    got = torch.empty(steps, whole.heads, whole.dim, device="cuda")
    with torch.cuda.stream(stream):
        for index in range(steps):
            for mine, all_of in ((step.q, whole.q), (step.k, whole.k), (step.v, whole.v)):
                mine.copy_(all_of[first + index : first + index + 1])
            graph.replay()
            got[index] = out[0]
        stream.synchronize()
    assert_same_pages(pages, whole.pages, "replayed")
    assert_rows_agree(got, chunk[first:].float(), "bfloat16")
