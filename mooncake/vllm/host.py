"""The worker host: runs one vLLM server, makes it a member of the cluster, and takes it out again.

Order of a life: private folder, host link, HTTP; vLLM below its guard; healthy and the connector's halves have said
hello; registered; serving; at SIGTERM drained (told to the Conductor and in the record, running requests end),
deregistered, stopped. When vLLM ends or hangs, the host deregisters and fails: its supervisor restarts it anew.
Knows: the order. Does not know: how each part works. Paper: §3 (a node of the prefill or decoding pool).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from mooncake.common.auth import derive_key
from mooncake.common.config import ClusterConfig
from mooncake.common.metrics import start_loop_lag
from mooncake.common.net import format_address
from mooncake.common.role import Role
from mooncake.models import resolve_model
from mooncake.vllm import engine_command, host_metrics
from mooncake.vllm.conductor_link import ConductorLink, WorkerIdentity
from mooncake.vllm.engine_command import EngineIdentity
from mooncake.vllm.engine_health import EngineHealth
from mooncake.vllm.engine_load import DecodeInterval, EngineLoad
from mooncake.vllm.engine_process import EngineFailed, EngineProcess, ReservedPort
from mooncake.vllm.engine_start import StartStopped, StartWatch, follow_store_masters
from mooncake.vllm.host_config import RoleName, WorkerConfig
from mooncake.vllm.host_http import HostHttp
from mooncake.vllm.host_link import LoadSample, PrefillFinished, SchedulerHello, WorkerHello
from mooncake.vllm.host_link_server import HostLinkServer
from mooncake.vllm.kv_event_socket import KVEventSocket
from mooncake.vllm.kv_events import HeldBlocks
from mooncake.vllm.load_watch import LoadWatch
from transfer_engine import topology

_log = logging.getLogger(__name__)
_IPC_PATH_LIMIT = 100
"""Of 107 bytes that an ipc path may have."""
_QUIET_LOOKS = 2
"""A drain ends when the engine was idle at so many looks in a row."""


async def run_worker(
    cluster: ClusterConfig, config: WorkerConfig, role_name: RoleName, *, name: str, port: int | None = None
) -> None:
    """A worker's whole life, until SIGTERM. Raises MooncakeError when it could not start or its engine failed."""
    roles = tuple(r for r in ("prefill", "decode") if r == role_name or r in config.roles)
    async with Role(cluster, role_name, name) as role:
        with private_folder(name) as folder:
            await WorkerHost(role, cluster, config, roles, folder).run(port or 0)


