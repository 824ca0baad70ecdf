"""The worker host with a real vLLM, a real etcd and a stand-in Conductor; the connector is a stub that hands nothing over.

The first tests share one host, which the last of them kills.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deploy import topology
from mooncake.common.auth import bearer, derive_key
from mooncake.common.block_key import BlockKey, block_keys, root_key, unpack_keys
from mooncake.common.registry import Registry
from mooncake.common.role import parse_ready
from mooncake.vllm.engine_guard import session_members
from tests.etcd import Etcd
from tests.worker_host.stub_connector_name import FINGERPRINT, MODULE
from tests.worker_host.test_conductor_link import StandInConductor

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(400)]

TOKEN = "cluster-token"
START_S = 300
RUN = """
import asyncio, json, sys
from mooncake.common.config import ClusterConfig
from mooncake.common.errors import MooncakeError
from mooncake.vllm.host_config import WorkerConfig
from prefill.main import run
cluster, worker, name = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
try:
    asyncio.run(run(ClusterConfig(**cluster), WorkerConfig(**worker), name=name))
except MooncakeError as error:
    sys.exit(f"FAILED {error}")
"""


class Host:
    """A worker host in a process of its own."""

    def __init__(self, folder: Path, etcd: Etcd, name: str, **config: Any) -> None:
        cluster = {"etcd": etcd.endpoints, "cluster_token": TOKEN, "lease_ttl_s": 2}
        worker = {"model": "tiny", "dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
        worker |= {"max_model_len": 4096, "connector_module": MODULE, "store": False, "drain_timeout_s": 5} | config
        self.name = name
        self.etcd = etcd
        self.log_path = folder / f"{name}.log"
        self.out_path = folder / f"{name}.out"
        environment = os.environ | {"PYTHONPATH": os.getcwd(), "XDG_RUNTIME_DIR": str(folder)}
        with self.log_path.open("wb") as log, self.out_path.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", RUN, json.dumps(cluster), json.dumps(worker), name],
                env=environment,
                stdout=out,
                stderr=log,
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_ready(self) -> str:
        """The host's URL, once it said that it is ready."""

        def said() -> str:
            assert self.process.poll() is None, self.log[-3000:]
            for line in self.out_path.read_text().splitlines():
                if (ready := parse_ready(line)) is not None:
                    return ready["http_url"]
            return ""

        return until(said, START_S)

    def guard(self) -> int:
        """Pid of the guard, whose session holds all of the engine."""
        return next(iter(children(self.process.pid)))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def until(condition: Callable[[], Any], timeout_s: float) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.05)
    return value


async def eventually(condition: Callable[[], Any], timeout_s: float = 20.0) -> Any:
    return await asyncio.to_thread(until, condition, timeout_s)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("w")


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Etcd]:
    server = Etcd(folder)
    server.start()
    yield server
    server.close()


@pytest.fixture(scope="module")
def host(folder: Path, cluster: Etcd) -> Iterator[Host]:
    host = Host(folder, cluster, "prefill-0")
    yield host
    host.close()


async def record_of(host: Host) -> Any:
    registry = Registry(host.etcd.endpoints, "mooncake", lease_ttl_s=2)
    await registry.start()
    found = registry.instances("worker").get(host.name)
    await registry.close()
    return found


def leg(url: str, session: aiohttp.ClientSession, prompt: list[int], transfer_id: str, **more: Any) -> Any:
    params = {"mooncake": {"leg": "prefill", "transfer_id": transfer_id, "deadline_s": 60}}
    request = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    body = {"request": request | {"kv_transfer_params": params} | more}
    return session.post(url + "/v1/prefill", json=body, headers=bearer(TOKEN))


async def events_of(response: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (await response.read()).splitlines()]


def keys(prompt: list[int], salt: str = "") -> list[BlockKey]:
    root = root_key(model="tiny", fingerprint=FINGERPRINT, block_size=32, cache_salt=salt)
    return block_keys(root, prompt, 32)


async def test_record(host: Host) -> None:
    url = await asyncio.to_thread(host.wait_ready)
    record = await record_of(host)
    assert record.http_url == url
    assert record.info["model"] == "tiny"
    assert record.info["roles"] == ["prefill"]
    assert record.info["block_size"] == 32
    assert record.info["max_model_len"] == 4096
    assert record.info["fingerprint"] == FINGERPRINT
    assert record.info["kv_capacity_tokens"] == 32768
    (published,) = await topology.published(host.etcd.endpoints, "mooncake")
    assert (published.name, published.instance_id, published.role) == ("prefill-0", record.instance_id, "prefill")
    assert published.topology.matrix() == {"cpu:0": [["mlx5_0"], []]}
    async with aiohttp.ClientSession() as session:
        completions = record.info["engine_url"] + "/v1/completions"
        body = {"model": "tiny", "prompt": [1], "max_tokens": 1}
        assert (await session.post(completions, json=body)).status == 401
        key = derive_key(TOKEN, "engine")
        assert (await session.post(completions, json=body, headers=bearer(key))).status == 200
    assert TOKEN not in host.log
    for process in session_members(host.guard()):
        assert TOKEN.encode() not in Path(f"/proc/{process}/cmdline").read_bytes()


