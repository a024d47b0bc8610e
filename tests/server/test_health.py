"""The health service over a real socket."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from edged.server.health import INFERENCE, Health, model_service
from edged.server.methods import service_handler

SERVING, NOT_SERVING, UNKNOWN = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
    health_pb2.HealthCheckResponse.SERVICE_UNKNOWN,
)


@asynccontextmanager
async def serving():
    health = Health(("smollm",))
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (service_handler(health_pb2.DESCRIPTOR.services_by_name["Health"], health),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield health, health_pb2_grpc.HealthStub(channel)
    await server.stop(None)


def ask(service: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


def test_check_and_list():
    async def run():
        async with serving() as (health, stub):
            assert (await stub.Check(ask(""))).status == NOT_SERVING
            health.set_serving({"": True, INFERENCE: True, model_service("smollm"): False})
            assert (await stub.Check(ask(""))).status == SERVING
            listed = (await stub.List(health_pb2.HealthListRequest())).statuses
            assert {name: response.status for name, response in listed.items()} == {
                "": SERVING,
                "edged.v1.Inference": SERVING,
                "model/smollm": NOT_SERVING,
            }
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Check(ask("model/other"))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            assert "model/smollm" in caught.value.details()

    asyncio.run(run())


def test_watch_sees_every_change_and_the_end():
    async def run():
        async with serving() as (health, stub):
            watch, unknown = stub.Watch(ask("model/smollm")), stub.Watch(ask("model/other"))
            assert (await watch.read()).status == NOT_SERVING
            assert (await unknown.read()).status == UNKNOWN
            for is_serving in (True, False, True):
                health.set_serving({"model/smollm": is_serving})
                assert (await watch.read()).status == (SERVING if is_serving else NOT_SERVING)
            health.close()
            assert (await watch.read()).status == NOT_SERVING
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await watch.read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    asyncio.run(run())


def test_a_watcher_that_does_not_read_holds_up_nobody():
    async def run():
        async with serving() as (health, stub):
            stuck = stub.Watch(ask(""))
            await stuck.initial_metadata()
            for turn in range(2000):
                health.set_serving({"": turn % 2 == 0})
                if turn % 100 == 0:
                    await asyncio.sleep(0)
            assert (await asyncio.wait_for(stub.Check(ask("")), 5)).status == NOT_SERVING
            stuck.cancel()

    asyncio.run(run())
