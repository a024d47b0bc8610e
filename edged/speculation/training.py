"""Trains an EAGLE draft for a model on the model's own continuations (self-distillation).

Pieces of text are prompts; the model goes on from them, and its final norm's outputs over prompt and answer are what the
draft learns to foresee: from the output at a position and the token after it the next output (smooth L1), and from that the next
token's distribution (cross entropy, weighted 0.1), as EAGLE trains (arXiv 2401.15077, section 4.2), with noise on the inputs
that stands for the draft's own errors at later levels. What was made is kept beside the destination, so a run that was stopped
goes on.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn import functional

from edged.checkpoint.tokenizer import Tokenizer
from edged.config import ModelConfig
from edged.errors import InvalidArgumentError
from edged.executor.base import SamplingRow, StepBatch
from edged.executor.torch_executor import TorchExecutor
from edged.models.eagle import Eagle
from edged.quantize.calibration import cut_sequences
from edged.speculation.eagle_layer import eagle_layer, first_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import numpy.typing as npt

    from edged.models.architecture import Architecture

    Weights = Mapping[str, torch.Tensor]
    Progress = Callable[[str, int, int], None]
    Tokens = npt.NDArray[np.int32]

_NOISE = 0.1
_TOKEN_LOSS = 0.1
_HELD_OUT = 16
"""One sequence of so many is not trained on."""
_BATCH = 8
_SAVE_EVERY = 50
_TOGETHER = 8
"""Sequences that the model continues at once."""
EVALUATED_DEPTH = 4


@dataclass(frozen=True)
class TrainingPlan:
    """What decides the draft that comes out; a run goes on only where all of it is the same."""

    sequences: int = 512
    prompt_tokens: int = 64
    answer_tokens: int = 128
    passes: int = 8
    rate: float = 1e-3
    temperature: float = 0.7
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses what trains nothing."""
        for name, least in (
            ("sequences", _HELD_OUT),
            ("prompt_tokens", 4),
            ("answer_tokens", 8),
            ("passes", 1),
        ):
            if getattr(self, name) < least:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}: at least {least}", field=name)
        if not 0 < self.rate <= 1:
            raise InvalidArgumentError(f"rate is {self.rate}: above 0 and at most 1", field="rate")


