"""How every call reads, fails and ends, over a real socket."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2

from edged import errors
from edged.server.methods import service_handler
from edged.v1 import inference_pb2, inference_pb2_grpc


class Servicer:
    """Does what the text of the request says."""

    def __init__(self):
        self.ended = asyncio.Event()

    async def Generate(self, request, context):  # noqa: N802
        try:
            await context.write(inference_pb2.GenerateResponse(started={"request_id": "1"}))
            if request.text == "wait":
                await asyncio.sleep(60)
            if request.text == "flood":
                while True:
                    await context.write(inference_pb2.GenerateResponse(chunk={"text": "x" * 10_000}))
            self.fail(request.text)
        finally:
            self.ended.set()

    async def Tokenize(self, request, _context):  # noqa: N802
        self.fail(request.text)
        return inference_pb2.TokenizeResponse(rendered=request.text)

    async def Embed(self, _request, _context):  # noqa: N802
        raise AssertionError("not called")

    async def Detokenize(self, _request, _context):  # noqa: N802
        raise AssertionError("not called")

    @staticmethod
    def fail(text):
        if text == "bug":
            raise ValueError("the secret prompt")
        if text == "quota":
            raise errors.ResourceExhaustedError("full", field="queue", retry_seconds=2.0)


def run(test):
    """Run `test(servicer, stub, channel)` against a server."""

    async def main():
        server = grpc.aio.server()
        servicer = Servicer()
        handler = service_handler(inference_pb2.DESCRIPTOR.services_by_name["Inference"], servicer)
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await asyncio.wait_for(test(servicer, inference_pb2_grpc.InferenceStub(channel), channel), 30)
        await server.stop(None)

    asyncio.run(main())


async def failure(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def details(error) -> status_pb2.Status:
    return status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])


def test_an_answer_comes_through():
    async def test(_servicer, stub, _channel):
        assert (await stub.Tokenize(inference_pb2.TokenizeRequest(text="Grüße"))).rendered == "Grüße"

    run(test)


def test_a_typed_error_becomes_its_status_with_details():
    async def test(_servicer, stub, _channel):
        error = await failure(stub.Tokenize(inference_pb2.TokenizeRequest(text="quota")))
        assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        status = details(error)
        assert (status.code, status.message) == (8, "full")
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in status.details)
        assert retry.retry_delay.seconds == 2

    run(test)


def test_a_stream_gives_what_it_has_and_then_the_error():
    async def test(_servicer, stub, _channel):
        call = stub.Generate(inference_pb2.GenerateRequest(text="quota"))
        assert (await call.read()).HasField("started")
        assert (await failure(call.read())).code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    run(test)


@pytest.mark.parametrize("method", ["Tokenize", "Generate"])
def test_a_fault_of_ours_is_internal_and_says_nothing_of_its_text(method):
    async def test(_servicer, stub, _channel):
        if method == "Tokenize":
            error = await failure(stub.Tokenize(inference_pb2.TokenizeRequest(text="bug")))
        else:
            call = stub.Generate(inference_pb2.GenerateRequest(text="bug"))
            await call.read()
            error = await failure(call.read())
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in error.details()
        assert f"edged.v1.Inference.{method}" in error.details()

    run(test)


def test_an_unreadable_request_does_not_reach_the_servicer():
    async def test(_servicer, _stub, channel):
        error = await failure(channel.unary_unary("/edged.v1.Inference/Detokenize")(b"\x0a\x02\xff\xff"))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "model is not UTF-8" in error.details()

    run(test)


@pytest.mark.parametrize("text", ["wait", "flood"])
def test_a_client_that_goes_away_ends_the_servicer(text, caplog):
    async def test(servicer, stub, _channel):
        call = stub.Generate(inference_pb2.GenerateRequest(text=text))
        await call.read()
        call.cancel()
        await asyncio.wait_for(servicer.ended.wait(), 10)

    run(test)
    assert not [record for record in caplog.records if record.levelname in {"ERROR", "CRITICAL"}]
