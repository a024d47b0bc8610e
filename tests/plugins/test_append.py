import random
from dataclasses import replace

import pytest
import torch
from decode_cases import (
    Case,
    array,
    assert_same_pages,
    copy_of,
    error,
    gpu,
    make_case,
    nothing_stored,
    random_parents,
)

from plugins_trt.append import reference
from plugins_trt.append.contract import Append
from plugins_trt.append.launch import Appender
from plugins_trt.append.reference import Pages
from plugins_trt.commit.contract import Commit
from plugins_trt.commit.launch import Committer
from plugins_trt.commit.reference import commit
from plugins_trt.contract import LaunchError, check_batch_values

POSITIONS = 8192


def tables(dim, device):
    angles = torch.arange(POSITIONS, device=device)[:, None] / 10000 ** (
        torch.arange(dim // 2, device=device) * 2 / dim
    )
    return angles.cos(), angles.sin()


def arguments(case: Case, *, norms=None, fused=False):
    cosine, sine = tables(case.dim, case.device)
    q_out = torch.full_like(case.q, float("nan"))
    q, k, v = case.q, case.k, case.v
    if fused:  # one projection's output, its parts taken where they lie
        q, k, v = torch.cat([q, k, v], 1).split([case.heads, case.kv_heads, case.kv_heads], 1)
    case.node_fine.fill_(float("nan"))
    case.node_coarse.fill_(float("nan"))
    case.keep += [cosine, sine, q_out, q]
    return Append(
        batch=case.batch,
        arena=case.arena,
        layer=0,
        q=array(q),
        k=array(k),
        v=array(v),
        q_out=array(q_out),
        cosine=array(cosine),
        sine=array(sine),
        q_norm=None if norms is None else array(norms[0]),
        k_norm=None if norms is None else array(norms[1]),
        node_fine=array(case.node_fine),
        node_coarse=array(case.node_coarse),
    ), q_out


def run(case, **options):
    rig = gpu()
    args, q_out = arguments(case, **options)
    appender = Appender(
        rig.kernels.operator("append"),
        dtype=str(case.dtype).removeprefix("torch."),
        head_dim=case.dim,
        kv_dtype=case.kv_dtype,
    )
    appender(args, rig.stream)
    rig.stream.synchronize()
    return q_out


def reference_of(case, norms=None):
    """A copy of the pages with the step appended, and what else the reference gives."""
    pages = copy_of(case.pages)
    cosine, sine = tables(case.dim, case.device)
    q_norm, k_norm = norms or (None, None)
    positions = torch.tensor(case.positions + [0] * (case.tokens - len(case.positions)), device=case.device)
    result = reference.append(
        pages,
        case.q,
        case.k,
        case.v,
        sequence_starts=case.starts,
        lengths=case.lengths,
        page_tables=case.tables,
        positions=positions,
        cosine=cosine,
        sine=sine,
        q_norm=q_norm,
        k_norm=k_norm,
        tree_masks=case.masks,
    )
    return pages, result


def assert_pages_agree(got: Pages, expected: Pages, tolerance):
    for name, pool in vars(expected).items():
        mine = getattr(got, name)
        assert torch.equal(mine.isnan(), pool.isnan()), (
            f"{name}: written where it should not be, or not written"
        )
        assert error(mine.nan_to_num(), pool.nan_to_num()) < tolerance, name
    assert torch.equal(got.values.nan_to_num(), expected.values.nan_to_num())


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype"),
    [(32, 2, 128, "bfloat16"), (16, 2, 64, "float16"), (9, 3, 64, "bfloat16"), (8, 8, 128, "float16")],
)
def test_a_ragged_step_equals_the_reference(norm, heads, kv_heads, dim, dtype):
    for sequences, tokens in (
        [[(0, 300), (1000, 1), (0, 0), (15, 16), (127, 2), (130, 126)], 512],
        [[(63, 1)], 1],
        [[(127, 1), (1023, 1)], 4],
    ):
        case = make_case(
            sequences, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, tokens=tokens, device="cuda",
            appended=False,
        )  # fmt: skip
        norms = None
        if norm:
            norms = [1 + 0.3 * torch.randn(dim, device="cuda").to(case.dtype) for _ in range(2)]
        pages, result = reference_of(case, norms)
        out = run(case, norms=norms, fused=norm)
        assert error(out, result.q) < 2e-3
        assert not out[case.starts[-1] :].any()
        assert_pages_agree(case.pages, pages, 2e-3)


def check_cuts(whole, cuts, **options):
    """A prompt leaves the same pages whatever the sizes of its pieces, of which each of the cuts names some, in turn."""
    run(whole, **options)
    for sizes in cuts:
        done, index = 0, 0
        pages = nothing_stored(whole.pages)
        while done < whole.tokens:
            new = min(sizes[index % len(sizes)], whole.tokens - done)
            index += 1
            part = make_case(
                [(done, new)],
                kv_heads=whole.kv_heads,
                dim=whole.dim,
                device=str(whole.device),
                appended=False,
            )
            rows = {name: getattr(whole, name)[done : done + new] for name in ("q", "k", "v")}
            run(replace(part, pages=pages, tables=whole.tables, **rows), **options)
            done += new
        assert_same_pages(pages, whole.pages, sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_nothing_depends_on_how_a_prompt_is_cut(dim):
    whole = make_case([(0, 777)], kv_heads=2, dim=dim, device="cuda", appended=False)
    norms = [1 + 0.3 * torch.randn(dim, device="cuda").to(whole.dtype) for _ in range(2)]
    rng = random.Random(0)
    random_sizes = [rng.randrange(1, 90) for _ in range(50)]
    check_cuts(whole, ([64], [512], [1], [7, 100, 33, 1, 1, 1, 255], random_sizes), norms=norms)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [0, 14, 31, 63, 100, 127, 1000, 1023])