@contextlib.contextmanager
def private_folder(name: str) -> Iterator[Path]:
    """A folder of mode 700 for sockets and the engine's configuration, short enough for ipc addresses."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    if len(base) + len(name) + 40 > _IPC_PATH_LIMIT or not os.access(base, os.W_OK):
        base = "/tmp"
    with tempfile.TemporaryDirectory(prefix=f"mooncake-{name[:32]}-", dir=base, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


class WorkerHost:
    """`run` once."""

    def __init__(
        self, role: Role, cluster: ClusterConfig, config: WorkerConfig, roles: Sequence[str], folder: Path
    ) -> None:
        self.state = "starting"
        self.held: HeldBlocks | None = None
        self.conductor: ConductorLink | None = None
        self.info: dict[str, Any] = {}
        """The record's `info`, docs/protocol.md §2; filled as it becomes known."""
        self._role = role
        self._cluster = cluster
        self._config = config
        self._roles = tuple(roles)
        self._folder = folder
        self._tasks: list[asyncio.Task[Any]] = []
        self.link = HostLinkServer(
            f"ipc://{folder}/host-link",
            role.name,
            traces_kept=config.traces_kept,
            on_prefill_finished=self._prefill_finished,
            on_load=self._loaded,
        )
        self.events = KVEventSocket(f"ipc://{folder}/kv-events")
        self._http = HostHttp(
            config,
            self.link,
            role.metrics,
            token=cluster.cluster_token,
            engine_key=derive_key(cluster.cluster_token, engine_command.KEY_PURPOSE),
            instance_id=role.instance_id,
            ready=lambda: self.ready,
            status=self.status,
        )
        self._load = LoadWatch(lambda: self._http.engine_get("/metrics", 5.0))
        self._health = EngineHealth(
            check=lambda: self._http.engine_get("/health", config.health_timeout_s),
            probe=self._one_token,
            steps=lambda: self._load.load.steps,
            every_s=config.health_every_s,
            hang_after_s=config.hang_after_s,
        )
        host_metrics.register(role.metrics, self)

    # --- life ---

    async def run(self, port: int) -> None:
        """Until SIGTERM. Raises MooncakeError."""
        engine: EngineProcess | None = None
        lag = start_loop_lag(self._role.metrics)
        try:
            self.link.start()
            self.events.connect()
            self._start_task("host link", self.link.run())
            if self._config.store and not self._config.store_masters:
                following = follow_store_masters(self._role.registry, self.link.set_store_masters)
                self._start_task("store masters", following)
            await self._http.start(self._cluster.host, port)
            with ReservedPort(self._cluster.host, self._config.engine_port) as engine_port:
                engine = EngineProcess(await self._engine_command(engine_port))
                await engine.start()
                worker, scheduler = await self._until_up(engine)
            await self._serve(worker, scheduler)
            await self._role.wait_for_stop(*self._tasks)
            await self._drain()
        except StartStopped:
            _log.info("stopped before the engine was up")
        finally:
            lag.cancel()
            await self._close(engine)

    def _start_task(self, name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=f"worker host: {name}")
        self._tasks.append(task)
        return task

    async def _close(self, engine: EngineProcess | None) -> None:
        """Nobody may be sent here any more before the engine goes."""
        self.state = "stopped"
        await self._role.registry.deregister("worker", self._role.name)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if engine is not None:
            await engine.stop(self._config.stop_timeout_s)
        await self._http.close()
        self.events.close()
        self.link.close()

    # --- start ---

    async def _engine_command(self, port: int) -> engine_command.EngineCommand:
        who = EngineIdentity(
            name=self._role.name,
            instance_id=self._role.instance_id,
            roles=self._roles,
            served_model=engine_command.served_model_name(self._config),
            model_path=await asyncio.to_thread(resolve_model, self._config.model),
            port=port,
            host_link=self.link.endpoint,
            kv_events=self.events.endpoint,
        )
        engine_url = f"http://{format_address(self._cluster.host, port)}"
        self.info = {"roles": list(self._roles), "model": who.served_model, "model_path": str(who.model_path)}
        self.info["engine_url"] = self._http.engine_url = engine_url
        return engine_command.build(self._cluster, self._config, who, runtime_dir=self._folder)

    async def _until_up(self, engine: EngineProcess) -> tuple[WorkerHello, SchedulerHello]:
        exited = self._start_task("engine", self._fail_on_exit(engine))
        check = lambda: self._http.engine_get("/health", 5.0)  # noqa: E731
        watch = StartWatch(engine, exited, self._role.stop, check=check, link=self.link)
        hellos = await watch.until_up(self._config.start_deadline_s)
        with contextlib.suppress(FileNotFoundError):
            engine.command.config_file.unlink()  # it holds the cluster token and has been read
        return hellos

    async def _fail_on_exit(self, engine: EngineProcess) -> None:
        code = await engine.wait()
        raise EngineFailed(f"vLLM ended with exit code {code}. Its last lines:\n{engine.tail()}")

    # --- serving ---

    async def _serve(self, worker: WorkerHello, scheduler: SchedulerHello) -> None:
        capacity_tokens = worker.num_blocks * worker.block_size
        model = self.info["model"]
        self.held = HeldBlocks(
            model=model,
            fingerprint=worker.fingerprint,
            block_size=worker.block_size,
            capacity_blocks=worker.num_blocks,
        )
        who = WorkerIdentity(
            name=self._role.name,
            instance_id=self._role.instance_id,
            model=model,
            roles=self._roles,
            block_size=worker.block_size,
            kv_capacity_tokens=capacity_tokens,
            http_url=self._http.url,
        )
        self.conductor = ConductorLink(self._role.registry, self._cluster.cluster_token, who, self.held)
        self.info |= {
            "transfer_address": worker.transfer_address,
            "transfer_instance_id": worker.transfer_instance_id,
            "fingerprint": worker.fingerprint,
            "block_size": worker.block_size,
            "max_model_len": scheduler.max_model_len,
            "kv_capacity_tokens": capacity_tokens,
        }
        self._start_task("KV events", self.events.run(self.held, self._kv_changed))
        self._start_task("load", self._load.run(capacity_tokens, self._tell_load))
        self._start_task("health", self._health.run())
        self._start_task("Conductor", self.conductor.run())
        self.state = "ready"
        role = self._role
        await role.publish_topology(topology.record(role.name, role.instance_id, role.role, worker.topology))
        await role.register(http_url=self._http.url, info=self.info)

    def _tell_load(self, load: EngineLoad, decoded: DecodeInterval | None) -> None:
        assert self.conductor is not None
        if decoded is not None:
            self.conductor.decoded(decoded)
        self.conductor.set_load(load)

    def _kv_changed(self) -> None:
        self._load.stir()
        if self.conductor is not None:
            self.conductor.kv_changed()

    def _prefill_finished(self, sample: PrefillFinished) -> None:
        self._load.stir()
        if self.conductor is not None:
            self.conductor.prefill_finished(sample)

    def _loaded(self, sample: LoadSample) -> None:
        if self.conductor is not None:
            self.conductor.loaded(sample)

    async def _one_token(self) -> None:
        """The smallest work there is for the engine. Raises MooncakeError."""
        body = {"model": self.info["model"], "prompt": [1], "max_tokens": 1, "temperature": 0}
        await self._http.engine_post("/v1/completions", msgspec.json.encode(body), self._config.hang_after_s)

    # --- end ---

    async def _drain(self) -> None:
        """Nobody new is sent here; what runs may end. The record stays until then: legs in flight still need it."""
        self.state = "draining"
        begun_s = time.monotonic()
        _log.info("draining", extra={"fields": {"at_most_s": self._config.drain_timeout_s}})
        assert self.conductor is not None
        await self.conductor.drain()
        await self._role.register(http_url=self._http.url, info=self.info | {"draining": True})
        quiet, seen = 0, self._load.looks
        while quiet < _QUIET_LOOKS and time.monotonic() - begun_s < self._config.drain_timeout_s:
            await asyncio.sleep(0.1)
            if any(task.done() for task in self._tasks):
                break  # the engine is gone: nothing is left to wait for
            if self._load.looks != seen:
                seen, load = self._load.looks, self._load.load
                idle = not (self._http.legs or load.running or load.waiting or load.kv_usage)
                quiet = quiet + 1 if idle else 0
        took_s = round(time.monotonic() - begun_s, 1)
        _log.info("drained", extra={"fields": {"after_s": took_s, "idle": quiet >= _QUIET_LOOKS}})

    # --- what others may see ---

    @property
    def ready(self) -> bool:
        """Whether new requests are welcome."""
        return self.state == "ready" and self._health.well

    def status(self) -> dict[str, Any]:
        """JSON snapshot of `/v1/status`."""
        return {
            "name": self._role.name,
            "instance_id": self._role.instance_id,
            "state": self.state if self._health.well else "unwell",
            **self.info,
            "http_url": self._http.url,
            "prefill_legs": self._http.legs,
            "load": msgspec.to_builtins(self._load.load),
            "held_blocks": len(self.held) if self.held is not None else 0,
            "conductor_attached": bool(self.conductor and self.conductor.attached),
            "etcd_connected": self._role.registry.connected,
        }
