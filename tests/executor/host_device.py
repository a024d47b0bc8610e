"""A device of the CUDA executor that is this machine's CPU: the kernels' references, on the pointers they are given.

Everything of the executor but the kernels, the copies and the graphs runs as it does on a GPU: buckets, padding, the
data of a step, pages, gathers, sampling.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import torch
from host_draft import HostDraft
from host_memory import masks_of, pages_of, tensor_of
from host_sample import sample_of

from edged.executor.cuda_device import StepKernels
from plugins_trt.append.reference import QuantizedPages, append
from plugins_trt.argmax.reference import argmax
from plugins_trt.chunk_attention.reference import chunk_attention
from plugins_trt.chunk_selection.reference import chunk_selection
from plugins_trt.commit.reference import commit
from plugins_trt.decode_attention.reference import attend
from plugins_trt.decode_selection.reference import block_scores, choose
from plugins_trt.embedding.reference import embedding
from plugins_trt.quantized.reference import dequantize
from plugins_trt.rms_norm.reference import rms_norm
from plugins_trt.silu_mul.reference import silu_mul
from plugins_trt.skinny_linear.reference import skinny_gated, skinny_linear
from plugins_trt.ternary_linear.contract import TernaryLinear, TernaryWiden
from plugins_trt.ternary_linear.reference import ternary_linear
from plugins_trt.ternary_linear.reference import widen_rows as widen_ternary_rows
from plugins_trt.verify_tree.reference import verify_tree
from plugins_trt.w4a16_linear.reference import w4a16_linear
from plugins_trt.w4a16_widen.reference import widen_rows


def attend_to_trees(args, pages, appended, masks):
    """Every node over its own path, dense or by its own choice of blocks."""
    batch, rule = args.batch, args.rule
    starts, lengths = tensor_of(batch.sequence_starts).tolist(), tensor_of(batch.lengths).tolist()
    tables, positions = tensor_of(batch.page_tables), tensor_of(batch.positions).tolist()
    out = torch.zeros_like(appended.q)
    for sequence, (start, end) in enumerate(pairwise(starts)):
        for token in range(start, end):
            place = {"length": lengths[sequence], "position": positions[token], "mask": masks[token]}
            query, table, chosen = appended.q[token], tables[sequence], None
            if rule is not None and positions[token] + 1 >= rule.dense_below:
                nodes = {"node_fine": appended.node_fine, "node_coarse": appended.node_coarse}
                chosen = choose(
                    block_scores(pages, query, table, rule=rule, start=start, **nodes, **place), rule
                )
            out[token] = attend(pages, query, table, chosen=chosen, **place).to(out.dtype)
    return out


def _weights_of(args, *before):
    groups = args.scales if hasattr(args, "scales") else args.groups
    return (*before, args.tiles, groups)


class HostDevice:
    torch_device = torch.device("cpu")
    multiprocessors = 132

    def __init__(self):
        self.captured = 0

    def scope(self):
        return nullcontext()

    def host_words(self, count):
        return np.zeros(count, np.int32)

    def upload(self, target, source):
        target.copy_(torch.from_numpy(source))

    def download(self, target, source):
        target[:] = source.view(torch.int32).numpy()

    def capture(self, work):
        work()
        self.captured += 1
        return work

    def mark(self):
        return self.synchronize

    def synchronize(self):
        pass

    def close(self):
        pass

    def kernels(self, plan):
        def embed(args):
            tensor_of(args.out).copy_(embedding(tensor_of(args.ids), tensor_of(args.table), args.scale))

        def norm(args):
            branch = None if args.branch is None else tensor_of(args.branch)
            residual = tensor_of(args.residual)
            new, out = rms_norm(
                residual, tensor_of(args.weight), branch, scale=args.scale, epsilon=args.epsilon
            )
            residual.copy_(new)
            tensor_of(args.out).copy_(out)

        def multiply(args):
            tensor_of(args.out).copy_(silu_mul(tensor_of(args.gate), tensor_of(args.up)))

        def best(args):
            tensor_of(args.ids).copy_(argmax(tensor_of(args.logits)))

        def linear(args):
            out = tensor_of(args.out)
            bias = None if args.bias is None else tensor_of(args.bias)
            x, weight = tensor_of(args.x), tensor_of(args.weight)
            out.copy_(skinny_linear(x, weight, bias, scale=args.scale, dtype=out.dtype))

        def gated(args):
            bias = None if args.bias is None else tensor_of(args.bias)
            tensor_of(args.out).copy_(skinny_gated(tensor_of(args.x), tensor_of(args.weight), bias))

        return StepKernels(
            embed, norm, multiply, self.attention, best, linear, gated, sample_of(tensor_of), self.packed, self.widen,
            self.verify, self.commit,
        )  # fmt: skip

    def draft_kernels(self, plan):
        assert plan.draft is not None
        return HostDraft(self.packed).kernels

    @staticmethod
    def verify(args):
        starts, masks = tensor_of(args.batch.sequence_starts).tolist(), masks_of(args.batch)
        tokens, targets = tensor_of(args.token_ids), tensor_of(args.targets)
        given = [0] * args.batch.sequences if args.given is None else tensor_of(args.given).tolist()
        for sequence, (start, end) in enumerate(pairwise(starts)):
            if start == end or given[sequence] < 0:
                path = []
            elif given[sequence]:
                path = list(range(given[sequence]))
            else:
                path = verify_tree(tokens[start:end], targets[start:end], masks[start:end])
            tensor_of(args.paths)[sequence, : len(path)] = torch.tensor(path, dtype=torch.int32)
            tensor_of(args.accepted)[sequence] = len(path)

    @staticmethod
    def commit(args):
        accepted = tensor_of(args.accepted).tolist()
        paths = [path[:count] for path, count in zip(tensor_of(args.paths).tolist(), accepted, strict=True)]
        for layer in range(args.arena.layers):
            commit(
                pages_of(args.arena, layer),
                lengths=tensor_of(args.batch.lengths).tolist(),
                page_tables=tensor_of(args.batch.page_tables),
                paths=paths,
            )

    @staticmethod
    def packed(args):
        args.plan(HostDevice.multiprocessors)  # refuses a workspace that is too small
        if args.workspace is not None:
            tensor_of(args.workspace).fill_(0xFF)
        product = ternary_linear if isinstance(args, TernaryLinear) else w4a16_linear
        found = product(
            *(tensor_of(each) for each in _weights_of(args, args.x)),
            outputs=args.out.shape[1],
            bias=None if args.bias is None else tensor_of(args.bias),
            gated=args.gated,
        )
        tensor_of(args.out).copy_(found)

    @staticmethod
    def widen(args):
        rows = {"outputs": args.outputs, "first": args.first, "rows": args.rows, "gated": args.gated}
        weights = [tensor_of(each) for each in _weights_of(args)]
        if isinstance(args, TernaryWiden):
            found = widen_ternary_rows(*weights, inputs=args.inputs, **rows)
        else:
            found = widen_rows(*weights, **rows)
        tensor_of(args.out).copy_(found)

    @staticmethod
    def attention(args):
        args.layout(HostDevice.multiprocessors)
        tensor_of(args.workspace).fill_(0xFF)  # NaN, whatever it is read as
        pages = pages_of(args.arena, args.layer)
        starts, tables = tensor_of(args.batch.sequence_starts), tensor_of(args.batch.page_tables)
        positions = tensor_of(args.batch.positions)
        masks = masks_of(args.batch)
        if args.all_sparse:  # the kernels would leave the dense ones out
            assert (positions[: int(starts[-1])] + 1 >= args.rule.dense_below).all()

        def norm(array):
            return None if array is None else tensor_of(array)

        appended = append(
            pages,
            tensor_of(args.q),
            tensor_of(args.k),
            tensor_of(args.v),
            sequence_starts=starts.tolist(),
            lengths=tensor_of(args.batch.lengths).tolist(),
            page_tables=tables,
            positions=positions,
            cosine=tensor_of(args.cosine),
            sine=tensor_of(args.sine),
            q_norm=norm(args.q_norm),
            k_norm=norm(args.k_norm),
            epsilon=args.epsilon,
            tree_masks=masks,
        )
        if masks is not None:
            tensor_of(args.out).copy_(attend_to_trees(args, pages, appended, masks))
            return
        chosen = None
        if args.rule is not None:
            chosen, _ = chunk_selection(
                appended.q,
                positions,
                fine=pages.fine,
                coarse=pages.coarse,
                sequence_starts=starts,
                page_tables=tables,
                rule=args.rule,
            )
        keys, values = pages.keys, pages.values
        if isinstance(pages, QuantizedPages):
            keys, values = dequantize(keys, pages.key_scales), dequantize(values, pages.value_scales)
        out = chunk_attention(
            appended.q,
            positions,
            keys=keys,
            values=values,
            sequence_starts=starts,
            page_tables=tables,
            chosen=chosen,
            dense_below=None if args.rule is None else args.rule.dense_below,
        )
        tensor_of(args.out).copy_(out)
