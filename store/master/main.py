"""Start-up of `mooncake store-master`: a gRPC server that serves while this process holds the leader key.

Knows: the order of things. Does not know: what a master does (service.py, core.py). Several masters may run; one leads,
the others answer UNAVAILABLE and wait. A master has no disk: whoever leads next learns everything from the nodes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time

from aiohttp import web

from mooncake.common.config import ClusterConfig
from mooncake.common.net import format_address
from mooncake.common.proto import store_pb2_grpc
from mooncake.common.role import Role
from mooncake.common.rpc import make_server
from store.master.config import MasterConfig
from store.master.service import MasterService

_TICK_S = 0.5
_log = logging.getLogger(__name__)


async def run(cluster: ClusterConfig, config: MasterConfig, *, name: str, port: int | None) -> None:
    """Serves until SIGTERM or SIGINT."""
    async with Role(cluster, "store-master", name) as role:
        service = MasterService(config.settings(), role.metrics)
        server, address = make_server(format_address(cluster.host, port or 0), token=cluster.cluster_token)
        store_pb2_grpc.add_StoreMasterServicer_to_server(service, server)
        await server.start()
        lead = asyncio.create_task(_lead(role, service, address), name="lead")
        tick = asyncio.create_task(_tick(service), name="tick")
        try:
            await role.serve_http(ready=lambda: _ready(role, service), routes=_routes(service))
            await role.register(address=address)
            await role.wait_for_stop(lead, tick)
        finally:
            lead.cancel()
            tick.cancel()
            service.step_down()
            await server.stop(0.5)


def _ready(role: Role, service: MasterService) -> bool:
    """A standby is ready as long as it knows who leads."""
    return service.core is not None or role.registry.leader("store-master") is not None


async def _lead(role: Role, service: MasterService, address: str) -> None:
    while True:
        leadership = await role.registry.campaign("store-master", role.name, role.instance_id, address)
        service.lead(leadership.epoch)
        await leadership.lost.wait()
        service.step_down()


async def _tick(service: MasterService) -> None:
    while True:
        await asyncio.sleep(_TICK_S)
        service.tick()


def _routes(service: MasterService) -> list[web.RouteDef]:
    async def segments(_request: web.Request) -> web.Response:
        """One name a line: inference engines ask for it before they use the store."""
        status = service.core.status(time.monotonic()) if service.core else None
        return web.Response(text="".join(f"{s.name}\n" for s in status.segments) if status else "")

    async def status(_request: web.Request) -> web.Response:
        core = service.core
        if core is None:
            return web.json_response({"leading": False})
        seen = dataclasses.asdict(core.status(time.monotonic()))
        return web.json_response({"leading": True, "epoch": core.epoch, **seen})

    return [web.get("/get_all_segments", segments), web.get("/v1/status", status)]