def test_an_accepted_path_leaves_what_decoding_it_token_by_token_leaves(length):
    rng = random.Random(length)
    for nodes, depth_first in ((64, 1.0), (64, 0.9), (20, 0.7)):
        parents = random_parents(nodes, rng, depth_first)
        case = make_case([(length, nodes)], parents=[parents], device="cuda", appended=False, seed=nodes)
        before = Pages(*(pool.clone() for pool in vars(case.pages).values()))
        expected, result = reference_of(case)
        run(case)
        assert_pages_agree(case.pages, expected, 2e-3)
        for name, step in (("node_fine", 16), ("node_coarse", 64)):
            span = 32 if step == 16 else 128
            complete = [t for t, p in enumerate(case.positions) if p % step == step - 1 and p >= span - 1]
            nodes_of = getattr(case, name)
            if complete:
                assert error(nodes_of[complete], getattr(result, name)[complete]) < 2e-3

        deepest = max(range(nodes), key=lambda node: case.positions[node])
        path = [node for node in range(nodes) if case.masks[deepest] >> node & 1]
        path = path[: rng.randrange(1, len(path) + 1)]
        rig = gpu()
        args = Commit(
            batch=case.batch,
            arena=case.arena,
            paths=case.int32([path + [0] * (64 - len(path))]),
            accepted=case.int32([len(path)]),
        )
        Committer(rig.kernels.operator("commit"), dtype="bfloat16", head_dim=128)(args, rig.stream)
        rig.stream.synchronize()

        one_by_one = make_case([(length, nodes)], device="cuda", appended=False)
        one_by_one.pages, one_by_one.tables = before, case.tables
        for depth, node in enumerate(path):
            part = make_case([(length + depth, 1)], device="cuda", appended=False)
            part.pages, part.tables = before, case.tables
            part.q, part.k, part.v = (x[node : node + 1] for x in (case.q, case.k, case.v))
            run(part)
        end = length + len(path)
        for name, rows in (("keys", 1), ("values", 1), ("fine", 16), ("coarse", 64)):
            slots = torch.arange(end // rows, device="cuda") * rows + rows - 1
            where = case.tables[0][slots // 64].long()
            mine, theirs = (
                getattr(pages, name)[where, :, slots % 64 // rows] for pages in (case.pages, before)
            )
            assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0)), (nodes, name)


def test_the_references_of_append_and_commit_agree():
    case = make_case([(50, 30)], parents=[list(range(-1, 29))], heads=4, dim=64, appended=False)
    pages, _ = reference_of(case)
    commit(pages, lengths=[50], page_tables=case.tables, paths=[list(range(30))])
    chain = make_case([(50, 30)], heads=4, dim=64, appended=False)
    assert torch.equal(chain.k, case.k)
    expected, _ = reference_of(chain)
    for name, pool in vars(expected).items():
        got = getattr(pages, name)
        assert torch.equal(got.isnan(), pool.isnan())
        assert error(got.nan_to_num(), pool.nan_to_num()) < 4e-3


def test_arguments_are_refused_by_name():
    case = make_case([(100, 2)], appended=False)
    args, _ = arguments(case)
    good = dict(vars(args))

    def refused(**changes):
        with pytest.raises(LaunchError) as caught:
            Append(**{**good, **changes})
        return str(caught.value)

    assert refused(k=array(case.k[:1])).startswith("k: shape")
    assert refused(k=array(case.k.half())).startswith("k: dtype float16")
    assert refused(v=array(case.v.transpose(0, 1))).startswith("v: ")
    assert refused(cosine=array(torch.zeros(10, 32))).startswith("cosine: shape")
    assert refused(cosine=array(torch.zeros(127, 64)), sine=array(torch.zeros(127, 64))).startswith(
        "cosine: 127 positions, but page_tables of 2 pages"
    )
    assert refused(q_norm=array(torch.zeros(64))).startswith("q_norm: dtype")
    with pytest.raises(LaunchError, match=r"^layer: 3"):
        case.arena.pack(3)
    row = [[0, 1, 2]]
    with pytest.raises(
        LaunchError, match=r"^lengths: sequence 0 stores 190 \+ 3 tokens, which takes 4 pages"
    ):
        check_batch_values([0, 3], [190], row, tokens=4, pages=9)
    with pytest.raises(LaunchError, match=r"^page_tables: entry 2 of sequence 0 is page 2"):
        check_batch_values([0, 1], [190], row, tokens=1, pages=2)
    with pytest.raises(LaunchError, match=r"^sequence_starts: runs from 0 to 5"):
        check_batch_values([0, 5], [0], row, tokens=4, pages=9)
