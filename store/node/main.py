"""Start-up of `mooncake store-node`: memory, a gRPC server for writers, and the link to whoever leads the store.

Knows: the order of things. Does not know: what a node does (service.py, link.py). A restart under the same name is a new,
empty life: its engine has another instance id, and its first report replaces the old life at the master.
"""

from __future__ import annotations

import asyncio
import logging

from mooncake.common.config import ClusterConfig
from mooncake.common.errors import MooncakeError
from mooncake.common.net import format_address
from mooncake.common.proto import store_pb2_grpc
from mooncake.common.registry import InstanceRecord, Kind
from mooncake.common.role import Role
from mooncake.common.rpc import make_server
from store.node.config import NodeConfig
from store.node.link import MasterLink
from store.node.metrics import NodeMetrics
from store.node.segment import NodeSegment
from store.node.service import NodeService
from transfer_engine import topology

_log = logging.getLogger(__name__)


async def run(cluster: ClusterConfig, config: NodeConfig, *, name: str, port: int | None) -> None:
    """Serves until SIGTERM or SIGINT. Raises MooncakeError when a port is taken, or when another process takes the name."""
    async with Role(cluster, "store-node", name) as role:
        try:
            segment = NodeSegment(cluster, config, name)
        except OSError as error:
            raise MooncakeError(f"cannot open the segment or its port {config.transfer_port}: {error}") from error
        try:
            await _serve(role, cluster, config, segment, port or 0)
        finally:
            await asyncio.to_thread(segment.close)


async def _serve(role: Role, cluster: ClusterConfig, config: NodeConfig, segment: NodeSegment, port: int) -> None:
    metrics = NodeMetrics(role.metrics, segment)
    server, address = make_server(format_address(cluster.host, port), token=cluster.cluster_token)
    store_pb2_grpc.add_StoreNodeServicer_to_server(NodeService(segment, metrics), server)
    await server.start()
    link = MasterLink(segment, config, metrics, control_address=address, token=cluster.cluster_token)
    stop_watching = role.registry.watch_leader("store-master", link.on_leader)
    talking = asyncio.create_task(link.run(), name="master-link")
    try:
        await role.serve_http(ready=lambda: link.mounted)
        info = {
            "transfer_address": segment.engine.address,
            "transfer_instance_id": segment.instance_id,
            "segment_bytes": segment.buffer.length,
        }
        before = role.registry.instances("store-node").get(role.name)
        await role.publish_topology(topology.record(role.name, role.instance_id, role.role, segment.topology))
        await role.register(address=address, info=info)
        usurped = asyncio.create_task(_usurped(role, before), name="usurped")
        try:
            await role.wait_for_stop(talking, usurped)
        finally:
            usurped.cancel()
    finally:
        stop_watching()
        talking.cancel()
        await asyncio.gather(talking, return_exceptions=True)
        await link.close()
        await server.stop(0.5)


async def _usurped(role: Role, before: InstanceRecord | None) -> None:
    """Raises MooncakeError when a newer process has our name: two lives would replace each other at the master for ever."""
    taken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    known = {role.instance_id, before.instance_id if before else ""}

    def look(kind: Kind, record: InstanceRecord) -> None:
        if kind != "down" and record.name == role.name and record.instance_id not in known and not taken.done():
            taken.set_result(record.instance_id)

    stop = role.registry.watch("store-node", look)
    try:
        other = await taken
    finally:
        stop()
    raise MooncakeError(f"another process has started as {role.name} ({other}); this one ends")
