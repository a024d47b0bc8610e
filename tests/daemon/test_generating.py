"""Generation through the real daemon: exact streams, stops, seeds, company."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from edged.client import AsyncClient, Chunk, Finished, Started

STORY = "Once upon a time there was a robot who"
CHINESE = "从前有一个机器人,它"
CHAT = [{"role": "user", "content": "What is 2+2? Only the number."}]


def answer(client, prompt=STORY, **options):
    return client.generate(prompt, **{"temperature": 0.0, "max_tokens": 24, **options}).answer()


def test_the_stream_is_started_chunks_finished(client):
    events = list(client.generate(STORY, temperature=0.0, max_tokens=8))
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    assert all(isinstance(event, Chunk) for event in events[1:-1])
    tokens = [token for chunk in events[1:-1] for token in chunk.token_ids]
    assert len(tokens) == 8
    assert events[-1].reason == "length"
    assert events[-1].usage.generated_tokens == 8
    assert events[-1].usage.prompt_tokens == events[0].prompt_tokens == len(client.tokenize(STORY))
    assert all(chunk.step_seconds > 0 for chunk in events[1:-1])


CASES = {
    "greedy": (STORY, {"max_tokens": 40}),
    "chinese": (CHINESE, {}),
    "emoji": ("🙂🙃🙂🙃🙂🙃", {}),
    "hot chinese": (CHINESE, {"temperature": 2.5, "seed": 1, "max_tokens": 40, "ignore_eos": True}),
    "boiling": (STORY, {"temperature": 4.0, "seed": 7, "max_tokens": 40, "ignore_eos": True}),
    "chat": (CHAT, {"max_tokens": 40}),
    "chat with special tokens": (CHAT, {"keep_special_tokens": True, "max_tokens": 40}),
    "chat beyond its end": (CHAT, {"ignore_eos": True}),
}


@pytest.fixture(scope="module")
def answers(daemon):
    """The events of all cases, made together because steps are shared."""
    with daemon.client() as client, ThreadPoolExecutor(len(CASES)) as pool:

        def run(case):
            prompt, options = case
            return list(client.generate(prompt, **{"temperature": 0.0, "max_tokens": 24, **options}))

        return dict(zip(CASES, pool.map(run, CASES.values()), strict=True))


def whole(events):
    """Text, token ids and end of one stream."""
    text = "".join(event.text for event in events[1:])
    return text, [token for chunk in events[1:-1] for token in chunk.token_ids], events[-1]


@pytest.mark.parametrize("name", CASES)
def test_the_chunks_together_are_the_text_of_the_ids(client, answers, name):
    text, ids, finished = whole(answers[name])
    assert finished.usage.generated_tokens == len(ids)
    if finished.matched_token_id is not None:
        assert ids.pop() == finished.matched_token_id  # its text is not sent
    keep = CASES[name][1].get("keep_special_tokens", False)
    assert text == client.detokenize(ids, keep_special_tokens=keep)


@pytest.mark.parametrize("name", ["chinese", "emoji", "hot chinese", "boiling"])
def test_no_chunk_cuts_a_character(client, answers, name):
    chunks = answers[name][1:-1]
    for chunk in chunks:
        assert chunk.text.encode().decode() == chunk.text
    if name in {"chinese", "emoji"}:
        assert "\ufffd" not in "".join(chunk.text for chunk in chunks)
        assert any(client.detokenize(chunk.token_ids) == "\ufffd" and not chunk.text for chunk in chunks)


def test_a_chat_ends_with_the_models_own_token(client, answers):
    text, ids, finished = whole(answers["chat"])
    assert finished.reason == "end_of_sequence"
    assert ids[-1] == finished.matched_token_id
    assert "<|im_end|>" not in text
    assert client.detokenize([ids[-1]], keep_special_tokens=True) == "<|im_end|>"
    assert whole(answers["chat beyond its end"])[1][: len(ids)] == ids


@pytest.mark.parametrize("length", [1, 3, 9])
def test_a_stop_string_ends_and_never_leaks(client, answers, length):
    free = whole(answers["greedy"])[0]
    stop = free[20 : 20 + length]
    result = answer(client, max_tokens=40, stop=[stop, "never comes"])
    assert result.text == free[: free.index(stop)]
    assert result.finished.reason == "stop_string"
    assert result.finished.matched_stop == stop


def test_a_stop_string_that_only_begins_is_given_back_at_the_end(client, answers):
    free = client.detokenize(whole(answers["greedy"])[1][:12])
    result = answer(client, max_tokens=12, stop=free[-4:] + "☃")
    assert result.text == free
    assert result.finished.reason == "length"
    assert result.finished.text


def test_a_stop_token_ends_without_its_text(client, answers):
    free = whole(answers["greedy"])[1]
    stop = free[5]
    at = free.index(stop)
    result = answer(client, stop_token_ids=[stop])
    assert list(result.token_ids) == free[: at + 1]
    assert result.text == client.detokenize(free[:at])
    assert (result.finished.reason, result.finished.matched_token_id) == ("stop_token", stop)


def test_text_ids_and_a_rendered_chat_are_one_prompt(client, answers):
    result = answer(client, list(client.tokenize(CHAT)), max_tokens=8)
    assert list(result.token_ids) == whole(answers["chat"])[1][:8]


def test_greedy_repeats_and_seeds_decide(client, answers):
    assert answer(client, max_tokens=8).token_ids == tuple(whole(answers["greedy"])[1][:8])
    hot = {"temperature": 1.5, "max_tokens": 12}
    first = answer(client, seed=11, **hot)
    assert answer(client, seed=11, **hot).token_ids == first.token_ids
    assert answer(client, seed=12, **hot).token_ids != first.token_ids


def test_a_drawn_seed_is_said_and_repeats_the_answer(client):
    first = answer(client, temperature=1.5, max_tokens=8)
    again = answer(client, temperature=1.5, max_tokens=8, seed=first.started.seed)
    assert again.token_ids == first.token_ids
    assert answer(client, temperature=1.5, max_tokens=1).started.seed != first.started.seed


def test_started_says_every_setting(client):
    started = answer(client, temperature=0.5, top_k=40, top_p=0.75, seed=2**64 - 1, max_tokens=2).started
    assert (started.temperature, started.top_k, started.top_p, started.seed) == (0.5, 40, 0.75, 2**64 - 1)
    assert started.model == "smollm"
    assert started.max_tokens == 2
    assert started.request_id
    silent = next(iter(client.generate(STORY)))
    assert silent.max_tokens == 1024 - silent.prompt_tokens


def test_requests_in_company_get_what_they_get_alone(client):
    jobs = [
        (STORY, {"seed": 1, "temperature": 1.2, "max_tokens": 8}),
        (CHINESE, {"seed": 2, "temperature": 0.9, "top_k": 50, "max_tokens": 12}),
        ("def fibonacci(n):\n", {"max_tokens": 8}),
        (STORY * 10, {"seed": 3, "temperature": 1.0, "top_p": 0.8, "max_tokens": 8}),
    ]
    alone = [answer(client, prompt, **options).token_ids for prompt, options in jobs]
    with ThreadPoolExecutor(len(jobs)) as pool:
        together = list(pool.map(lambda job: answer(client, job[0], **job[1]).token_ids, jobs))
    assert together == alone


def test_the_asyncio_client_gives_the_same(daemon, client):
    async def run():
        async with AsyncClient(daemon.address) as other:
            await other.wait_ready(10)
            results = await asyncio.gather(
                *(other.generate(STORY, temperature=0.0, max_tokens=8).answer() for _ in range(2))
            )
            ids = await other.tokenize(STORY)
            return results, ids, await other.detokenize(ids), (await other.status()).version

    results, ids, text, version = asyncio.run(run())
    assert {result.text for result in results} == {answer(client, max_tokens=8).text}
    assert ids == client.tokenize(STORY)
    assert text == STORY
    assert version == client.status().version


def test_tokenize_and_detokenize(client):
    text = "Grüße, 世界! 🙂\n\tif x:"
    assert client.detokenize(client.tokenize(text)) == text
    assert client.tokenize("x" * 5000)  # longer than the context: counting is what Tokenize is for
    assert client.detokenize([]) == ""


def test_timings_add_up(client):
    finished = answer(client, STORY * 5, max_tokens=4).finished
    assert finished.timings.prefill_seconds > 0
    assert finished.timings.decode_seconds > 0
    assert finished.timings.queue_seconds >= 0
    assert finished.timings.steps >= 4
