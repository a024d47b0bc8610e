"""The daemon under pressure, around a model that draws letters as fast as is wanted: full queues, slow readers, crowds,
engines that fail."""

from __future__ import annotations

import random
import threading
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc
import pytest

from edged import errors
from edged.client import Chunk
from edged.v1 import control_pb2, inference_pb2, inference_pb2_grpc

PROMPT = [5, 6, 7]
ON = {"temperature": 0.0, "ignore_eos": True}  # 0 and 2 are letters here and ends to the tokenizer


def wait_until_free(client, seconds=60.0):
    end = time.monotonic() + seconds
    while True:
        (model,) = client.status().models
        if model.pages_free == model.pages and model.running == model.waiting == 0:
            return
        assert time.monotonic() < end, model
        time.sleep(0.02)


def test_a_reader_that_stops_reading_costs_its_own_stream_alone(start_daemon):
    daemon = start_daemon(fake={}, model={"context_length": 8192}, queue={"stream_buffer": 64})
    # Without probing, HTTP/2's window stays at 64 KiB and fills soon.
    with (
        grpc.insecure_channel(daemon.address, [("grpc.http2.bdp_probe", 0)]) as channel,
        daemon.client() as client,
    ):
        request = inference_pb2.GenerateRequest(
            token_ids={"ids": PROMPT}, stops={"max_tokens": 8000, "ignore_eos": True}
        )
        stuck = inference_pb2_grpc.InferenceStub(channel).Generate(request)
        assert next(stuck).HasField("started")
        end = time.monotonic() + 60
        while "reads too slowly" not in daemon.log():
            assert time.monotonic() < end
            # Others go on as ever.
            assert len(client.generate(PROMPT, max_tokens=20, **ON).answer().token_ids) == 20
        wait_until_free(client)
        received: list[object] = []
        with pytest.raises(grpc.RpcError) as caught:
            received.extend(stuck)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "queue.stream_buffer" in caught.value.details()
        assert len(received) < 8000
    assert daemon.stop() == 0


def test_a_full_queue_refuses_with_a_hint(start_daemon):
    daemon = start_daemon(fake={"step_seconds": 0.02}, model={"max_sequences": 1}, queue={"capacity": 2})
    with daemon.client() as client:
        running = iter(client.generate(PROMPT, max_tokens=1000, **ON))
        assert any(isinstance(event, Chunk) for event in (next(running), next(running)))
        waiting = [client.generate(PROMPT, max_tokens=2, **ON) for _ in range(2)]
        end = time.monotonic() + 60
        while client.status().models[0].waiting < 2:
            assert time.monotonic() < end
            time.sleep(0.02)
        with pytest.raises(errors.ResourceExhaustedError) as caught:
            client.generate(PROMPT, max_tokens=2).answer()
        assert caught.value.retry_seconds > 0
        assert "2" in caught.value.message
        running.close()
        assert [len(generation.answer().token_ids) for generation in waiting] == [2, 2]
        wait_until_free(client)
    assert daemon.stop() == 0


def test_requests_that_a_hot_board_holds_back_are_counted_and_say_why(start_daemon, tmp_path):
    margin = tmp_path / "margin"
    margin.write_text("1.5")
    daemon = start_daemon(
        fake={"step_seconds": 0.05},
        environment={"FAKE_THERMAL_MARGIN": str(margin)},
        model={"max_sequences": 4},
        thermal={"max_requests": 1},
        metrics={"listen": "127.0.0.1:0"},
        queue={"capacity": 2},
    )
    with daemon.client() as client, ThreadPoolExecutor(2) as pool:
        end = time.monotonic() + 60
        while not client.status().notices:
            assert time.monotonic() < end
            time.sleep(0.02)
        running = iter(client.generate(PROMPT, max_tokens=1000, **ON))
        assert any(isinstance(event, Chunk) for event in (next(running), next(running)))
        waiting = [pool.submit(client.generate(PROMPT, max_tokens=2, **ON).answer) for _ in range(2)]
        while (
            model := client.status().models[0]
        ).waiting < 2 or not model.running:  # it reports now and then
            assert time.monotonic() < end
            time.sleep(0.02)
        assert (model.waiting, model.waiting_to_cool, model.running) == (2, 2, 1)
        status = client.status()
        assert "1.5 °C below throttling" in status.notices[0]
        assert "2 wait" in status.notices[0]
        with urllib.request.urlopen(f"http://{status.metrics_address}/metrics") as answer:
            text = answer.read().decode()
        for name in ("edged_requests_waiting", "edged_requests_waiting_to_cool"):
            assert f'{name}{{gen_ai_request_model="smollm"}} 2.0' in text
        with pytest.raises(
            errors.ResourceExhaustedError, match="the board is hot, and 2 requests wait"
        ) as caught:
            client.generate(PROMPT, max_tokens=2).answer()
        assert caught.value.retry_seconds > 0
        time.sleep(0.5)
        margin.write_text("40")
        for answer in waiting:
            assert answer.result(60).finished.timings.queue_seconds >= 0.5, (
                "what it waited for the board counts"
            )
        running.close()
        status = client.status()
        assert (status.models[0].waiting, status.models[0].waiting_to_cool, list(status.notices)) == (
            0,
            0,
            [],
        )
        assert status.models[0].queue_time.max >= 0.5
        wait_until_free(client)
    assert daemon.stop() == 0


