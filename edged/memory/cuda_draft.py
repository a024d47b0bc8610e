"""What a draft model holds on a GPU beside its target: its weights, keys and values of a window, and a tree's growth.

Its keys and values lie in pages of its own, which a sequence uses in turn: page p of a sequence is its p modulo the pages it
has. Its hidden states come in two places of one buffer: rows of the last step, and behind them the last ones of each
sequence that no draft has taken yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edged.errors import UnsupportedError
from edged.memory.draft_plan import DRAFT
from edged.memory.packed_scratch import MULTIPROCESSORS, product_workspace
from edged.memory.specs import PAGE_TOKENS, BufferSpec
from edged.models.cuda_weights import CudaPacked
from plugins_trt.contract import MAX_DECODE, MAX_TREE, Bucket, LaunchError, ceil_div, check_heads, round_up
from plugins_trt.decode_attention.contract import workspace_bytes
from plugins_trt.draft_input.contract import window_blocks
from plugins_trt.draft_tree.contract import parts_of, pool_size
from plugins_trt.skinny_linear.contract import STEP

if TYPE_CHECKING:
    from edged.memory.buffers import ModelPlan
    from edged.memory.draft_plan import DraftPlan

_SPARE_PAGES = 3
"""Pages beyond the window: that of the first of 64 rows, of the last of them, and of the tree behind them."""

TAKEN = (1, 2, 4, 8, 16, 32, 64)
"""Rows of stored tokens that a captured run takes."""


@dataclass(frozen=True)
class DraftSizes:
    """Numbers that buffers and graphs share.

    Attributes:
        width: Children of a node, and nodes of a level that go on.
        levels: Levels of a tree.
        nodes: Rows of a tree that run: all levels but the last.
        blocks: Pages that a row attends to.
        pages: Pages of a sequence.
        table: Entries of its page table.
        ring: Hidden states that wait of a sequence.
        vocabulary: Columns of the draft's logits.
    """

    width: int
    levels: int
    nodes: int
    blocks: int
    pages: int
    table: int
    ring: int
    vocabulary: int

    @classmethod
    def of(cls, plan: ModelPlan) -> DraftSizes:
        """The sizes of a plan that has a draft."""
        draft = plan.draft
        assert draft is not None, "asked of a plan with a draft"  # noqa: S101
        vocabulary = plan.architecture.vocabulary if draft.token_map is None else len(draft.token_map)
        blocks = window_blocks(draft.window)
        return cls(
            width=draft.width,
            levels=draft.levels,
            nodes=draft.width * (draft.levels - 1),
            blocks=blocks,
            pages=blocks + _SPARE_PAGES,
            table=plan.pages_per_sequence,
            ring=round_up(draft.window, PAGE_TOKENS),
            vocabulary=vocabulary,
        )


@dataclass(frozen=True)
class DraftLayout:
    """Where the data of a run lies, in 32-bit words: up to 64 rows of stored tokens, and where the tree begins."""

    token_ids: int  # int32 [64]; -1 in padding
    hidden_rows: int  # int32 [64]
    positions: int  # int32 [64]
    masks: int  # uint64 [64]
    starts: int  # int32 [2]
    lengths: int  # int32 [1], rows before the run
    tree_lengths: int  # int32 [1], rows before the tree
    root_row: int  # int32 [1], the last of the run
    table: int  # int32 [table]
    words: int

    @classmethod
    def of(cls, sizes: DraftSizes) -> DraftLayout:
        """The layout of a plan's runs."""
        places = [0]
        for size in (MAX_DECODE, MAX_DECODE, MAX_DECODE, 2 * MAX_DECODE, 2, 1, 1, 1, sizes.table):
            places.append(round_up(places[-1] + size, 4))
        return cls(*places)


def draft_packed(draft: DraftPlan) -> tuple[CudaPacked, ...]:
    """The draft's weights in 4 bits, by the names of their buffers."""
    found = (CudaPacked.of(replace(spec, name=f"draft.{spec.name}")) for spec in draft.eagle.specs)
    return tuple(each for each in found if each is not None)


def hidden_rows(plan: ModelPlan, step_rows: int) -> int:
    """Rows of the buffer of the target's final hidden states: a step's, and those that wait for a draft."""
    return step_rows if plan.draft is None else step_rows + plan.max_sequences * DraftSizes.of(plan).ring


