"""Servers and channels of all roles: the token, the mapped errors, and a taken port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mooncake.common.auth import check_bearer, derive_key
from mooncake.common.errors import (
    AuthenticationFailed,
    MooncakeError,
    NoSpace,
    ObjectNotFound,
    Overloaded,
    PeerUnavailable,
    StoreUnavailable,
)
from mooncake.common.proto import conductor_pb2, conductor_pb2_grpc
from mooncake.common.rpc import abort_with, aio_channel, make_server, sync_channel, to_mooncake_error


class Conductor(conductor_pb2_grpc.ConductorServicer):
    """Answers one unary and one streaming call."""

    async def Status(self, request: object, context: grpc.aio.ServicerContext) -> conductor_pb2.StatusResponse:
        return conductor_pb2.StatusResponse(placed_total=7)

    async def Place(
        self, request: conductor_pb2.PlaceRequest, context: grpc.aio.ServicerContext
    ) -> conductor_pb2.PlaceResponse:
        errors = {"busy": Overloaded("too busy"), "full": NoSpace("full"), "missing": ObjectNotFound("gone")}
        await abort_with(context, errors[request.model])

    async def Attach(
        self, request_iterator: AsyncIterator[conductor_pb2.WorkerReport], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[conductor_pb2.WorkerAck]:
        async for report in request_iterator:
            yield conductor_pb2.WorkerAck(sequence=report.sequence)


async def serve(token: str) -> tuple[grpc.aio.Server, str]:
    server, address = make_server("127.0.0.1:0", token=token)
    conductor_pb2_grpc.add_ConductorServicer_to_server(Conductor(), server)
    await server.start()
    return server, address


@pytest.mark.parametrize("token", ["", "secret"])
async def test_calls_with_the_token(token: str) -> None:
    server, address = await serve(token)
    async with aio_channel(address, token) as channel:
        stub = conductor_pb2_grpc.ConductorStub(channel)
        assert (await stub.Status(conductor_pb2.StatusRequest(), timeout=5)).placed_total == 7
        stream = stub.Attach(timeout=5)
        for i in range(3):
            await stream.write(conductor_pb2.WorkerReport(sequence=i))
            assert (await stream.read()).sequence == i
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF

    def blocking() -> int:
        with sync_channel(address, token) as channel:
            stub = conductor_pb2_grpc.ConductorStub(channel)
            assert [a.sequence for a in stub.Attach(iter([conductor_pb2.WorkerReport(sequence=4)]), timeout=5)] == [4]
            return int(stub.Status(conductor_pb2.StatusRequest(), timeout=5).placed_total)

    assert await asyncio.to_thread(blocking) == 7
    await server.stop(None)


@pytest.mark.parametrize("given", ["", "wrong"])
async def test_calls_without_it_are_refused_but_health(given: str) -> None:
    server, address = await serve("secret")
    async with aio_channel(address, given) as channel:
        stub = conductor_pb2_grpc.ConductorStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Status(conductor_pb2.StatusRequest(), timeout=5)
        assert isinstance(to_mooncake_error(refused.value), AuthenticationFailed)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Attach(iter([conductor_pb2.WorkerReport()]), timeout=5).read()
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
    await server.stop(None)


async def test_errors_cross_the_wire() -> None:
    server, address = await serve("")
    async with aio_channel(address, "") as channel:
        stub = conductor_pb2_grpc.ConductorStub(channel)
        for model, expected in (("busy", Overloaded), ("missing", ObjectNotFound), ("full", MooncakeError)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Place(conductor_pb2.PlaceRequest(model=model), timeout=5)
            assert type(to_mooncake_error(caught.value)) is expected
    await server.stop(None)
    async with aio_channel(address, "") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await conductor_pb2_grpc.ConductorStub(channel).Status(conductor_pb2.StatusRequest(), timeout=5)
        assert type(to_mooncake_error(caught.value)) is PeerUnavailable
        assert type(to_mooncake_error(caught.value, unavailable=StoreUnavailable)) is StoreUnavailable


async def test_taken_port_is_a_clear_error() -> None:
    server, address = await serve("")
    with pytest.raises(MooncakeError, match=address):
        make_server(address, token="")
    await server.stop(None)


def test_tokens() -> None:
    assert derive_key("", "engine") == ""
    assert derive_key("t", "engine") != derive_key("t", "transfer") != derive_key("u", "transfer")
    assert len(derive_key("t", "engine")) == 64
    assert check_bearer(None, "") and check_bearer("anything", "")
    assert check_bearer("Bearer s", "s") and check_bearer("bearer s", "s")
    for wrong in (None, "", "s", "Bearer", "Bearer t", "Basic s", "Bearer é"):
        assert not check_bearer(wrong, "s")
