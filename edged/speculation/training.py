"""Trains an EAGLE draft for a model on the model's own continuations (self-distillation).

Pieces of text, requests about them and what the model asks itself are prompts; the model goes on from them, and its final norm's
outputs over prompt and answer are what the draft sees. From the output at a position and the token after it the draft foresees the
next token's distribution (cross entropy with the model's own), level by level on its own outputs as a tree is drafted
(:mod:`edged.speculation.eagle_layer`). EAGLE's loss on the outputs themselves (smooth L1) is left out, as EAGLE-3 does
(arXiv 2503.01840). What was made is kept beside the destination, so a run that was stopped goes on.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from edged.checkpoint.chat_template import ChatTemplate
from edged.checkpoint.tokenizer import Tokenizer
from edged.errors import CheckpointError
from edged.executor.torch_batch import BatchModel, device_of
from edged.models.architecture import Architecture
from edged.speculation.draft_files import first_weights_of, write_draft
from edged.speculation.draft_loss import distribution_loss
from edged.speculation.eagle_layer import EagleLevels, first_weights
from edged.speculation.self_text import continue_prompts, hidden_states, sequences_together
from edged.speculation.token_rank import most_frequent
from edged.speculation.training_data import TrainingData
from edged.speculation.training_plan import HELD_OUT, TrainingPlan
from edged.speculation.training_prompts import Prompts, asked, chat_frame, make_prompts
from edged.speculation.training_step import Batch, TrainingStep
from edged.whole_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import numpy.typing as npt

    Weights = Mapping[str, torch.Tensor]
    Progress = Callable[[str, int, int], None]
    Tokens = npt.NDArray[np.int32]

_LEVEL_SHARE = 0.9
"""What each further level's loss weighs of the one above it."""
_MOST_HELD_OUT = 256
_SAVE_SECONDS = 20.0
_LEAST_ASKED = 8
"""Tokens that must be left for what the model asks itself."""
EVALUATED_DEPTH = 4


