"""Start-up of the role `conductor`: wires core, service, store look-up, registry and metrics together.

Several Conductors may run: all watch the registry, one leads. Losing etcd changes nothing for a leader (election.py).
Knows: life cycles. Does not know: policy, calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, Literal

from aiohttp import web
from google.protobuf.json_format import MessageToDict

from conductor import wire
from conductor.config import ConductorConfig
from conductor.core import Conductor
from conductor.pool import StorePool
from conductor.service import ConductorService
from conductor.telemetry import Telemetry
from mooncake.common.clock import Clock, MonotonicClock
from mooncake.common.config import ClusterConfig
from mooncake.common.election import Leadership
from mooncake.common.ids import InstanceId, InstanceName
from mooncake.common.net import format_address
from mooncake.common.proto import conductor_pb2_grpc
from mooncake.common.registry import InstanceRecord, Registry
from mooncake.common.role import Role
from mooncake.common.rpc import make_server

_log = logging.getLogger(__name__)
_TICK_S = 1.0
_PREFILLS_UNTIL_WARNING = 20


async def run(cluster: ClusterConfig, config: ConductorConfig, *, name: str, port: int | None = None) -> None:
    """Serves until SIGTERM or SIGINT. Raises MooncakeError when the port is taken."""
    clock, core, term = MonotonicClock(), Conductor(config), Term()
    async with Role(cluster, "conductor", name) as role:
        registry = role.registry
        telemetry = Telemetry(role.metrics, core, clock, leads=lambda: term.leads)
        pool = StorePool(config, clock, lambda: _store_master(config, registry), token=cluster.cluster_token)
        telemetry.pool_failures = lambda: pool.failures
        telemetry.pool_breaker_open = lambda: pool.breaker.is_open
        service = ConductorService(
            core, pool, telemetry, clock, leads=lambda: term.leads, leader_address=lambda: _leader_address(registry)
        )
        server, address = make_server(format_address(cluster.host, port or 0), token=cluster.cluster_token)
        conductor_pb2_grpc.add_ConductorServicer_to_server(service, server)
        await server.start()
        registry.watch("worker", lambda kind, record: follow(core, clock, kind, record))
        leading = asyncio.create_task(_lead(term, core, clock, registry, name, role.instance_id, address), name="lead")
        ticking = asyncio.create_task(_tick(core, clock), name="tick")
        await role.serve_http(
            ready=lambda: term.leads or bool(_leader_address(registry)), routes=[_status_route(core, clock, term)]
        )
        await role.register(address=address)
        try:
            await role.wait_for_stop(leading, ticking)
        finally:
            for task in (leading, ticking):
                task.cancel()
            await asyncio.gather(leading, ticking, return_exceptions=True)
            if term.leadership is not None:
                await term.leadership.resign()
            await server.stop(grace=1.0)
            await pool.close()


class Term:
    """Whether this process leads at the moment."""

    def __init__(self) -> None:
        self.leadership: Leadership | None = None

    @property
    def leads(self) -> bool:
        return self.leadership is not None and not self.leadership.lost.is_set()


async def _lead(
    term: Term, core: Conductor, clock: Clock, registry: Registry, name: str, instance_id: str, address: str
) -> None:
    """Leads whenever it can, for ever."""
    while True:
        leadership = await registry.campaign("conductor", name, instance_id, address)
        core.begin_term(clock.now())
        term.leadership = leadership
        await leadership.lost.wait()
        _log.warning("no longer leading")


async def _tick(core: Conductor, clock: Clock) -> None:
    warned: set[str] = set()
    while True:
        await asyncio.sleep(_TICK_S)
        core.tick(clock.now())
        for each in core.fleet:
            if not each.events_seen and each.prefills_seen >= _PREFILLS_UNTIL_WARNING and each.name not in warned:
                warned.add(each.name)
                text = "worker computes prompts but tells no KV events: its cache is invisible to placement"
                _log.warning(text, extra={"fields": {"worker": each.name}})


def follow(core: Conductor, clock: Clock, kind: Literal["up", "changed", "down"], record: InstanceRecord) -> None:
    """One change of the registry's picture of workers. A record that does not say its model is logged and left out."""
    instance_id = InstanceId(record.instance_id)
    if kind == "down":
        core.instance_down(instance_id, clock.now())
        return
    info: dict[str, Any] = record.info
    model, roles = info.get("model"), info.get("roles")
    if not isinstance(model, str) or not isinstance(roles, list):
        _log.warning("worker's record names no model or roles", extra={"fields": {"worker": record.name}})
        return
    core.instance_up(
        InstanceName(record.name),
        instance_id,
        model,
        roles=[str(role) for role in roles],
        http_url=record.http_url,
        block_size=_number(info.get("block_size")),
        kv_capacity_tokens=_number(info.get("kv_capacity_tokens")),
    )


def _number(value: object) -> int:
    with contextlib.suppress(TypeError, ValueError):
        return max(0, int(value))  # type: ignore[call-overload]
    return 0


def _leader_address(registry: Registry) -> str:
    leader = registry.leader("conductor")
    return leader.address if leader is not None else ""


def _store_master(config: ConductorConfig, registry: Registry) -> str:
    """The master to ask: the leader that etcd names, else the first one configured."""
    leader = registry.leader("store-master")
    if leader is not None and (not config.store_masters or leader.address in config.store_masters):
        return leader.address
    return config.store_masters[0] if config.store_masters else ""


def _status_route(core: Conductor, clock: Clock, term: Term) -> web.RouteDef:
    async def status(_request: web.Request) -> web.Response:
        message = wire.status(core, clock.now(), leader=term.leads)
        return web.json_response(
            MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        )

    return web.get("/v1/status", status)
