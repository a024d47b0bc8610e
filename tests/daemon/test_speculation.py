"""A daemon with speculation: the same text with and without, and the counts of drafts wherever they are told."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

PASSAGE = "The lighthouse at the end of the pier was built in 1873 by a family of stonemasons from the north."
PROMPT = f"<|im_start|>user\nQuote this passage back to me, word for word:\n\n{PASSAGE}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def speculating(demo_model):
    from fixtures.daemon import DaemonProcess, demo_configuration

    process = DaemonProcess(
        # What pays depends on the machine and on what else it does, so nothing is left to that here.
        demo_configuration(
            demo_model, model={"speculation": {"method": "prompt_lookup", "tree_size": 12, "adaptive": False}}
        ),
        forked=True,
    )
    try:
        yield process.wait_ready()
        assert process.stop() == 0, process.log()
    finally:
        process.close()


def answer(daemon, **options):
    with daemon.client() as client:
        events = list(client.generate(PROMPT, max_tokens=24, timeout=120, **options))
    text = "".join(event.text for event in events if hasattr(event, "text"))
    tokens = [token for event in events for token in getattr(event, "token_ids", ())]
    return text, tokens, events[-1]


def test_the_text_is_the_same_and_the_drafts_are_counted(speculating):
    for options in ({"temperature": 0.0}, {"temperature": 0.7, "seed": 5, "frequency_penalty": 0.1}):
        text, tokens, finished = answer(speculating, **options)
        plain_text, plain_tokens, plain = answer(speculating, no_speculation=True, **options)
        assert (text, tokens) == (plain_text, plain_tokens)
        assert (plain.usage.drafted_tokens, plain.usage.accepted_tokens) == (0, 0)
        assert plain.timings.steps == len(plain_tokens)
        assert finished.usage.drafted_tokens >= finished.usage.accepted_tokens
        assert finished.timings.steps == len(tokens) - finished.usage.accepted_tokens
    with speculating.client() as client:
        (model,) = client.status().models
    assert model.speculation == "prompt_lookup"
    assert model.drafted_tokens >= model.accepted_tokens > 0
    assert model.pages_free == model.pages


def test_a_message_may_have_several_tokens_and_its_time_is_no_tokens(speculating):
    with speculating.client() as client:
        before = client.status().models[0]
        events = list(client.generate(PROMPT, max_tokens=24, timeout=120, temperature=0.0))
        (after,) = client.status().models
    messages = [len(event.token_ids) for event in events if getattr(event, "token_ids", ())]
    assert max(messages) > 1
    gaps = after.inter_token_latency.count - before.inter_token_latency.count
    assert len(messages) - 1 <= gaps < sum(messages) - 1
    assert after.time_per_output_token.count - before.time_per_output_token.count == 1


def test_logprobs_come_one_a_token(speculating):
    options = {"temperature": 0.0, "logprobs": True, "top_logprobs": 2}
    with speculating.client() as client:
        told = [
            [
                (token, logprob.logprob, [each.token_id for each in logprob.top])
                for event in client.generate(
                    PROMPT, max_tokens=16, timeout=120, no_speculation=plain, **options
                )
                if hasattr(event, "token_ids")
                for token, logprob in zip(event.token_ids, event.logprobs, strict=True)
            ]
            for plain in (False, True)
        ]
    for one, other in zip(*told, strict=True):
        assert (one[0], one[2]) == (other[0], other[2])
        assert one[1] == pytest.approx(other[1], abs=1e-3)


def test_a_draft_model_is_served(tmp_path):
    from fixtures.daemon import DaemonProcess
    from fixtures.small_models import CONFIG, model_files

    sys.path.insert(0, str(Path(__file__).parents[1] / "speculation"))
    from eagle_files import write_draft

    model = tmp_path / "model"
    model.mkdir()
    for name, content in model_files(seed=3).items():
        (model / name).write_bytes(content)
    write_draft(tmp_path / "draft", {**CONFIG, "intermediate_size": 96})
    (tmp_path / "map.json").write_text(json.dumps(list(range(100, 250))))
    speculation = {
        "method": "eagle",
        "draft": str(tmp_path / "draft"),
        "token_map": str(tmp_path / "map.json"),
        "adaptive": False,
    }
    settings = {
        "name": "small",
        "path": str(model),
        "context_length": 512,
        "threads": 1,
        "speculation": speculation,
    }
    process = DaemonProcess(
        {"models": [settings], "memory": {"budget": "2GiB"}, "log": {"format": "json"}}, forked=True
    )
    try:
        process.wait_ready()
        with process.client() as client:
            texts = [
                "".join(
                    event.text
                    for event in client.generate(
                        "abc " * 9,
                        max_tokens=60,
                        ignore_eos=True,
                        no_speculation=plain,
                        temperature=0.5,
                        seed=3,
                    )
                    if hasattr(event, "text")
                )
                for plain in (False, True)
            ]
            status = client.status()
        assert texts[0] == texts[1]
        assert status.models[0].speculation == "eagle"
        assert status.models[0].drafted_tokens > 0
        assert any(row.name == "draft model" for row in status.ledger.rows)
        assert process.stop() == 0, process.log()
    finally:
        process.close()


def test_edgectl_shows_the_drafts(speculating):
    answer(speculating, temperature=0.0)

    def edgectl(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "edged.cli", *arguments, "--address", speculating.address],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout

    assert re.search(r"drafts accepted +\d+ of \d+", edgectl("status"))
    said = json.loads(edgectl("generate", PROMPT, "--max-tokens", "8", "--temperature", "0", "--json"))
    assert said["usage"]["drafted_tokens"] >= said["usage"]["accepted_tokens"]
    said = json.loads(
        edgectl("generate", PROMPT, "--max-tokens", "8", "--temperature", "0", "--json", "--no-speculation")
    )
    assert said["usage"]["drafted_tokens"] == 0
