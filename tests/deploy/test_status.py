"""`mooncake status` on a real etcd, and etcd itself under the supervisor."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

import grpc
import pytest

from deploy.child import ChildSpec
from deploy.etcd import etcd_command, find_etcd
from deploy.status import Where, collect, render, where
from deploy.supervisor import Supervisor
from mooncake.common.config import ClusterConfig
from mooncake.common.errors import ConfigError, RegistryUnavailable
from mooncake.common.net import free_port
from mooncake.common.proto import conductor_pb2, conductor_pb2_grpc
from mooncake.common.registry import InstanceRecord, Registry
from mooncake.common.role import Role
from mooncake.common.rpc import make_server
from tests.etcd import Etcd


class Conductor(conductor_pb2_grpc.ConductorServicer):
    async def Status(self, request: object, context: grpc.aio.ServicerContext) -> conductor_pb2.StatusResponse:
        worker = conductor_pb2.InstanceStatus(name="prefill-0", roles=["prefill"], running=3, model="tiny")
        return conductor_pb2.StatusResponse(instances=[worker], placed_total=7)


@pytest.fixture(autouse=True)
def _root_logger() -> object:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


async def test_table_of_a_cluster(etcd: Etcd) -> None:
    cluster = ClusterConfig(etcd=etcd.endpoints, cluster_token="secret", lease_ttl_s=2)
    place = Where(etcd.endpoints, cluster.cluster, "secret", {"prefill-0": "ready", "decode-0": "starting"})
    ready = False
    async with Role(cluster, "conductor", "conductor-0") as conductor, Role(cluster, "prefill", "prefill-0") as worker:
        server, address = make_server("127.0.0.1:0", token="secret")
        conductor_pb2_grpc.add_ConductorServicer_to_server(Conductor(), server)
        await server.start()
        await conductor.serve_http(ready=lambda: True)
        await conductor.register(address=address)
        await conductor.registry.campaign("conductor", "conductor-0", conductor.instance_id, address)
        await worker.serve_http(ready=lambda: ready)
        await worker.register(info={"model": "tiny"})

        found = await collect(place)
        states = {row["name"]: row["state"] for row in found["instances"]}
        assert states == {"conductor-0": "ready", "prefill-0": "not ready", "decode-0": "starting"}
        assert not found["ready"]

        ready = True
        found = await collect(Where(etcd.endpoints, cluster.cluster, "secret", {}))
        assert found["ready"] and found["conductor"]["placed_total"] == 7
        text = render(found)
        assert "prefill-0" in text and "7 placed" in text

        found = await collect(Where(etcd.endpoints, cluster.cluster, "wrong", {}))
        assert not found["ready"] and "does not answer" in render(found)
        await server.stop(None)


async def test_errors_are_clear() -> None:
    with pytest.raises(RegistryUnavailable, match=r"127\.0\.0\.1:9"):
        await collect(Where(["127.0.0.1:9"], "c", "", {}))
    with pytest.raises(ConfigError, match="no cluster runs"):
        where([], "", "/does/not/exist")


async def test_killed_etcd_comes_back_with_its_data(tmp_path: Path) -> None:
    client_port = free_port()
    command = etcd_command(
        find_etcd(), tmp_path / "data", host="127.0.0.1", client_port=client_port, peer_port=free_port()
    )
    spec = ChildSpec("etcd", "etcd", command, tmp_path / "etcd.log", ready_port=client_port, start_timeout_s=20)
    said: list[str] = []
    supervisor = Supervisor([[spec]], say=said.append)
    registry = Registry([f"127.0.0.1:{client_port}"], "test", lease_ttl_s=5)
    try:
        await supervisor.start()
        await registry.start()
        await registry.register(InstanceRecord("a", "i1", "worker"))
        pid = supervisor.children["etcd"].pid
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            while not (len(said) == 2 and registry.connected):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert said[0].startswith("etcd was killed by SIGKILL") and said[1] == "etcd is ready again"
        assert supervisor.children["etcd"].pid != pid
        other = Registry([f"127.0.0.1:{client_port}"], "test")
        await other.start()
        assert "a" in other.instances("worker")
        await other.close()
    finally:
        await registry.close()
        await supervisor.stop()
