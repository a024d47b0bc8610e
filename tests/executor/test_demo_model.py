"""The demo model in fp32, held to transformers reading the same GGUF."""

from __future__ import annotations

import numpy as np
import pytest
from executor_runner import Runner, assert_choices, assert_greedy, load, reference_logits

TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "SELECT name, COUNT(*) FROM users WHERE",
    "中国的首都是",
    "机器人走进房间里看见",
    "1, 1, 2, 3, 5, 8, 13,",
)
CHATS = (
    "What is the largest planet?",
    "Write a haiku about rain.",
    "用中文介绍一下你自己。",
)
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
PROMPTS = (*TEXTS, *(CHAT.format(question) for question in CHATS))
CONTEXT = 3200


@pytest.fixture(scope="module")
def executor(demo_model):
    executor = load(demo_model, dtype="float32", context_length=256, max_sequences=12, prefill_chunk=512)
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def long_executor(demo_model):
    """One sequence: the pages of twelve that are as long take longer to clear than the model to load."""
    executor = load(demo_model, dtype="float32", context_length=CONTEXT, max_sequences=1, prefill_chunk=512)
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def long_prompt(demo_tokenizer):
    """3000 tokens of varied, meaningful text."""
    sentence = "On day {0} the robot drove {1} metres, met {2} people and wrote: {3}. "
    text = "".join(
        sentence.format(day, day * 37 % 101, day % 7, TEXTS[day % len(TEXTS)]) for day in range(1, 200)
    )
    ids = demo_tokenizer.encode(text).ids[:3000]
    assert len(ids) == 3000
    return ids


def test_prompt_logits_are_those_of_transformers(executor, remembered_reference, demo_tokenizer):
    runner = Runner(executor)
    for prompt in PROMPTS[::3]:
        ids = demo_tokenizer.encode(prompt).ids
        ours = runner.prefill(runner.sequence(ids), 512)
        np.testing.assert_allclose(ours, reference_logits(remembered_reference, ids), rtol=0, atol=1e-3)


def test_64_greedy_tokens_of_ten_prompts_in_shared_steps(executor, remembered_reference, demo_tokenizer):
    runner = Runner(executor)
    prompts = [demo_tokenizer.encode(prompt).ids for prompt in PROMPTS]
    answers = runner.generate([runner.sequence(ids, room=64) for ids in prompts], 64)
    for ids, answer in zip(prompts, answers, strict=True):
        assert_greedy(remembered_reference, ids, answer)


def test_two_interleaved_requests_give_what_each_gives_alone(executor, demo_tokenizer):
    prompts = [demo_tokenizer.encode(PROMPTS[index]).ids for index in (1, 9)]
    alone = []
    for ids in prompts:
        runner = Runner(executor)
        alone.append(runner.generate([runner.sequence(ids, room=16)], 16)[0])
    runner = Runner(executor)
    first, second = (runner.sequence(ids, room=16) for ids in prompts)
    got: list[list[int]] = [[], []]
    while len(got[1]) < 16:  # the second joins while the first decodes, its prompt in pieces of 5
        parts, who = [], []
        if len(got[0]) < 16:
            parts.append((first, 1 if got[0] else len(first.tokens)))
            who.append(0)
        if got[0]:
            parts.append((second, 1 if got[1] else 5))
            who.append(1)
        drawn = executor.step(runner.batch(parts))
        for (sequence, count), index, token in zip(parts, who, drawn.tolist(), strict=True):
            sequence.stored += len(sequence.take(count))
            if sequence.stored == len(sequence.tokens):
                sequence.tokens.append(token)
                got[index].append(token)
    assert got == alone


def test_chunk_sizes_give_identical_tokens(executor, remembered_reference, long_prompt):
    runner = Runner(executor)
    prompts = [long_prompt[100 : 100 + length] for length in (1, 64, 65)]
    found = []
    for chunk in (
        1,
        7,
        64,
        512,
    ):  # the three prompts together: a step of three tokens takes little more than one of one
        sequences = [(runner.sequence(ids, room=16), ids) for ids in prompts]
        while parts := [(sequence, chunk) for sequence, ids in sequences if sequence.stored < len(ids)]:
            drawn = executor.step(runner.batch(parts)).tolist()
            for (sequence, _), token in zip(parts, drawn, strict=True):
                sequence.stored += len(sequence.take(chunk))
                if sequence.stored == len(sequence.tokens):
                    sequence.tokens.append(token)
        found.append([sequence for sequence, _ in sequences])
    everyone = [sequence for sequences in found for sequence in sequences]
    for _ in range(15):
        drawn = executor.step(runner.batch([(sequence, 1) for sequence in everyone])).tolist()
        for sequence, token in zip(everyone, drawn, strict=True):
            sequence.stored += 1
            sequence.tokens.append(token)
    for ids, *alike in zip(prompts, *found, strict=True):
        assert all(sequence.tokens == alike[0].tokens for sequence in alike)
        assert_greedy(remembered_reference, ids, alike[0].tokens[len(ids) :])


def test_a_prompt_of_3000_tokens(long_executor, remembered_reference, long_prompt):
    runner = Runner(long_executor)
    sequence = runner.sequence(long_prompt, room=16)
    logits = runner.prefill(sequence, 512, rows="last")
    sequence.tokens.append(int(logits[-1].argmax()))
    answer = runner.generate([sequence], 15)
    whole = reference_logits(remembered_reference, sequence.tokens[:-1], keep=16)
    np.testing.assert_allclose(logits[0], whole[0], rtol=0, atol=1e-3)
    assert_choices(whole, [sequence.tokens[3000], *answer[0]])


@pytest.mark.soak
def test_64_tokens_after_3000_do_not_depend_on_the_chunks(long_executor, remembered_reference, long_prompt):
    answers = []
    for chunk in (1, 7, 64, 512):
        runner = Runner(long_executor)
        sequence = runner.sequence(long_prompt, room=64)
        logits = runner.prefill(sequence, chunk, rows="last")
        sequence.tokens.append(int(logits[-1].argmax()))
        answers.append([sequence.tokens[3000], *runner.generate([sequence], 63)[0]])
    assert all(answer == answers[0] for answer in answers)
    assert_greedy(remembered_reference, long_prompt, answers[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_close_to_fp32(demo_model, remembered_reference, demo_tokenizer, dtype):
    ids = demo_tokenizer.encode(PROMPTS[1]).ids
    expected = reference_logits(remembered_reference, ids)
    executor = load(demo_model, dtype=dtype, context_length=256, max_sequences=4, prefill_chunk=64)
    runner = Runner(executor)
    spread = expected.std()
    for chunk in (1, 64):  # narrow products, and widened ones
        ours = runner.prefill(runner.sequence(ids), chunk)
        bound = 0.04 if dtype == "bfloat16" else 0.006  # about 5 and 6 times what is seen
        assert np.abs(ours - expected).mean() / spread < bound
    executor.close()


@pytest.mark.soak
def test_hidden_states_are_those_of_transformers(long_executor, demo_reference, demo_tokenizer, long_prompt):
    import torch

    for ids in (demo_tokenizer.encode(PROMPTS[1]).ids, long_prompt[:700]):
        with torch.inference_mode():
            states = demo_reference.model(input_ids=torch.tensor([ids])).last_hidden_state[0].numpy()
        runner = Runner(long_executor)
        found = runner.hidden_states(runner.sequence(ids), 500)
        np.testing.assert_allclose(found, states, rtol=0, atol=1e-3 * np.abs(states).max())
