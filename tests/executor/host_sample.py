"""What stands in for the sampling kernel where there is no GPU: its reference, on the pointers of a launch."""

import numpy as np
import torch

from plugins_trt.sample.reference import SMALLEST_TEMPERATURE, draw, draw_with_terms
from plugins_trt.sample.rows import LOGPROBS, ROW, UNIT, Terms


def sample_of(tensor_of):
    """The operator; `tensor_of` gives the memory of a device array."""

    def sample(args):
        if args.options is not None:
            sample_with_options(args)
            return
        temperatures, ids = tensor_of(args.temperatures), tensor_of(args.ids)
        warm = temperatures >= SMALLEST_TEMPERATURE
        if warm.any():
            ids[warm] = draw(
                tensor_of(args.logits)[warm],
                temperatures=temperatures[warm],
                top_ks=tensor_of(args.top_ks)[warm].long(),
                top_ps=tensor_of(args.top_ps)[warm],
                numbers=tensor_of(args.numbers)[warm],
            ).int()

    def sample_with_options(args):
        options, logits, ids = args.options, tensor_of(args.logits), tensor_of(args.ids)
        entries, masks = tensor_of(options.entries).numpy(), tensor_of(options.masks).numpy()
        rows = tensor_of(options.rows).numpy().view(ROW)[:, 0]
        records = tensor_of(options.logprobs).numpy().view(LOGPROBS)[:, 0]
        temperatures = tensor_of(args.temperatures).tolist()
        for row, words in enumerate(rows):
            if not words["draws"] and temperatures[row] < SMALLEST_TEMPERATURE:
                continue
            terms = terms_of(words, entries, masks) if words["draws"] else Terms()
            drawn = draw_with_terms(
                logits[row],
                terms,
                temperature=temperatures[row],
                top_k=int(tensor_of(args.top_ks)[row]),
                top_p=float(tensor_of(args.top_ps)[row]),
                number=float(tensor_of(args.numbers)[row]),
            )
            ids[row] = drawn.token_id
            if terms.logprobs >= 0 and drawn.token_id >= 0:
                raw, record = logits[row], records[row]
                record["chosen"], record["largest"] = raw[drawn.token_id], raw.max()
                record["total"] = int(float(torch.exp(raw - raw.max()).double().sum()) * UNIT)
                record["ids"][: terms.logprobs] = drawn.top_ids
                record["values"][: terms.logprobs] = raw[drawn.top_ids]
            if words["draws"]:
                logits[row] = torch.nan  # the kernel changes them

    return sample


def terms_of(words, entries, masks):
    """The terms of one row, read back."""

    def part(first, end):
        return entries[words[first] : words[end], 0].astype(np.int64), entries[words[first] : words[end], 1]

    bias_ids, biases = part("biases", "seen")
    answered, counts = part("answered", "forbidden")
    return Terms(
        min_p=float(words["min_p"]),
        typical_p=float(words["typical_p"]),
        repetition=float(words["repetition"]),
        presence=float(words["presence"]),
        frequency=float(words["frequency"]),
        bias_ids=bias_ids,
        biases=biases.copy().view(np.float32),
        seen=part("seen", "answered")[0],
        answered=answered,
        counts=counts.astype(np.int64),
        forbidden=part("forbidden", "last")[0],
        mask=None if words["mask"] < 0 else masks[words["mask"]].tobytes(),
        logprobs=int(words["logprobs"]),
    )
