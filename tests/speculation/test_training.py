"""Training a draft: it becomes better than it was, the daemon's executor runs it, and what was stopped goes on."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from eagle_files import write_draft
from fixtures.small_models import CONFIG, model_files
from forced_drafts import forced
from requests_with_drafts import Job, answer_all
from safetensors.torch import load_file, save_file
from test_eagle import MINICPM, load

from edged.checkpoint.tokenizer import Tokenizer
from edged.cli.main import app
from edged.decoding.stops import Stops
from edged.errors import CheckpointError, InvalidArgumentError
from edged.models.architecture import Architecture
from edged.models.eagle import Eagle
from edged.speculation.eagle_draft import EagleDraft
from edged.speculation.eagle_layer import first_weights
from edged.speculation.expansion import PRIOR_RATES
from edged.speculation.self_text import hidden_states
from edged.speculation.training import DraftTrainer, acceptance_length
from edged.speculation.training_data import TrainingData
from edged.speculation.training_plan import TrainingPlan

PLAN = TrainingPlan(sequences=64, prompt_tokens=16, answer_tokens=32, passes=4, rate=3e-3, temperature=0.0)


def write_model(folder, **changes):
    """A model whose next token is a function of the last one, nearly: a draft can learn that in seconds."""
    folder.mkdir()
    for name, content in model_files(seed=3, **{**changes, "tie_word_embeddings": False}).items():
        (folder / name).write_bytes(content)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and "layers" in name:
            tensors[name] = tensor * 0.02
    tensors["lm_head.weight"] = torch.randn(257, 64, generator=torch.Generator().manual_seed(1))
    save_file(tensors, folder / "model.safetensors")
    return folder


def words(seed=0, count=400):
    r = random.Random(seed)
    known = ["robot", "door", "opens", "the", "a", "lamp", "slowly", "and", "then", "stops"]
    return " ".join(r.choice(known) for _ in range(count))


def train(model, destination, plan=PLAN, progress=lambda *_: None, **options):
    trainer = DraftTrainer(model, destination, [words()], plan, progress=progress, threads=1, **options)
    return trainer, trainer.run()


@pytest.mark.parametrize("changes", [{}, MINICPM], ids=["llama", "minicpm"])
def test_a_trained_draft_is_right_more_often_and_runs(tmp_path, changes):
    model = write_model(tmp_path / "model", **changes)
    said = []
    trainer, accepted = train(model, tmp_path / "draft", say=said.append)
    tokens = trainer._sequences()
    hidden = hidden_states(trainer._model, tokens, lambda *_: None)
    tokens = torch.from_numpy(tokens.astype("int64"))
    torch.manual_seed(0)
    data = TrainingData(tokens, hidden, trainer._counting_rows(tokens.numpy()))
    before = trainer._acceptance(first_weights(Architecture.read(model)), data)
    assert accepted[0] > before[0] + 0.1
    assert len(said) == PLAN.passes
    assert "right by depth" in said[-1]
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["edged"]["acceptance_by_depth"] == accepted
    assert Eagle.read(tmp_path / "draft", Architecture.read(model)).layer.residual_scale == pytest.approx(
        1.4 / 3**0.5 if changes else 1.0
    )
    ids = json.loads((tmp_path / "draft" / "token_map.json").read_text())
    assert len(ids) == 257 // 4
    assert 0 in ids  # every answer ends once
    counted = tokens.numpy()[:, 16:].ravel()
    assert {int(token) for token in counted if (counted == token).mean() > 0.05} <= set(ids)
    assert all(
        each.dtype == torch.float16 for each in load_file(tmp_path / "draft" / "model.safetensors").values()
    )
    # What the daemon's executor makes of it: the same answers, with drafts accepted.
    executor = load(model, tmp_path / "draft")
    jobs = [Job(tokens[index, :16].tolist(), Stops(16)) for index in range(1, 5)]
    speculator = forced(partial(EagleDraft, model=executor.draft_model, width=4), 12, depth=3)
    speculator._acceptance = type(speculator._acceptance)(PRIOR_RATES)
    expected = answer_all(executor, jobs)
    told = answer_all(executor, jobs, speculator)
    assert [one.tokens for one in told] == [one.tokens for one in expected]
    steps = sum(one.steps for one in told)
    assert steps < 0.9 * sum(one.steps for one in expected)


def test_chats_in_which_the_model_asks_itself(tmp_path):
    model = write_model(tmp_path / "model")
    template = json.dumps({"eos_token": "<|end|>", "chat_template": "<u>{{ messages[0].content }}</u><a>"})
    (model / "tokenizer_config.json").write_text(template)
    plan = replace(PLAN, passes=1, sequences=16, prompt_tokens=90, answer_tokens=8, chat_share=1.0)
    begun = []
    trainer, _ = train(model, tmp_path / "draft", plan, lambda doing, *_: begun.append(doing))
    assert "asking itself" in begun
    tokenizer = Tokenizer.load(model)
    texts = [tokenizer.decode(each) for each in trainer._prompts.lists()]
    assert all(text.startswith("<u>") and text.endswith("</u><a>") for text in texts)
    own = [text for text in texts if not any(word in text for word in words().split() if len(word) > 2)]
    assert 4 <= len(own) <= 12  # a random model's text beside requests about the words
    again, _ = train(model, tmp_path / "draft", plan, lambda doing, *_: begun.append(doing))
    assert begun.count("asking itself") == 1  # of the first run
    assert (again._prompts.ids == trainer._prompts.ids).all()


class StoppedError(Exception):
    """Stands for a kill."""


@pytest.mark.parametrize(
    "what",
    [
        pytest.param("continuing texts", marks=pytest.mark.soak),
        pytest.param("reading hidden states", marks=pytest.mark.soak),
        "training",
    ],
)
def test_what_was_stopped_goes_on(tmp_path, what, monkeypatch):
    monkeypatch.setattr("edged.speculation.training._SAVE_SECONDS", 0.0)
    plan = replace(PLAN, passes=2, sequences=32, batch=3)
    model = write_model(tmp_path / "model")
    train(model, tmp_path / "whole", plan)

    def stop(doing, done, total):
        if doing == what and done > total * 0.91:
            raise StoppedError

    with pytest.raises(StoppedError):
        train(model, tmp_path / "draft", plan, stop)
    assert not (tmp_path / "draft").exists()
    begun = []
    train(model, tmp_path / "draft", plan, lambda doing, done, _: begun.append((doing, done)))
    first = next(done for doing, done in begun if doing == what)
    assert first > 1 or what == "reading hidden states"
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "draft"))
    for name, tensor in whole.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=0, atol=1e-5)


def test_another_plan_begins_anew(tmp_path):
    model = write_model(tmp_path / "model")
    small = replace(PLAN, passes=1, sequences=16)
    train(model, tmp_path / "draft", small)
    begun = []
    train(
        model, tmp_path / "draft", replace(small, seed=5), lambda doing, done, _: begun.append((doing, done))
    )
    assert ("continuing texts", 0) in begun


def test_an_earlier_draft_is_a_beginning(tmp_path):
    model = write_model(tmp_path / "model")
    plan = replace(PLAN, passes=1, sequences=16, answer_tokens=16)
    _, before = train(model, tmp_path / "first", plan)
    _, after = train(model, tmp_path / "second", replace(plan, rate=1e-6), start=tmp_path / "first")
    assert after == pytest.approx(before, abs=0.02)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert all(torch.allclose(first[name], second[name], atol=1e-3) for name in first)
    write_draft(tmp_path / "other", CONFIG)
    with pytest.raises(CheckpointError, match="begin with one that edgectl draft train has made"):
        train(model, tmp_path / "third", start=tmp_path / "other")


def test_too_little_text_is_refused(tmp_path):
    model = write_model(tmp_path / "model")
    with pytest.raises(
        InvalidArgumentError, match="has 11 characters: 64 prompts of up to 8 tokens need at least 256"
    ):
        DraftTrainer(
            model, tmp_path / "draft", ["a few words"], replace(PLAN, prompt_tokens=8), progress=print
        )
    for change in ({"sequences": 3}, {"passes": 0}, {"rate": 0.0}, {"answer_tokens": 1}):
        with pytest.raises(InvalidArgumentError, match=next(iter(change))):
            replace(PLAN, **change)


def test_the_acceptance_length_counts_the_drawn_token():
    assert acceptance_length([]) == 1.0
    assert acceptance_length([0.5, 0.5]) == pytest.approx(1.75)


def test_edgectl_ranks_tokens(tmp_path, capsys):
    model = write_model(tmp_path / "model")
    (tmp_path / "text.txt").write_text("aaaa bbb cc d")
    arguments = [
        "draft",
        "rank",
        str(model),
        str(tmp_path / "map.json"),
        "--text",
        str(tmp_path / "text.txt"),
    ]
    assert app([*arguments, "--size", "4"], standalone_mode=False) == 0
    assert "4 of 257 tokens, which are 76.9 % of the text's" in capsys.readouterr().out.replace(
        "76.9%", "76.9 %"
    )
    ids = json.loads((tmp_path / "map.json").read_text())
    tokenizer = Tokenizer.load(model)
    # The three most frequent of a, b, the space and c, d; and the one that ends every answer.
    assert ids == sorted([0, *(tokenizer.encode(each)[0] for each in "ab ")])
    assert app(arguments, standalone_mode=False) == 0
    assert len(json.loads((tmp_path / "map.json").read_text())) == 64
    assert app([*arguments, "--size", "300"], standalone_mode=False) == 64
    (tmp_path / "text.txt").write_text("")
    assert app(arguments, standalone_mode=False) == 5


def test_edgectl_trains_one(tmp_path, capsys):
    model = write_model(tmp_path / "model")
    (tmp_path / "text.txt").write_text(words())
    options = [
        "--sequences",
        "16",
        "--prompt-tokens",
        "16",
        "--answer-tokens",
        "16",
        "--passes",
        "1",
        "--threads",
        "1",
    ]
    arguments = [
        "draft",
        "train",
        str(model),
        str(tmp_path / "draft"),
        "--text",
        str(tmp_path / "text.txt"),
        *options,
    ]
    assert app(arguments, standalone_mode=False) == 0
    assert "tokens a step" in capsys.readouterr().out
    assert Eagle.read(tmp_path / "draft", Architecture.read(model)).has("hidden_norm")
    arguments[5] = str(tmp_path / "missing.txt")
    assert app(arguments, standalone_mode=False) == 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_edgectl_says_that_there_is_no_gpu(tmp_path, capsys):
    model = write_model(tmp_path / "model")
    (tmp_path / "text.txt").write_text(words(count=4000))
    arguments = ["draft", "train", str(model), str(tmp_path / "draft"), "--text", str(tmp_path / "text.txt")]
    assert app([*arguments, "--sequences", "16", "--device", "cuda"], standalone_mode=False) == 5
    assert "finds 0 CUDA devices here" in " ".join(capsys.readouterr().err.split())
    for device in ("gpu", "cuda:" + "9" * 5000):
        assert app([*arguments, "--device", device], standalone_mode=False) == 64
    assert "device 'gpu' is not known" in " ".join(capsys.readouterr().err.split())


def test_a_draft_that_cannot_be_written_leaves_nothing_and_the_one_before(tmp_path, monkeypatch):
    """Also where the library, and not the system, says that the disk is full."""
    from safetensors import SafetensorError

    from edged.speculation import draft_files

    model, destination = tmp_path / "model", tmp_path / "draft"
    model.mkdir()
    (model / "config.json").write_text("{}")
    destination.mkdir()
    (destination / "config.json").write_text("the one before")
    architecture = SimpleNamespace(model_type="llama", head_dim=8, layers=1)
    for fault in (SafetensorError("I/O error: no space"), OSError(28, "No space left on device")):

        def fail(*_, fault=fault):
            raise fault

        monkeypatch.setattr(draft_files, "save_file", fail)
        with pytest.raises(CheckpointError, match=r"cannot be written: .*pace"):
            draft_files.write_draft(destination, model, architecture, {}, token_map=(1,), notes={})
        assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "model"]
        assert (destination / "config.json").read_text() == "the one before"


def test_a_state_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path):
    from edged.speculation.training import _replace

    def write(part):
        part.write_text("half")
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    (tmp_path / "state").write_text("before")
    with pytest.raises(CheckpointError, match=r"state: cannot be written: .* goes on from what there is"):
        _replace(tmp_path / "state", write)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert (tmp_path / "state").read_text() == "before"