class DraftTrainer:
    """Trains one draft.

    Args:
        model: The target's folder.
        destination: Where the draft is written.
        documents: Text; its pieces are prompts.
        plan: How.
        progress: Is told what is being done.
        say: Is told how good the draft is, after each pass.
        threads: Of the CPU; 0 takes every core.

    Raises:
        CheckpointError: The model's folder is refused.
        InvalidArgumentError: There is too little text.
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
        threads: int = 0,
    ) -> None:
        self._say = say
        self._model, self._destination, self._plan, self._progress = model, destination, plan, progress
        tokenizer = Tokenizer.load(model)
        found = cut_sequences(documents, tokenizer, count=plan.sequences, length=plan.prompt_tokens, least=0)
        self._prompts = found.sequences.astype(np.int32)
        if len(self._prompts) < _HELD_OUT:
            raise InvalidArgumentError(
                f"the text gives {len(self._prompts)} prompts of {plan.prompt_tokens} tokens: at least {_HELD_OUT} are "
                "needed; give more text or shorter prompts",
                field="text",
            )
        length = plan.prompt_tokens + plan.answer_tokens
        self._executor = TorchExecutor(
            ModelConfig(
                name="target",
                path=model,
                context_length=max(64, length + 1),
                max_sequences=_TOGETHER,
                prefill_chunk=length,
                threads=threads,
            ),
            keeps_hidden=True,
        )
        self._work = destination.with_name(destination.name + ".training")

    def run(self) -> list[float]:
        """Make the draft, and return how often its guesses are right by depth, on sequences that it never saw."""
        self._executor.load(self._progress)
        self._work.mkdir(parents=True, exist_ok=True)
        self._forget_other_runs()
        tokens = self._sequences()
        hidden = self._hidden_states(tokens)
        weights = self._train(torch.from_numpy(tokens.astype(np.int64)), hidden)
        held = slice(0, None, _HELD_OUT)
        accepted = self._acceptance(weights, torch.from_numpy(tokens.astype(np.int64))[held], hidden[held])
        self._write(weights, accepted)
        return accepted

    def _forget_other_runs(self) -> None:
        """What another plan, model or text has left is of no use."""
        digest = {
            "plan": asdict(self._plan),
            "model": str(self._model.absolute()),
            "prompts": int(self._prompts.sum()),
        }
        said = self._work / "plan.json"
        if said.exists() and json.loads(said.read_text("utf-8")) != digest:
            for file in self._work.iterdir():
                file.unlink()
        said.write_text(json.dumps(digest))

    def _sequences(self) -> Tokens:
        """Prompts and the model's continuations, int32 [S, L]."""
        file, plan = self._work / "sequences.npy", self._plan
        done: list[Tokens] = list(np.load(file)) if file.exists() else []
        count = len(self._prompts)
        while len(done) < count:
            self._progress("continuing texts", len(done), count)
            done += self._continue(len(done), self._prompts[len(done) : len(done) + _TOGETHER])
            _replace(file, partial(_save_array, array=np.array(done, np.int32)))
        self._progress("continuing texts", count, count)
        assert all(len(each) == plan.prompt_tokens + plan.answer_tokens for each in done)  # noqa: S101
        return np.array(done, np.int32)

    def _continue(self, first: int, prompts: Tokens) -> list[Tokens]:
        """The model's own continuations of some prompts, drawn with a seed each."""
        plan, count = self._plan, len(prompts)
        sequences = [prompt.tolist() for prompt in prompts]
        rows = [
            SamplingRow(plan.temperature, seed=plan.seed + first + index, position=0)
            for index in range(count)
        ]
        for index, sequence in enumerate(sequences):
            sequence.append(self._step([(index, sequence, 0)], [rows[index]])[0])
        while len(sequences[0]) < plan.prompt_tokens + plan.answer_tokens:
            parts = [(index, sequence, len(sequence) - 1) for index, sequence in enumerate(sequences)]
            for sequence, token in zip(sequences, self._step(parts, rows), strict=True):
                sequence.append(token)
        return [np.array(sequence, np.int32) for sequence in sequences]

    def _step(self, parts: list[tuple[int, list[int], int]], rows: list[SamplingRow]) -> list[int]:
        """One step of (place, tokens, stored) each: all that is not stored, and the token after it."""
        pages = self._executor.plan.pages_per_sequence
        new = [tokens[stored:] for _, tokens, stored in parts]
        starts = np.cumsum([0, *map(len, new)]).astype(np.int32)
        batch = StepBatch(
            token_ids=np.concatenate(new).astype(np.int32),
            positions=np.concatenate([np.arange(s, len(t), dtype=np.int32) for _, t, s in parts]),
            sequence_starts=starts,
            lengths=np.array([stored for _, _, stored in parts], np.int32),
            page_tables=[
                np.arange(place * pages, (place + 1) * pages, dtype=np.int32) for place, _, _ in parts
            ],
            logit_rows=starts[1:] - 1,
            sampling=[
                replace(row, position=len(tokens)) for row, (_, tokens, _) in zip(rows, parts, strict=True)
            ],
        )
        drawn: list[int] = self._executor.step(batch).tolist()
        return drawn

    def _hidden_states(self, tokens: Tokens) -> torch.Tensor:
        """The final norm's outputs of whole sequences, fp32 ``[S, L, H]``."""
        states = torch.empty(*tokens.shape, self._architecture.hidden)
        for index, sequence in enumerate(tokens.tolist()):
            self._progress("reading hidden states", index, len(tokens))
            self._step([(0, sequence, 0)], [SamplingRow()])
            states[index] = self._executor.hidden
        self._progress("reading hidden states", len(tokens), len(tokens))
        return states

    @property
    def _architecture(self) -> Architecture:
        return self._executor.plan.architecture

    def _train(self, tokens: torch.Tensor, hidden: torch.Tensor) -> Weights:
        """The draft's weights after every pass, or those that a stopped run has left and what was to do."""
        plan = self._plan
        torch.manual_seed(plan.seed)
        weights = {name: torch.nn.Parameter(each) for name, each in first_weights(self._architecture).items()}
        optimizer = torch.optim.AdamW(weights.values(), lr=plan.rate, betas=(0.9, 0.95), weight_decay=0.0)
        kept = torch.tensor([index for index in range(len(tokens)) if index % _HELD_OUT])
        batches = -(-len(kept) // _BATCH)
        total, done = plan.passes * batches, 0
        state = self._work / "state.pt"
        if state.exists():
            saved = torch.load(state, weights_only=True)
            with torch.no_grad():
                for name, value in saved["weights"].items():
                    weights[name].copy_(value)
            optimizer.load_state_dict(saved["optimizer"])
            done = saved["done"]
        while done < total:
            epoch, batch = divmod(done, batches)
            order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(plan.seed + epoch))
            some = kept[order[batch * _BATCH : (batch + 1) * _BATCH]]
            for group in optimizer.param_groups:
                group["lr"] = plan.rate * _share(done, total)
            loss = self._loss(weights, tokens[some], hidden[some], seed=plan.seed + done)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
            optimizer.step()
            done += 1
            if done % _SAVE_EVERY == 0 or done == total:
                content = {
                    "weights": {name: each.detach() for name, each in weights.items()},
                    "optimizer": optimizer.state_dict(),
                    "done": done,
                }
                _replace(state, partial(torch.save, content))
            self._progress("training", done, total)
            if done % batches == 0:
                held = slice(0, None, _HELD_OUT)
                rates = self._acceptance(weights, tokens[held], hidden[held])
                shown = " ".join(f"{rate:.0%}" for rate in rates)
                self._say(
                    f"pass {done // batches} of {plan.passes}: loss {float(loss.detach()):.3f}, right by depth {shown}"
                )
        return {name: each.detach() for name, each in weights.items()}

    def _loss(
        self, weights: Weights, tokens: torch.Tensor, hidden: torch.Tensor, *, seed: int
    ) -> torch.Tensor:
        """Of a batch of sequences ``[B, L]`` and their hidden states ``[B, L, H]``."""
        noise = torch.rand(hidden[:, :-1].shape, generator=torch.Generator().manual_seed(seed)) - 0.5
        shown = hidden[:, :-1] + _NOISE * 2 * noise * hidden.std()
        out = self._forward(weights, tokens[:, 1:], shown)
        wanted = hidden[:, 1:]
        regression = functional.smooth_l1_loss(out, wanted)
        likely = (wanted @ self._logits_of.t()).softmax(-1)
        guessed = (out @ self._logits_of.t()).log_softmax(-1)
        return regression - _TOKEN_LOSS * (likely * guessed).sum(-1).mean()

    @property
    def _logits_of(self) -> torch.Tensor:
        """The LM head with the model's divisor in it, ``[V, H]``."""
        return self._executor.head.float() / self._architecture.logit_divisor

    def _forward(self, weights: Weights, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Outputs ``[B, n, H]`` of rows (hidden state at position i, token i + 1)."""
        a = self._architecture
        embedded = self._executor.buffers["embedding"].float()[tokens] * a.embedding_scale
        return eagle_layer(weights, a, embedded, hidden, self._angles(tokens.shape[1]))

    def _angles(self, count: int) -> torch.Tensor:
        """``[n, D / 2]`` of positions 0 to n - 1."""
        a = self._architecture
        frequencies = torch.from_numpy(
            a.rope.inverse_frequencies(a.head_dim, self._executor.plan.context_length)
        )
        return torch.arange(count)[:, None].float() * frequencies

    @torch.no_grad()
    def _acceptance(self, weights: Weights, tokens: torch.Tensor, hidden: torch.Tensor) -> list[float]:
        """How often the draft's likeliest chain goes on as the sequence did, by depth, given that it did so far.

        From the second level on a row sees guesses in the place of the sequence before it, too: rather too low.
        """
        rates = []
        right = torch.ones(tokens.shape[0], tokens.shape[1] - 1, dtype=torch.bool)
        shown, after = hidden[:, :-1], tokens[:, 1:]
        for depth in range(EVALUATED_DEPTH):
            out = self._forward(weights, after, shown)
            guess = (out @ self._logits_of.t()).argmax(-1)  # [S, n]
            n = guess.shape[1] - 1  # the last row's token was not recorded
            fits = guess[:, :n] == tokens[:, 2 + depth : 2 + depth + n]
            tried = right[:, :n]
            rates.append(float((fits & tried).sum()) / max(1, int(tried.sum())))
            right = tried & fits
            # One level deeper each row is (its own output, its own guess), as a chain of drafts has it.
            shown, after = out[:, :n], guess[:, :n]
        return rates

    def _write(self, weights: Weights, accepted: list[float]) -> None:
        """The draft's folder, as a whole."""
        part = self._destination.with_name(self._destination.name + ".part")
        part.mkdir(exist_ok=True)
        config = json.loads((self._model / "config.json").read_text("utf-8"))
        kept = {key: value for key, value in config.items() if key in _KEPT_KEYS}
        a = self._architecture
        mup = a.model_type == "minicpm"
        kept |= {
            "architectures": ["EagleForCausalLM"],
            "model_type": "minicpm" if mup else "llama",
            "num_hidden_layers": 1,
            "head_dim": a.head_dim,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "edged": {"plan": asdict(self._plan), "acceptance_by_depth": accepted},
        }
        if mup:
            kept["mup_denominator"] = a.layers + 1
        (part / "config.json").write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
        save_file({name: each.contiguous() for name, each in weights.items()}, part / "model.safetensors")
        Eagle.read(part, a)  # what the daemon would refuse is not written
        if self._destination.exists():
            for file in self._destination.iterdir():
                file.unlink()
            self._destination.rmdir()
        part.rename(self._destination)


_KEPT_KEYS = frozenset(
    {
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "rms_norm_eps",
        "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "scale_emb", "scale_depth",
        "dim_model_base",
    }
)  # fmt: skip


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
    """Write a file as a whole or not at all."""
    part = file.with_name(file.name + ".part")
    write(part)
    part.replace(file)


def _save_array(file: Path, *, array: Tokens) -> None:
    with file.open("wb") as opened:
        np.save(opened, array)