class DraftTrainer:
    """Trains one draft.

    Args:
        model: The target's folder.
        destination: Where the draft is written.
        documents: Text; its pieces are prompts.
        plan: How.
        progress: Is told what is being done.
        say: Is told how good the draft is, after each pass.
        start: Folder of an earlier trained draft of this model to begin with.
        device: ``cpu``, or a device of torch's such as ``cuda``, on which matrix products are of bfloat16.
        threads: Of the CPU; 0 takes every core.

    Raises:
        CheckpointError: The model's folder or the draft to begin with is refused.
        InvalidArgumentError: There is too little text, or the device is not known.
        UnsupportedError: torch has no such device here.
    """

    def __init__(
        self,
        model: Path,
        destination: Path,
        documents: list[str],
        plan: TrainingPlan,
        *,
        progress: Progress,
        say: Callable[[str], object] = lambda _: None,
        start: Path | None = None,
        device: str = "cpu",
        threads: int = 0,
    ) -> None:
        where = device_of(device)
        self._say = say
        self._folder, self._destination, self._plan, self._progress = model, destination, plan, progress
        self._tokenizer = Tokenizer.load(model)
        self._template = ChatTemplate.load(model) or None
        self._prompts = make_prompts(
            documents,
            self._tokenizer,
            self._template,
            count=plan.sequences,
            most_tokens=plan.prompt_tokens,
            chat_share=plan.chat_share,
            seed=plan.seed,
        )
        torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
        self._a = a = Architecture.read(model)
        self._model = BatchModel(
            model,
            device=device,
            dtype=torch.bfloat16 if where.type == "cuda" else torch.float32,
            sequences=sequences_together(where, plan.length * 4 * a.layers * a.kv_width + 16 * a.vocabulary),
            length=plan.length,
        )
        self._start = None if start is None else first_weights_of(start, a)
        self._work = destination.with_name(destination.name + ".training")

    def run(self) -> list[float]:
        """Make the draft, and return how often its guesses are right by depth, on sequences that it never saw."""
        self._model.load(self._progress)
        self._head = (self._model.head / self._a.logit_divisor).to(self._model.dtype)  # [V, H]
        self._embedding = self._model.embedding
        self._angles = (
            torch.arange(self._plan.length - 1, device=self._model.device)[:, None].float()
            * self._model.inverse_frequencies()
        )
        self._work.mkdir(parents=True, exist_ok=True)
        self._forget_other_runs()
        self._ask_itself()
        tokens = self._sequences()
        hidden = hidden_states(self._model, tokens, self._progress)
        data = TrainingData(torch.from_numpy(tokens.astype(np.int64)), hidden, self._counting_rows(tokens))
        data = data.near(self._model.device)
        weights = self._train(data)
        accepted = self._acceptance(weights, data)
        answers = tokens[np.arange(tokens.shape[1]) >= self._prompts.lengths[:, None]]
        counts = np.bincount(answers, minlength=self._a.vocabulary)
        write_draft(
            self._destination,
            self._folder,
            self._a,
            {name: each.cpu() for name, each in weights.items()},
            token_map=most_frequent(counts, self._a.vocabulary // 4 or 1, self._tokenizer.eos_token_ids),
            notes={"plan": asdict(self._plan), "acceptance_by_depth": accepted},
        )
        return accepted

    def _forget_other_runs(self) -> None:
        """What another plan, model or text has left is of no use."""
        digest = {
            "plan": asdict(self._plan),
            "model": str(self._folder.absolute()),
            "prompts": int(self._prompts.ids.sum()),
            "start": None if self._start is None else float(sum(each.sum() for each in self._start.values())),
        }
        said = self._work / "plan.json"
        if said.exists() and json.loads(said.read_text("utf-8")) != digest:
            for file in self._work.iterdir():
                file.unlink()
        write_whole(said, json.dumps(digest))

    def _ask_itself(self) -> None:
        """Put chats in which the model plays the user in the place of some prompts."""
        plan, file = self._plan, self._work / "prompts.npz"
        if file.exists():
            with np.load(file) as saved:
                self._prompts = Prompts(saved["ids"], saved["lengths"])
            return
        frame = None if self._template is None else chat_frame(self._tokenizer, self._template)
        count = round(plan.sequences * plan.chat_share * plan.asked_share)
        if not count or frame is None or len(frame[0]) + len(frame[1]) + _LEAST_ASKED > plan.prompt_tokens:
            return
        endings = {*self._tokenizer.eos_token_ids, *frame[1][:1]}
        openings = Prompts.of([frame[0]] * count)
        found: list[list[int]] = []
        for first in range(0, count, self._model.sequences):
            self._progress("asking itself", first, count)
            drawn = continue_prompts(
                self._model,
                openings,
                slice(first, min(first + self._model.sequences, count)),
                temperatures=np.ones(count, np.float32),
                seed=plan.seed * 1_000_003 + plan.sequences + first,
                length=plan.prompt_tokens - len(frame[1]),
            )
            chats = [asked(row, frame, endings) for row in drawn[:, len(frame[0]) :].tolist()]
            found += [chat for chat in chats if chat is not None]
        r = np.random.default_rng([plan.seed, 2])
        kept = r.permutation(len(self._prompts))[len(found) :]
        prompts = self._prompts.lists()
        self._prompts = Prompts.of([*found, *(prompts[index] for index in kept)])
        _replace(file, partial(_save_prompts, prompts=self._prompts))

    def _sequences(self) -> Tokens:
        """Prompts and the model's continuations, int32 [S, L]."""
        file, plan = self._work / "sequences.npy", self._plan
        done = np.load(file) if file.exists() else np.empty((0, plan.length), np.int32)
        count = len(self._prompts)
        r = np.random.default_rng([plan.seed, 1])
        heat = np.where(r.random(count) < plan.greedy_share, 0.0, plan.temperature).astype(np.float32)
        while len(done) < count:
            first = len(done)
            self._progress("continuing texts", first, count)
            rows = slice(first, min(first + self._model.sequences, count))
            some = continue_prompts(
                self._model, self._prompts, rows, temperatures=heat, seed=plan.seed * 1_000_003 + first
            )
            done = np.concatenate([done, some])
            _replace(file, partial(_save_array, array=done))
        self._progress("continuing texts", count, count)
        return done

    def _counting_rows(self, tokens: Tokens) -> torch.Tensor:
        """Which rows are trained, fp32 ``[S, L - 1]``: row i foresees token i + 2, which must be of the answer."""
        places = np.arange(tokens.shape[1])
        answer = places >= self._prompts.lengths[:, None]
        ends = np.isin(tokens, self._tokenizer.eos_token_ids) & answer
        over = np.cumsum(ends, 1) - ends > 0  # behind the answer's end
        counts = np.zeros((len(tokens), tokens.shape[1] - 1), np.float32)
        counts[:, :-1] = (answer & ~over)[:, 2:]
        return torch.from_numpy(counts)

    def _train(self, data: TrainingData) -> Weights:
        """The draft's weights after every pass, or those that a stopped run has left and what was to do."""
        plan, device = self._plan, self._model.device
        torch.manual_seed(plan.seed)
        first = self._start or first_weights(self._a)
        weights = {name: torch.nn.Parameter(each.to(device)) for name, each in first.items()}
        step = TrainingStep(weights, partial(self._loss, weights), plan.rate)
        kept = torch.tensor([index for index in range(len(data.tokens)) if index % HELD_OUT])
        size = min(plan.batch, len(kept))
        batches = -(-len(kept) // size)
        rows = max(1, round(float(data.counts.mean()) * size * data.counts.shape[1]))
        total, done = plan.passes * batches, 0
        state = self._work / "state.pt"
        if state.exists():
            saved = torch.load(state, weights_only=True, map_location=device)
            with torch.no_grad():
                for name, value in saved["weights"].items():
                    weights[name].copy_(value)
            step.restore(saved["optimizer"])
            done = saved["done"]
        saved_at = time.monotonic()
        while done < total:
            epoch, batch = divmod(done, batches)
            order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(plan.seed + epoch))
            order = torch.cat([order, order])[batch * size : (batch + 1) * size]  # all batches have one size
            some = data.batch(kept[order], rows, seed=plan.seed + done, device=device)
            loss = step.run(some, plan.rate * _share(done, total))
            done += 1
            if time.monotonic() - saved_at >= _SAVE_SECONDS or done == total:
                content = {
                    "weights": {name: each.detach() for name, each in weights.items()},
                    "optimizer": step.optimizer.state_dict(),
                    "done": done,
                }
                _replace(state, partial(torch.save, content))
                saved_at = time.monotonic()
            self._progress("training", done, total)
            if done % batches == 0:
                shown = " ".join(f"{rate:.0%}" for rate in self._acceptance(weights, data))
                self._say(
                    f"pass {done // batches} of {plan.passes}: loss {float(loss):.3f}, right by depth {shown}"
                )
        return {name: each.detach() for name, each in weights.items()}

    def _outs(
        self, weights: Weights, tokens: torch.Tensor, hidden: torch.Tensor, levels: int
    ) -> list[torch.Tensor]:
        """Each level's outputs ``[B, L - 1, H]`` of tokens ``[B, L]`` and hidden states ``[B, L, H]``."""
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda, cache_enabled=False):
            embedded = self._embedding[tokens[:, 1:]].float() * self._a.embedding_scale
            layer = EagleLevels(weights, self._a, embedded, self._angles)
            outs = [layer.run(hidden[:, :-1].float())]
            while len(outs) < levels:
                outs.append(layer.run(layer.shifted(outs[-1])))
        return outs

    def _loss(self, weights: Weights, batch: Batch) -> torch.Tensor:
        """Of a batch: row i of each level stands for the hidden state at position i + 1.

        The LM head is most of the work, so it sees no rows but those that count.
        """
        levels = self._outs(weights, batch.tokens, batch.hidden, self._plan.levels)
        outs = [out.flatten(0, 1).index_select(0, batch.rows) for out in levels]  # [R, H]
        wanted = batch.hidden[:, 1:].flatten(0, 1).index_select(0, batch.rows)
        places = batch.rows % (batch.tokens.shape[1] - 1)
        counted = torch.stack([batch.shares * (places >= level) for level in range(len(outs))])  # [levels, R]
        losses = distribution_loss(self._head, wanted, counted, outs)
        result = torch.zeros((), device=losses.device)
        for level, loss in enumerate(losses.unbind()):
            result = result + loss * (_LEVEL_SHARE**level)
        return result / sum(_LEVEL_SHARE**level for level in range(len(outs)))

    @torch.no_grad()
    def _acceptance(self, weights: Weights, data: TrainingData) -> list[float]:
        """How often the draft's likeliest chain goes on as the sequence did, by depth, given that it did so far.

        Only sequences that are held out count.
        """
        held = torch.arange(0, len(data.tokens), HELD_OUT)
        held = held[:: -(-len(held) // _MOST_HELD_OUT)]
        fits = torch.zeros(EVALUATED_DEPTH, dtype=torch.int64)
        tried = torch.zeros(EVALUATED_DEPTH, dtype=torch.int64)
        for some in held.split(self._plan.batch):
            tokens, hidden, counts = data.part(some, self._model.device)
            counts = counts > 0
            right = torch.ones_like(counts)
            for depth, out in enumerate(self._outs(weights, tokens, hidden, EVALUATED_DEPTH)):
                guess = (out.to(self._head.dtype) @ self._head.t()).argmax(-1)  # [B, L - 1]
                following = torch.nn.functional.pad(tokens[:, 2:], (0, 1), value=-1)
                asked = right & counts
                right = asked & (guess == following)
                tried[depth] += asked.sum().cpu()
                fits[depth] += right.sum().cpu()
                right = torch.nn.functional.pad(right[:, :-1], (1, 0))  # the next level's row is the next one
        return [float(good) / max(1, int(all_)) for good, all_ in zip(fits, tried, strict=True)]


def acceptance_length(rates: list[float]) -> float:
    """Tokens that a step gains with chains of drafts: the drawn one and what is right before it."""
    length, chance = 1.0, 1.0
    for rate in rates:
        chance *= rate
        length += chance
    return length


def _share(done: int, total: int) -> float:
    """The learning rate's part: up over the first 5 %, down along a cosine."""
    warm = max(1, total // 20)
    if done < warm:
        return (done + 1) / warm
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (done - warm) / max(1, total - warm)))


def _replace(file: Path, write: Callable[[Path], object]) -> None:
    """Write a file as a whole or not at all.

    Raises:
        CheckpointError: The disk refuses it.
    """
    part = file.with_name(file.name + ".part")
    try:
        write(part)
        part.replace(file)
    except (OSError, RuntimeError) as error:  # the latter is torch's word for a full disk
        raise CheckpointError(
            f"{file}: cannot be written: {error}; once it can, the same command goes on from what there is"
        ) from error
    finally:
        part.unlink(missing_ok=True)


def _save_prompts(file: Path, *, prompts: Prompts) -> None:
    with file.open("wb") as opened:
        np.savez(opened, ids=prompts.ids, lengths=prompts.lengths)


def _save_array(file: Path, *, array: Tokens) -> None:
    with file.open("wb") as opened:
        np.save(opened, array)
