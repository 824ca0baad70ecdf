"""The Conductor over real gRPC: calls, streams, leader and standby, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from conductor.config import ConductorConfig
from conductor.core import Conductor
from conductor.service import ConductorService
from conductor.telemetry import Telemetry
from mooncake.common.block_key import pack_keys
from mooncake.common.clock import MonotonicClock
from mooncake.common.ids import BlockKey
from mooncake.common.metrics import render
from mooncake.common.proto import conductor_pb2 as pb
from mooncake.common.proto import conductor_pb2_grpc
from mooncake.common.rpc import aio_channel, make_server
from tests.conductor.helpers import BLOCK, MODEL, keys


class FixedPool:
    tokens = 0

    async def prefix_tokens(self, keys: Sequence[BlockKey], block_size: int) -> int:
        return self.tokens


class Served:
    """A Conductor on a loopback port, and a client of it."""

    def __init__(self) -> None:
        self.leads = True
        self.core = Conductor(ConductorConfig())
        self.pool = FixedPool()
        self.registry = CollectorRegistry()
        clock = MonotonicClock()
        telemetry = Telemetry(self.registry, self.core, clock, leads=lambda: self.leads)
        service = ConductorService(
            self.core, self.pool, telemetry, clock, leads=lambda: self.leads, leader_address=lambda: "10.0.0.7:1234"
        )
        self.server, self.address = make_server("127.0.0.1:0", token="secret")
        conductor_pb2_grpc.add_ConductorServicer_to_server(service, self.server)
        self.channel = aio_channel(self.address, "secret")
        self.stub = conductor_pb2_grpc.ConductorStub(self.channel)

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"mooncake_conductor_{name}", labels)

    async def attach(self, name: str, *roles: str, stored: Sequence[BlockKey] = (), **fields: Any) -> Any:
        call = self.stub.Attach()
        await call.write(report(name, 0, *roles, snapshot=True, stored=pack_keys(stored), **fields))
        assert (await call.read()).sequence == 0
        return call


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    served = Served()
    await served.server.start()
    yield served
    await served.channel.close()
    await served.server.stop(grace=None)


def report(name: str, sequence: int, *roles: str, **fields: Any) -> pb.WorkerReport:
    fields.setdefault("instance_id", f"{name}-life")
    return pb.WorkerReport(
        name=name, model=MODEL, roles=roles, sequence=sequence, block_size=BLOCK, http_url=f"http://{name}", **fields
    )


def ask(request_id: str, prompt: Sequence[BlockKey] = (), **fields: Any) -> pb.PlaceRequest:
    fields.setdefault("prompt_tokens", max(1, len(prompt)) * BLOCK)
    fields.setdefault("model", MODEL)
    return pb.PlaceRequest(request_id=request_id, block_keys=pack_keys(prompt), block_size=BLOCK, **fields)


async def ended_with(call: Any) -> tuple[grpc.StatusCode, str]:
    """Code and details of a stream that the server ends."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value.code(), caught.value.details() or ""


