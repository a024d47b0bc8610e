"""What a client is told of a model in each of its states, and what becomes of it."""

from __future__ import annotations

import asyncio
from unittest.mock import patch

import pytest
from supervised import make_config, make_submit, run_supervised, until

from edged.errors import CheckpointError, FailedPreconditionError, UnavailableError


def refused(supervisor, kind, said):
    with pytest.raises(kind, match=said) as caught:
        supervisor.submit(make_submit("a", model="second"))
    return caught.value


def test_each_state_of_a_model_has_its_code_and_its_advice():
    async def body(supervisor):
        control, report_of = supervisor.control, supervisor.report_of
        running = supervisor.submit(make_submit("runs", max_tokens=10_000, model="second"))
        unloading = asyncio.create_task(control.unload("second", cancel=False))
        await until(lambda: report_of("second").state == "unloading")
        error = refused(
            supervisor, FailedPreconditionError, r"being unloaded.*edgectl load second loads it again"
        )
        assert error.retry_seconds is None
        running.cancel("enough")
        await unloading
        error = refused(supervisor, FailedPreconditionError, "is not loaded; edgectl load second loads it")
        assert error.retry_seconds is None

        loading = asyncio.create_task(control.load("second"))
        await until(lambda: report_of("second").state == "loading")
        error = refused(supervisor, UnavailableError, r"second is loading: try again in [0-9.]+ s$")
        assert error.retry_seconds >= 0.5
        assert "edgectl load" not in error.message
        await loading
        assert [event async for event in supervisor.submit(make_submit("b", model="second"))]

    run_supervised(
        body, make_config(context_length=16_384, stream_buffer=16_384), slow_load=0.05, step_seconds=0.005
    )


def test_a_load_that_failed_is_named_until_the_next_one():
    async def body(supervisor):
        control = supervisor.control
        await control.unload("second", cancel=False)
        with (
            patch.object(supervisor, "change", side_effect=CheckpointError("config.json is missing")),
            pytest.raises(CheckpointError),
        ):
            await control.load("second")
        refused(
            supervisor, FailedPreconditionError, r"its last load failed .config.json is missing.*tries again"
        )
        await control.load("second")
        await control.unload("second", cancel=False)
        refused(supervisor, FailedPreconditionError, "is not loaded; edgectl load second loads it")

    run_supervised(body, make_config())


def test_a_request_that_unloading_cuts_off_is_told_what_brings_the_model_back():
    async def body(supervisor):
        stream = supervisor.submit(make_submit("runs", max_tokens=10_000, model="second"))
        await supervisor.control.unload("second", cancel=True)
        with pytest.raises(
            FailedPreconditionError, match=r"was unloaded before.*edgectl load second"
        ) as caught:
            async for _ in stream:
                pass
        assert caught.value.retry_seconds is None

    run_supervised(body, make_config(context_length=16_384, stream_buffer=16_384), step_seconds=0.005)
