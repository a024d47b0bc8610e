"""What a draft is trained on: levels as trees have them, distributions, prompts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from eagle_files import plain_forward
from fixtures.small_models import CONFIG, byte_tokenizer
from test_eagle import MINICPM

from edged.checkpoint.chat_template import ChatTemplate
from edged.checkpoint.tokenizer import Tokenizer
from edged.errors import InvalidArgumentError
from edged.models.architecture import Architecture
from edged.speculation.draft_loss import distribution_loss
from edged.speculation.eagle_layer import EagleLevels, first_weights
from edged.speculation.training_prompts import asked, chat_frame, make_prompts


@pytest.mark.parametrize("minicpm", [False, True], ids=["llama", "minicpm"])
def test_a_level_is_what_a_path_of_a_tree_sees(minicpm):
    """Row i of level d, against the layer on the true rows up to i - d + 1 and the path's own outputs behind them."""
    config = MINICPM if minicpm else {**CONFIG, "intermediate_size": 96}
    a = Architecture.from_config(config)
    torch.manual_seed(1)
    weights = {name: each + 0.1 * torch.randn(each.shape) for name, each in first_weights(a).items()}
    embedding, count, levels = torch.randn(257, a.hidden), 12, 4
    tokens, hidden = torch.randint(0, 257, (2, count)), torch.randn(2, count, a.hidden)
    scale = 12.0 if minicpm else 1.0
    angles = torch.arange(count)[:, None] / 10000.0 ** (torch.arange(0, a.head_dim, 2) / a.head_dim)
    layer = EagleLevels(weights, a, embedding[tokens] * scale, angles)
    outs = [layer.run(hidden)]
    for _ in range(1, levels):
        outs.append(layer.run(layer.shifted(outs[-1])))
    made = {name: each.numpy() for name, each in weights.items()}
    known = {"minicpm": minicpm, "residual": 1.4 / 3**0.5 if minicpm else 1.0, "scale": scale}
    for sequence in range(2):
        for row in range(levels, count):
            for level in range(1, levels + 1):
                root = row - level + 1  # the last row that sees the target's own state
                seen = hidden[sequence, : root + 1]
                for below in range(1, level):  # its outputs, one after the other
                    out = plain_forward(
                        made, config, embedding, tokens[sequence, : root + below], seen, **known
                    )
                    seen = torch.cat([seen.double(), out[-1:]])
                out = plain_forward(made, config, embedding, tokens[sequence, : row + 1], seen, **known)[-1]
                torch.testing.assert_close(outs[level - 1][sequence, row].double(), out, rtol=1e-4, atol=1e-4)


def test_the_distributions_loss_is_the_cross_entropy(monkeypatch):
    monkeypatch.setattr("edged.speculation.draft_loss._LOGIT_BYTES_CPU", 4 * 50 * 7)  # seven rows at a time
    torch.manual_seed(2)
    head, wanted, weights = torch.randn(50, 16), torch.randn(30, 16), torch.rand(2, 30)
    outs = [torch.randn(30, 16, requires_grad=True) for _ in range(2)]
    losses = distribution_loss(head, wanted, weights, outs)
    likely = (wanted @ head.T).softmax(-1)
    for out, share, loss, factor in zip(outs, weights, losses, (2.0, 0.5), strict=True):
        each = -(likely * (out @ head.T).log_softmax(-1)).sum(-1)
        expected = (each * share).sum() / share.sum()
        torch.testing.assert_close(loss, expected)
        (gradient,) = torch.autograd.grad(expected * factor, out)
        (got,) = torch.autograd.grad(loss * factor, out, retain_graph=True)
        torch.testing.assert_close(got, gradient, rtol=1e-4, atol=1e-6)


@pytest.fixture
def tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer().to_str())
    return Tokenizer.load(tmp_path)


TEXT = ["The lamp burns. " * 40, "A robot opens the door slowly. " * 40]


def prompts(tokenizer, template=None, **changes):
    options = {"count": 40, "most_tokens": 60, "chat_share": 0.5, "seed": 1, **changes}
    return make_prompts(TEXT, tokenizer, template, **options)


def test_prompts_are_pieces_of_the_text_and_chats(tokenizer):
    template = ChatTemplate({"default": "[{{ messages[0].content }}]>"})
    made = prompts(tokenizer, template)
    texts = [tokenizer.decode(row[:n].tolist()) for row, n in zip(made.ids, made.lengths, strict=True)]
    assert sum(text.endswith("]>") for text in texts) == 20
    assert all(
        text.startswith(("The", "A", "lamp", "burns", "robot", "opens", "the", "door", "slowly", "["))
        or text.endswith("]>")
        for text in texts
    )
    assert made.lengths.max() <= 60
    assert (np.diff(made.lengths) >= 0).all()
    assert len(set(made.lengths.tolist())) > 10
    assert not any(row[n:].any() for row, n in zip(made.ids, made.lengths, strict=True))
    again = prompts(tokenizer, template)
    assert (again.ids == made.ids).all()
    assert (prompts(tokenizer, template, seed=2).ids[:, :8] != made.ids[:, :8]).any()
    assert not any(text.endswith("]>") for text in map(tokenizer.decode, prompts(tokenizer).ids.tolist()))


def test_a_template_longer_than_a_prompt_keeps_its_end(tokenizer):
    template = ChatTemplate({"default": "x" * 200 + "{{ messages[0].content }}<answer>"})
    made = prompts(tokenizer, template, chat_share=1.0)
    assert all(tokenizer.decode(row.tolist()).endswith("<answer>") for row in made.ids)


def test_what_a_model_asks_itself_ends_with_the_turn(tokenizer):
    template = ChatTemplate({"default": "<u>{{ messages[0].content }}</u><a>"})
    frame = chat_frame(tokenizer, template)
    assert [tokenizer.decode(each) for each in frame] == ["<u>", "</u><a>"]
    said = tokenizer.encode("why? and so on")
    place = said.index(tokenizer.encode("?")[0]) + 1
    assert tokenizer.decode(asked([*said[:place], 0, *said[place:]], frame, {0})) == "<u>why?</u><a>"
    assert tokenizer.decode(asked(said, frame, {0})) == "<u>why? and so on</u><a>"
    assert asked([said[0], 0], frame, {0}) is None
    for hidden in ("{{ messages[0].content }}", "<u>{{ messages[0].content | upper }}"):
        assert chat_frame(tokenizer, ChatTemplate({"default": hidden})) is None


def test_too_little_text_is_refused_with_both_numbers(tokenizer):
    with pytest.raises(
        InvalidArgumentError, match="1880 characters: 1000 prompts of up to 60 tokens need at least 30000"
    ):
        prompts(tokenizer, count=1000)
    with pytest.raises(InvalidArgumentError, match="has 0 characters"):
        make_prompts([], tokenizer, None, count=16, most_tokens=8, chat_share=0.5, seed=0)