async def until(what: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_request_from_placement_to_its_end(served: Served) -> None:
    prompt = keys(20)
    await served.attach("p0", "prefill", stored=prompt[:10])
    await served.attach("d0", "decode")
    served.pool.tokens = 1600
    placement = (await served.stub.Place(ask("r1", prompt))).placement
    assert (placement.prefill.name, placement.decode.name) == ("p0", "d0")
    assert placement.prefill.http_url == "http://p0"
    assert placement.prefill.instance_id == "p0-life"
    assert (placement.prefix_tokens, placement.pool_prefix_tokens) in ((1000, 1600), (1000, 0))
    assert placement.estimate.ttft_s > 0
    kinds = (pb.PREFILL_STARTED, pb.PREFILL_FINISHED, pb.FIRST_TOKEN, pb.FINISHED)
    events = [pb.RequestEvent(request_id="r1", kind=kind, at_s=0.1 * i) for i, kind in enumerate(kinds)]
    await served.stub.Report(pb.ReportRequest(events=events))
    status = await served.stub.Status(pb.StatusRequest())
    assert (status.placed_total, status.placements_in_flight, status.leader) == (1, 0, True)
    by_name = {each.name: each for each in status.instances}
    assert (by_name["p0"].held_blocks, by_name["p0"].attached, by_name["p0"].events_seen) == (10, True, 10)
    assert served.metric("placements_total") == 1
    assert served.metric("ttft_estimate_error_seconds_count") == 1
    assert served.metric("worker_events_seen", worker="d0", model=MODEL) == 0
    assert served.metric("place_seconds_count", part="core") == 1
    assert b"mooncake_conductor_index_keys 10.0" in render(served.registry)[0]


async def test_rejections_come_as_answers(served: Served) -> None:
    unknown = (await served.stub.Place(ask("a"))).rejection
    assert (unknown.status, unknown.reason) == (404, "rejected-unknown-model")
    await served.attach("p0", "prefill")
    missing = (await served.stub.Place(ask("b"))).rejection
    assert (missing.status, missing.reason) == (503, "rejected-no-endpoints")
    assert served.metric("rejections_total", reason="rejected-no-endpoints") == 1


async def test_malformed_calls_are_invalid_arguments(served: Served) -> None:
    for bad in (
        pb.PlaceRequest(model=MODEL, prompt_tokens=5),
        ask("a", prompt_tokens=0),
        pb.PlaceRequest(request_id="a", model=MODEL, prompt_tokens=5, block_keys=b"short"),
        ask("a", keys(5), prompt_tokens=10),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.stub.Place(bad)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    call = served.stub.Attach()
    await call.write(pb.WorkerReport(name="x"))
    assert (await ended_with(call))[0] is grpc.StatusCode.INVALID_ARGUMENT


async def test_one_stream_speaks_for_one_instance(served: Served) -> None:
    call = await served.attach("p0", "prefill")
    await call.write(report("p1", 1, "prefill"))
    assert (await ended_with(call))[0] is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_gap_asks_for_a_snapshot(served: Served) -> None:
    call = await served.attach("p0", "prefill")
    for sequence, snapshot, wanted in ((1, False, False), (3, False, True), (4, True, False)):
        await call.write(report("p0", sequence, "prefill", snapshot=snapshot))
        assert (await call.read()).want_snapshot is wanted


async def test_a_broken_stream_makes_a_suspect_and_a_new_one_mends_it(served: Served) -> None:
    call = await served.attach("d0", "decode")
    call.cancel()
    await until(lambda: served.metric("worker_suspect", worker="d0", model=MODEL) == 1)
    again = await served.attach("d0", "decode")
    assert served.metric("worker_suspect", worker="d0", model=MODEL) == 0
    newer = await served.attach("d0", "decode")
    again.cancel()  # the old stream ends after the new one began: no suspicion
    await newer.write(report("d0", 1, "decode"))
    await newer.read()
    assert served.metric("worker_attached", worker="d0", model=MODEL) == 1


async def test_a_standby_names_the_leader(served: Served) -> None:
    call = await served.attach("p0", "prefill")
    served.leads = False
    for answer in (served.stub.Place(ask("a")), served.stub.Report(pb.ReportRequest())):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "10.0.0.7:1234" in (caught.value.details() or "")
    await call.write(report("p0", 1, "prefill"))
    assert "10.0.0.7:1234" in (await ended_with(call))[1]
    assert (await served.stub.Status(pb.StatusRequest())).leader is False


async def test_two_hundred_placements_at_once_leave_nothing(served: Served) -> None:
    for name, role in (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode"), ("d1", "decode")):
        await served.attach(name, role)
    answers = await asyncio.gather(*(served.stub.Place(ask(f"r{i}", keys(10, salt=i))) for i in range(200)))
    names = [answer.placement.decode.name for answer in answers]
    assert (names.count("d0"), names.count("d1")) == (100, 100)
    events = [pb.RequestEvent(request_id=f"r{i}", kind=pb.FINISHED) for i in range(200)]
    await served.stub.Report(pb.ReportRequest(events=events))
    assert served.core.in_flight == 0


async def test_the_cluster_token_is_needed(served: Served) -> None:
    stranger = aio_channel(served.address, "wrong")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await conductor_pb2_grpc.ConductorStub(stranger).Status(pb.StatusRequest())
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    await stranger.close()