def test_a_crowd_that_comes_and_goes(start_daemon):
    """Random clients, prompts, lengths, deadlines and cancels: each ends as it may, and nothing is left behind."""
    daemon = start_daemon(fake={"step_seconds": 0.0005}, queue={"capacity": 16})
    seed = random.Random(4711)
    jobs = [(seed.randrange(1, 200), seed.randrange(1, 60), seed.random(), seed.random()) for _ in range(240)]

    def run(job):
        prompt, tokens, patience, luck = job
        with daemon.client() as client:
            generation = client.generate(
                [token % 97 for token in range(prompt)],
                max_tokens=tokens,
                temperature=luck,
                seed=prompt,
                ignore_eos=True,
                timeout=0.001 + patience / 4 if luck < 0.2 else None,
            )
            if luck > 0.7:
                threading.Timer(patience / 20, generation.cancel).start()
            try:
                assert len(generation.answer().token_ids) == tokens
            except errors.DeadlineError:
                assert luck < 0.2
                return "too late"
            except errors.CancelledError:
                assert luck > 0.7
                return "cancelled"
            except errors.ResourceExhaustedError as error:
                assert error.retry_seconds is not None  # noqa: PT017 - one of four ends
                return "refused"
            return "finished"

    with ThreadPoolExecutor(32) as pool:
        outcomes = Counter(pool.map(run, jobs))
    assert min(outcomes[end] for end in ("finished", "cancelled", "too late")) > 5, outcomes
    with daemon.client() as client:
        wait_until_free(client)
        status = client.status()
        # What was answered to the end may have been cancelled on its way; what was cancelled at once may never come.
        assert outcomes["finished"] <= status.requests_finished
        assert outcomes["refused"] <= status.requests_failed
        assert status.requests_finished + status.requests_failed <= len(jobs)
        assert status.engine_restarts == 0
        assert client.generate(PROMPT, max_tokens=3, **ON).answer().text
    assert "Traceback" not in daemon.log()
    assert daemon.stop() == 0


def test_an_engine_that_fails_in_a_step(start_daemon):
    daemon = start_daemon(fake={"fail_at": 12})
    with daemon.client() as client:
        with pytest.raises(errors.EdgedError) as caught:
            client.generate(PROMPT, max_tokens=50, **ON).answer()
        assert caught.value.code in {errors.Code.INTERNAL, errors.Code.UNAVAILABLE}
        end = time.monotonic() + 60
        while (status := client.wait_ready(30)).engine_restarts == 0:  # it may not be noticed yet
            assert time.monotonic() < end
        assert status.engine_restarts == 1
        assert "fell off the bus" in status.last_error
        assert len(client.generate(PROMPT, max_tokens=3, **ON).answer().token_ids) == 3
    assert daemon.stop() == 0


def test_an_engine_that_never_comes_up_ends_the_daemon(start_daemon):
    daemon = start_daemon(fake={"exit_at_start": 3}, wait=False)
    with daemon.client() as client:
        states = set()
        while daemon.process.poll() is None:
            with suppress(errors.UnavailableError, errors.DeadlineError):
                states.add(client.status(timeout=1).state)
            time.sleep(0.02)
    assert control_pb2.STATE_RESTARTING in states
    assert control_pb2.STATE_SERVING not in states
    assert daemon.wait() == 75
    assert daemon.log_lines()[-1]["message"] == "cannot serve"
    assert not daemon.socket.exists()


@pytest.mark.parametrize(("error", "status"), [("CheckpointError", 66), ("LedgerError", 78)])
def test_a_model_that_does_not_load_ends_the_daemon_at_once(start_daemon, error, status):
    daemon = start_daemon(fake={"load_error": error}, wait=False)
    assert daemon.wait() == status
    assert "smollm does not load" in daemon.log_lines()[-1]["reason"]


def test_while_it_loads_it_says_so(start_daemon):
    daemon = start_daemon(fake={"load_seconds": 6}, wait=False)
    with daemon.client(wait_for_ready=True) as patient:
        status = patient.status()
        assert status.state == status.models[0].state == control_pb2.STATE_LOADING
        with daemon.client() as client, pytest.raises(errors.UnavailableError) as caught:
            client.generate(PROMPT).answer()
        assert caught.value.retry_seconds > 0
        assert not caught.value.lost
        with pytest.raises(errors.DeadlineError, match=r"loads its models|is loading|the deadline passed"):
            patient.generate(PROMPT, timeout=0.3).answer()
        with pytest.raises(errors.DeadlineError, match="loading"):
            patient.wait_ready(0.2)
        assert len(patient.generate(PROMPT, max_tokens=2, timeout=60, **ON).answer().token_ids) == 2
        assert patient.status().state == control_pb2.STATE_SERVING
    assert daemon.stop() == 0


def test_headers_beyond_reason(start_daemon):
    daemon = start_daemon(fake={})
    with grpc.insecure_channel(daemon.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Detokenize(inference_pb2.DetokenizeRequest(), metadata=[("x", "y" * 200_000)])
        assert caught.value.code() in {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
        assert stub.Detokenize(inference_pb2.DetokenizeRequest()).text == ""
    assert daemon.stop() == 0
