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
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from mooncake.common.auth import derive_key
from mooncake.common.config import ClusterConfig
from mooncake.common.errors import MooncakeError
from mooncake.common.metrics import start_loop_lag
from mooncake.common.net import format_address
from mooncake.common.role import Role
from mooncake.models import resolve_model
from mooncake.vllm import engine_command, host_metrics
from mooncake.vllm.conductor_link import ConductorLink, WorkerIdentity
from mooncake.vllm.engine_command import EngineIdentity
from mooncake.vllm.engine_health import EngineHealth
from mooncake.vllm.engine_load import EngineLoad, LoadTracker
from mooncake.vllm.engine_process import EngineFailed, EngineProcess, ReservedPort
from mooncake.vllm.host_config import RoleName, WorkerConfig
from mooncake.vllm.host_http import HostHttp
from mooncake.vllm.host_link import PrefillFinished, SchedulerHello, WorkerHello
from mooncake.vllm.host_link_server import HostLinkServer
from mooncake.vllm.kv_event_socket import KVEventSocket
from mooncake.vllm.kv_events import HeldBlocks

_log = logging.getLogger(__name__)
_LOAD_BUSY_S, _LOAD_IDLE_S = 0.5, 1.0
_HELLO_TIMEOUT_S = 30.0
_IPC_PATH_LIMIT = 100
"""Of 107 bytes that an ipc path may have."""


async def run_worker(
    cluster: ClusterConfig, config: WorkerConfig, role_name: RoleName, *, name: str, port: int | None = None
) -> None:
    """A worker's whole life, until SIGTERM. Raises MooncakeError when it could not start or its engine failed."""
    roles = tuple(r for r in ("prefill", "decode") if r == role_name or r in config.roles)
    async with Role(cluster, role_name, name) as role:
        with private_folder(name) as folder:
            host = WorkerHost(role, cluster, config, roles, folder)
            await host.run(port or 0)