def check_cuda_draft(name: str, plan: ModelPlan) -> None:
    """Refuse a draft that the kernels do not run.

    Args:
        name: The model's, for messages.
        plan: Its plan, which has a draft.

    Raises:
        UnsupportedError: Names the key and what would do.
    """
    draft = plan.draft
    assert draft is not None, "asked of a plan with a draft"  # noqa: S101
    a, sizes = draft.eagle.layer, DraftSizes.of(plan)
    if sizes.nodes > MAX_TREE:
        raise UnsupportedError(
            f"model {name}: depth {sizes.levels} and width {sizes.width} run {sizes.nodes} nodes of a tree, on device "
            f"cuda at most {MAX_TREE}: set depth to at most {1 + MAX_TREE // sizes.width}",
            field="speculation.depth",
        )
    if sizes.vocabulary < sizes.width:
        raise UnsupportedError(
            f"model {name}: token_map has {sizes.vocabulary} tokens and width is {sizes.width}: on device cuda it takes as "
            "many",
            field="speculation.token_map",
        )
    try:
        check_heads(a.heads, a.kv_heads, a.head_dim)
    except LaunchError as error:
        raise UnsupportedError(
            f"model {name}: its draft on device cuda: {error}; set device to cpu", field="speculation.draft"
        ) from None
    for packed in draft_packed(draft):
        try:
            packed.check()
        except LaunchError as error:
            raise UnsupportedError(
                f"model {name}: the 4-bit weight {packed.name.removeprefix('draft.')} of its draft does not run on device "
                f"cuda: {error}; set device to cpu",
                field="speculation.draft",
            ) from None
    for key, size, multiple in (("hidden_size", a.hidden, STEP), ("intermediate_size", a.intermediate, 8)):
        if size % multiple:
            raise UnsupportedError(
                f"model {name}: its draft on device cuda: {key} {size} is no multiple of {multiple}; set device to cpu",
                field="speculation.draft",
            )


def cuda_draft_buffers(plan: ModelPlan, draft: DraftPlan) -> tuple[BufferSpec, ...]:
    """Everything of the draft but the hidden states that wait, which are the target's buffer `normed`."""
    a, sizes, dtype = draft.eagle.layer, DraftSizes.of(plan), plan.dtype
    rows, width, levels = MAX_DECODE, sizes.width, sizes.levels
    parts, pool = parts_of(sizes.vocabulary), pool_size(width, levels)
    arena = (1, plan.max_sequences * sizes.pages, a.kv_heads)
    workspace = workspace_bytes(
        Bucket(
            tokens=rows,
            sequences=1,
            heads=a.heads,
            kv_heads=a.kv_heads,
            head_dim=a.head_dim,
            max_pages=sizes.table,
            multiprocessors=MULTIPROCESSORS,
        )
    )

    def spec(name: str, *shape: int, dtype: str = dtype) -> BufferSpec:
        return BufferSpec(f"draft.{name}", DRAFT, shape, dtype)

    packed = {each.name: each for each in draft_packed(draft)}
    weights = []
    for each in draft.eagle.specs:
        form = packed.get(f"draft.{each.name}")
        if form is None:
            weights.append(spec(each.name, *each.shape))
        else:
            weights += [BufferSpec(part.name, DRAFT, part.shape, part.dtype) for part in form.parts]
    scratch = max(
        (
            product_workspace(each.ternary, each.outputs, each.inputs, count)
            for each in packed.values()
            for count in (*TAKEN, width)
        ),
        default=0,
    )
    if scratch:
        weights.append(spec("packed_workspace", round_up(scratch, 16), dtype="uint8"))
    if draft.token_map is not None:
        weights += [spec("head", sizes.vocabulary, a.hidden), spec("map", sizes.vocabulary, dtype="int32")]
    if draft.own_angles(plan.architecture):
        positions = sizes.table * PAGE_TOKENS
        weights += [spec(each, positions, a.head_dim // 2, dtype="float32") for each in ("cosine", "sine")]
    return (
        *weights,
        spec("keys", *arena, PAGE_TOKENS, a.head_dim),
        spec("values", *arena, PAGE_TOKENS, a.head_dim),
        spec("unread", 2, a.head_dim),
        spec("step", DraftLayout.of(sizes).words, dtype="int32"),
        spec("starts", levels, 2, dtype="int32"),
        spec("one_token", MAX_TREE + 1, dtype="int32"),
        spec("rows", rows, 2 * a.hidden),
        spec("outs", rows + MAX_TREE, a.hidden),
        spec("root", 1, a.hidden),
        spec("normed", rows, a.hidden),
        spec("qkv_out", rows, a.qkv_width),
        spec("queries", rows, a.q_width),
        spec("attended", rows, a.q_width),
        spec("branch", rows, a.hidden),
        spec("gate_up_out", rows, 2 * a.intermediate),
        spec("activated", rows, a.intermediate),
        spec("nodes", 2, rows, a.kv_heads, a.head_dim),
        spec("blocks", rows, a.kv_heads, sizes.blocks, dtype="int32"),
        spec("counts", rows, a.kv_heads, dtype="int32"),
        spec("workspace", ceil_div(workspace, 16) * 16, dtype="uint8"),
        spec("logits", width, sizes.vocabulary, dtype="float32"),
        spec("candidates", width, parts, width, dtype="int64"),
        spec("statistics", width, parts, 2, dtype="float32"),
        spec("pool", 3 * pool, dtype="int32"),
        spec("frontier", 2 * width, dtype="int32"),
        spec("next", 3 * levels * width, dtype="int32"),
        spec("next_masks", levels * width, dtype="int64"),
    )