async def test_kv_events_are_the_keys_of_the_prompts(host: Host) -> None:
    url = await asyncio.to_thread(host.wait_ready)
    conductor = await StandInConductor().start(token=TOKEN)
    registry = Registry(host.etcd.endpoints, "mooncake", lease_ttl_s=2)
    await registry.start()
    await registry.campaign("conductor", "conductor-0", "c-1", conductor.address)
    held: set[BlockKey] = set()

    def holds(wanted: list[BlockKey]) -> bool:
        held.clear()
        for report in list(conductor.reports):
            if report.snapshot:
                held.clear()
            held.update(unpack_keys(report.stored))
            held.difference_update(unpack_keys(report.removed))
        return set(wanted) <= held

    plain, salted = list(range(100, 1150)), list(range(100, 500))
    try:
        async with aiohttp.ClientSession() as session:
            async with leg(url, session, plain, "plain") as response:
                events = await events_of(response)
            assert [e["event"] for e in events] == ["accepted", "started", "finished"]
            assert events[2]["usage"]["prompt_tokens"] == 1050
            async with leg(url, session, salted, "salted", cache_salt="pepper") as response:
                assert (await events_of(response))[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            wanted = keys(plain) + keys(salted, "pepper")
            await eventually(lambda: holds(wanted))
            assert held == set(wanted)
            async with leg(url, session, plain + [7] * 200, "again") as response:
                assert (await events_of(response))[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 1024
            await eventually(lambda: holds(keys(plain + [7] * 200)))
            # More than fits: the engine evicts, and what the Conductor knows follows.
            for i in range(12):
                async with leg(url, session, [i] * 3200, f"fill{i}") as response:
                    await response.read()
            await eventually(lambda: holds(keys([11] * 3200)) and len(held) <= 1024)
            assert not set(keys(salted, "pepper")) & held
            samples = [s for report in conductor.reports for s in report.prefill_samples]
            assert (samples[0].prompt_tokens, samples[0].cached_tokens) == (1050, 0)
    finally:
        await registry.close()
        await conductor.stop()


async def test_closing_the_connection_aborts_on_a_real_engine(host: Host) -> None:
    url = await asyncio.to_thread(host.wait_ready)
    async with aiohttp.ClientSession() as session:
        response = await leg(url, session, [3] * 3000, "long", max_tokens=1000)
        assert json.loads(await response.content.readline())["event"] == "accepted"
        assert json.loads(await response.content.readline())["event"] == "started"
        response.close()
        async with asyncio.timeout(10):
            while True:
                async with session.get(url + "/v1/status", headers=bearer(TOKEN)) as answer:
                    status = await answer.json()
                if not status["prefill_legs"] and not status["load"]["running"] and not status["load"]["kv_usage"]:
                    break
                await asyncio.sleep(0.2)


async def test_metrics_page(host: Host) -> None:
    url = await asyncio.to_thread(host.wait_ready)
    async with aiohttp.ClientSession() as session, session.get(url + "/metrics") as response:
        families = {f.name: f for f in text_string_to_metric_families(await response.text())}
    assert families["mooncake_connector_loads"].samples[0].value == 3.0
    assert families["vllm:num_requests_running"].type == "gauge"
    assert families["mooncake_worker_ready"].samples[0].value == 1.0
    assert families["mooncake_worker_kv_event_batches_lost"].samples[0].value == 0.0
    assert families["mooncake_worker_kv_parents_unknown"].samples[0].value == 0.0
    assert "process_cpu_seconds" in families


def test_a_killed_host_leaves_no_process_and_no_folder(host: Host, folder: Path) -> None:
    host.wait_ready()
    guard = host.guard()
    assert len(session_members(guard)) >= 4, "guard, API server, engine core, worker"
    assert list(folder.glob("mooncake-prefill-0-*"))
    host.process.kill()
    host.process.wait()
    until(lambda: not session_members(guard), 10)
    until(lambda: not list(folder.glob("mooncake-prefill-0-*")), 5)


async def test_an_engine_that_dies_takes_the_worker_out(folder: Path, cluster: Etcd) -> None:
    host = Host(folder, cluster, "prefill-1")
    try:
        await asyncio.to_thread(host.wait_ready)
        guard = host.guard()
        core = next(pid for pid in session_members(guard) if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text())
        os.kill(core, signal.SIGKILL)
        assert await asyncio.to_thread(host.process.wait, 30) != 0
        assert "FAILED vLLM ended with exit code" in host.log
        assert not session_members(guard)
        assert await record_of(host) is None
    finally:
        host.close()


async def test_sigterm_drains_and_deregisters(folder: Path, cluster: Etcd) -> None:
    host = Host(folder, cluster, "prefill-2", drain_timeout_s=60)
    try:
        url = await asyncio.to_thread(host.wait_ready)
        guard = host.guard()
        async with aiohttp.ClientSession() as session:
            response = await leg(url, session, [3] * 3000, "last", max_tokens=100)
            assert json.loads(await response.content.readline())["event"] == "accepted"
            host.process.terminate()
            last = (await events_of(response))[-1]
            assert last["event"] == "finished", f"what runs may end: {last}"
        assert await asyncio.to_thread(host.process.wait, 60) == 0, host.log[-2000:]
        assert not session_members(guard)
        assert await record_of(host) is None
        assert not list(folder.glob("mooncake-prefill-2-*"))
    finally:
        host.close()


def test_a_start_that_fails_says_why(folder: Path, cluster: Etcd) -> None:
    host = Host(folder, cluster, "prefill-3", extra_engine_args=["--no-such-option"])
    try:
        assert host.process.wait(300) != 0
        assert "FAILED vLLM ended with exit code 2" in host.log
        assert "--no-such-option" in host.log.rpartition("FAILED")[2]
    finally:
        host.close()


def test_sigterm_during_the_start(folder: Path, cluster: Etcd) -> None:
    host = Host(folder, cluster, "prefill-4")
    try:
        until(lambda: "starting vLLM" in host.log, 60)
        host.process.terminate()
        assert host.process.wait(30) == 0, host.log[-2000:]
    finally:
        host.close()