@contextlib.contextmanager
def private_folder(name: str) -> Iterator[Path]:
    """A folder of mode 700 for sockets and the engine's configuration, short enough for ipc addresses."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    if len(base) + len(name) + 40 > _IPC_PATH_LIMIT or not os.access(base, os.W_OK):
        base = "/tmp"
    with tempfile.TemporaryDirectory(prefix=f"mooncake-{name[:32]}-", dir=base, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


class _Stopped(Exception):
    """SIGTERM came before the worker was up."""


class WorkerHost:
    """`run` once."""

    def __init__(
        self, role: Role, cluster: ClusterConfig, config: WorkerConfig, roles: Sequence[str], folder: Path
    ) -> None:
        self._role = role
        self._cluster = cluster
        self._config = config
        self._roles = tuple(roles)
        self._folder = folder
        self._state = "starting"
        self._load = EngineLoad()
        self._load_at_s = 0.0
        self._busy = asyncio.Event()
        self._engine_key = derive_key(cluster.cluster_token, engine_command.KEY_PURPOSE)
        self._link = HostLinkServer(
            f"ipc://{folder}/host-link",
            role.name,
            traces_kept=config.traces_kept,
            on_prefill_finished=self._prefill_finished,
        )
        self._events = KVEventSocket(f"ipc://{folder}/kv-events")
        self._http = HostHttp(
            config,
            self._link,
            role.metrics,
            token=cluster.cluster_token,
            engine_key=self._engine_key,
            instance_id=role.instance_id,
            ready=lambda: self._state == "ready" and self._health.well,
            status=self.status,
        )
        self._health = EngineHealth(
            check=lambda: self._http.engine_get("/health", config.health_timeout_s),
            probe=self._one_token,
            steps=lambda: self._load.steps,
            every_s=config.health_every_s,
            hang_after_s=config.hang_after_s,
        )
        self._held: HeldBlocks | None = None
        self._conductor: ConductorLink | None = None
        self._info: dict[str, Any] = {}
        self._tasks: list[asyncio.Task[Any]] = []

    # --- life ---

    async def run(self, port: int) -> None:
        """Until SIGTERM. Raises MooncakeError."""
        engine: EngineProcess | None = None
        self._watch_parts()
        lag = start_loop_lag(self._role.metrics)
        try:
            self._link.start()
            self._events.connect()
            self._start_task(self._link.run())
            await self._http.start(self._cluster.host, port)
            reserved = ReservedPort(self._cluster.host, self._config.engine_port)
            try:
                engine = await self._start_engine(reserved.port)
                exited = self._start_task(self._fail_on_exit(engine))
                worker, scheduler = await self._until_up(engine, exited, reserved.port)
            finally:
                reserved.close()
            await self._serve(engine, worker, scheduler)
            await self._role.wait_for_stop(*self._tasks)
            await self._drain()
        except _Stopped:
            _log.info("stopped before the engine was up")
        finally:
            lag.cancel()
            await self._close(engine)

    def _start_task(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=f"worker-host {work}")
        self._tasks.append(task)
        return task

    async def _close(self, engine: EngineProcess | None) -> None:
        """Nobody may be sent here any more before the engine goes."""
        self._state = "stopped"
        await self._role.registry.deregister("worker", self._role.name)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if engine is not None:
            await engine.stop(self._config.stop_timeout_s)
        await self._http.close()
        self._events.close()
        self._link.close()

    # --- start ---

    async def _start_engine(self, port: int) -> EngineProcess:
        model_path = await asyncio.to_thread(resolve_model, self._config.model)
        who = EngineIdentity(
            name=self._role.name,
            instance_id=self._role.instance_id,
            roles=self._roles,
            served_model=engine_command.served_model_name(self._config),
            model_path=model_path,
            port=port,
            host_link=self._link.endpoint,
            kv_events=self._events.endpoint,
            store_masters=await self._store_masters(),
        )
        command = engine_command.build(self._cluster, self._config, who, runtime_dir=self._folder)
        engine = EngineProcess(command)
        await engine.start()
        self._info = {"roles": list(self._roles), "model": who.served_model, "model_path": str(model_path)}
        self._info["engine_url"] = f"http://{format_address(self._cluster.host, port)}"
        return engine

    async def _store_masters(self) -> tuple[str, ...]:
        """From the configuration, else the leader, waited for a while; empty: this worker runs without the pool."""
        if not self._config.store or self._config.store_masters:
            return tuple(self._config.store_masters)
        known = asyncio.Event()
        stop_watching = self._role.registry.watch_leader("store-master", lambda who: known.set() if who else None)
        try:
            await asyncio.wait_for(known.wait(), self._config.store_discovery_s)
        except TimeoutError:
            pass
        finally:
            stop_watching()
        leader = self._role.registry.leader("store-master")
        if leader is None:
            _log.warning("no store master is known: this worker runs without the store pool")
        return (leader.address,) if leader else ()

    async def _fail_on_exit(self, engine: EngineProcess) -> None:
        code = await engine.wait()
        raise EngineFailed(f"vLLM ended with exit code {code}. Its last lines:\n{engine.tail()}")

    async def _until_up(
        self, engine: EngineProcess, exited: asyncio.Task[Any], port: int
    ) -> tuple[WorkerHello, SchedulerHello]:
        """Healthy, and both halves of the connector said hello. Raises EngineFailed, _Stopped."""
        begun_s = time.monotonic()
        self._http.engine_url = f"http://{format_address(self._cluster.host, port)}"
        await self._awaited(self._until_healthy(), exited, self._config.start_deadline_s, "answer /health", engine)
        _log.info("vLLM is healthy", extra={"fields": {"after_s": round(time.monotonic() - begun_s, 1)}})
        worker, scheduler = await self._awaited(
            self._hellos(), exited, _HELLO_TIMEOUT_S, "load the Mooncake connector", engine
        )
        with contextlib.suppress(FileNotFoundError):
            (self._folder / "engine.yaml").unlink()  # it holds the cluster token and has been read
        return worker, scheduler

    async def _hellos(self) -> tuple[WorkerHello, SchedulerHello]:
        return await asyncio.shield(self._link.worker_hello), await asyncio.shield(self._link.scheduler_hello)

    async def _until_healthy(self) -> None:
        while True:
            try:
                await self._http.engine_get("/health", 5.0)
                return
            except MooncakeError:
                await asyncio.sleep(0.25)

    async def _awaited(
        self,
        work: Coroutine[Any, Any, Any],
        exited: asyncio.Task[Any],
        timeout_s: float,
        what: str,
        engine: EngineProcess,
    ) -> Any:
        """`work`, unless the engine ends, SIGTERM comes, or time is up first."""
        task = asyncio.create_task(work, name=f"worker-host: {what}")
        stop = asyncio.create_task(self._role.stop.wait(), name="worker-host: stop")
        try:
            await asyncio.wait({task, exited, stop}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if stop.done():
                raise _Stopped
            if exited.done():
                exited.result()
            raise EngineFailed(f"vLLM did not {what} within {timeout_s:g} s. Its last lines:\n{engine.tail()}")
        finally:
            task.cancel()
            stop.cancel()

    # --- serving ---

    async def _serve(self, engine: EngineProcess, worker: WorkerHello, scheduler: SchedulerHello) -> None:
        capacity_tokens = worker.num_blocks * worker.block_size
        model = self._info["model"]
        self._held = HeldBlocks(
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
        self._conductor = ConductorLink(self._role.registry, self._cluster.cluster_token, who, self._held)
        self._info |= {
            "transfer_address": worker.transfer_address,
            "transfer_instance_id": worker.transfer_instance_id,
            "fingerprint": worker.fingerprint,
            "block_size": worker.block_size,
            "max_model_len": scheduler.max_model_len,
            "kv_capacity_tokens": capacity_tokens,
        }
        self._start_task(self._events.run(self._held, self._kv_changed))
        self._start_task(self._watch_load(capacity_tokens))
        self._start_task(self._health.run())
        self._start_task(self._conductor.run())
        self._state = "ready"
        await self._role.register(http_url=self._http.url, info=self._info)

    async def _watch_load(self, kv_capacity_tokens: int) -> None:
        tracker = LoadTracker(kv_capacity_tokens)
        assert self._conductor is not None
        while True:
            try:
                text = await self._http.engine_get("/metrics", 5.0)
            except MooncakeError:
                await asyncio.sleep(_LOAD_IDLE_S)
                continue
            self._load, decoded = tracker.update(text, time.monotonic())
            self._load_at_s = time.monotonic()
            if decoded is not None:
                self._conductor.decoded(decoded)
            self._conductor.set_load(self._load)
            self._busy.clear()
            await asyncio.sleep(_LOAD_BUSY_S)
            if not (self._load.running or self._load.waiting or self._http.legs):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._busy.wait(), _LOAD_IDLE_S - _LOAD_BUSY_S)

    def _kv_changed(self) -> None:
        self._busy.set()
        if self._conductor is not None:
            self._conductor.kv_changed()

    def _prefill_finished(self, sample: PrefillFinished) -> None:
        self._busy.set()
        if self._conductor is not None:
            self._conductor.prefill_finished(sample)

    async def _one_token(self) -> None:
        """The smallest work there is for the engine. Raises MooncakeError."""
        body = {"model": self._info["model"], "prompt": [1], "max_tokens": 1, "temperature": 0}
        await self._http.engine_post("/v1/completions", msgspec.json.encode(body), self._config.hang_after_s)

    # --- end ---

    async def _drain(self) -> None:
        """Nobody new is sent here; what runs may end. The record stays until then: legs in flight still need it."""
        self._state = "draining"
        _log.info("draining", extra={"fields": {"at_most_s": self._config.drain_timeout_s}})
        assert self._conductor is not None
        await self._conductor.drain()
        await self._role.register(http_url=self._http.url, info=self._info | {"draining": True})
        deadline_s = time.monotonic() + self._config.drain_timeout_s
        begun_s, quiet_looks, seen_s = time.monotonic(), 0, self._load_at_s
        while time.monotonic() < deadline_s and quiet_looks < 2:
            await asyncio.sleep(0.1)
            if any(task.done() for task in self._tasks):
                break  # the engine is gone: nothing is left to wait for
            if self._load_at_s != seen_s:
                seen_s = self._load_at_s
                idle = not (self._http.legs or self._load.running or self._load.waiting or self._load.kv_usage)
                quiet_looks = quiet_looks + 1 if idle else 0
        took_s = round(time.monotonic() - begun_s, 1)
        _log.info("drained", extra={"fields": {"after_s": took_s, "idle": quiet_looks >= 2}})

    # --- what others may see ---

    def status(self) -> dict[str, Any]:
        """JSON snapshot of `/v1/status`."""
        held, conductor = self._held, self._conductor
        return {
            "name": self._role.name,
            "instance_id": self._role.instance_id,
            "state": self._state if self._health.well else "unwell",
            **self._info,
            "http_url": self._http.url,
            "prefill_legs": self._http.legs,
            "load": msgspec.to_builtins(self._load),
            "held_blocks": len(held) if held is not None else 0,
            "conductor_attached": bool(conductor and conductor.attached),
            "etcd_connected": self._role.registry.connected,
        }

    def _watch_parts(self) -> None:
        def of_held(read: Callable[[HeldBlocks], float]) -> Callable[[], float]:
            return lambda: float(read(self._held)) if self._held is not None else 0.0

        def attached() -> float:
            return float(self._conductor is not None and self._conductor.attached)

        events, link = self._events, self._link
        host_metrics.register(
            self._role.metrics,
            gauges=[
                ("ready", "1 while the worker serves", lambda: float(self._state == "ready" and self._health.well)),
                ("conductor_attached", "1 while the stream to the Conductor stands", attached),
                ("held_block_keys", "Block keys in the engine's prefix cache", of_held(len)),
            ],
            counters=[
                ("kv_event_batches", "Batches of KV events applied", lambda: float(events.batches)),
                ("kv_event_batches_lost", "Batches of KV events that never came", lambda: float(events.lost_batches)),
                (
                    "kv_event_batches_bad",
                    "Batches of KV events that were unreadable",
                    lambda: float(events.bad_batches),
                ),
                (
                    "kv_events_ignored",
                    "KV events of other media, groups or shapes",
                    of_held(lambda h: h.ignored_events),
                ),
                ("kv_blocks_stored", "Blocks that KV events told as stored", of_held(lambda h: h.stored_blocks)),
                ("kv_parents_unknown", "Stored events without known parent", of_held(lambda h: h.unknown_parents)),
                ("kv_removals_unknown", "Removed blocks that were not known", of_held(lambda h: h.unknown_removals)),
                ("kv_overflows", "Times more blocks were told than there are", of_held(lambda h: h.overflows)),
                ("host_link_dropped", "Host link messages dropped", lambda: float(link.dropped)),
            ],
        )
