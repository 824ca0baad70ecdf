"""`mooncake up`: a whole cluster on this machine, as child processes of this one.

Knows: the order of a start and of a stop, and what is printed. Parts: plan.py (what runs), supervisor.py (keeps it
running), run_dir.py (state and logs), terminal.py (progress).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp

from deploy.child import StartFailed
from deploy.plan import CLUSTER, STOP_ORDER, Plan, make_plan, option_names
from deploy.run_dir import RunDir
from deploy.supervisor import Supervisor
from deploy.terminal import Progress
from deploy.up_config import UpConfig
from mooncake.common.config import load, read_file

_ENDPOINT_READY_S = 60.0


async def run(config: UpConfig, *, config_file: Path | None = None) -> None:
    """Returns after SIGINT or SIGTERM and a clean stop. Raises MooncakeError when something cannot start (all is
    stopped then).
    """
    stop = _signals()
    run_dir = RunDir(config.run_dir)
    try:
        plan = await _interruptible(_plan(config, run_dir, config_file), stop)
        if plan is not None:
            await Cluster(plan, run_dir, stop).run()
    finally:
        run_dir.close()


async def _plan(config: UpConfig, run_dir: RunDir, config_file: Path | None) -> Plan:
    from mooncake.gateway.config import GatewayConfig
    from mooncake.models import resolve_model
    from mooncake.vllm.host_config import WorkerConfig, device_of

    worker = load(WorkerConfig, "worker", file=read_file(config_file))
    model_dir = await asyncio.to_thread(resolve_model, config.model)
    return make_plan(
        config,
        run_dir,
        model_dir,
        device=device_of(worker),
        config_file=config_file,
        worker_options=option_names(WorkerConfig),
        gateway_options=option_names(GatewayConfig),
        node_options=_node_options() if config.store_nodes else frozenset(),
    )


def _node_options() -> frozenset[str]:
    from store.node.config import NodeConfig

    return option_names(NodeConfig)


class Cluster:
    """One run of a plan."""

    def __init__(self, plan: Plan, run_dir: RunDir, stop: _Stop) -> None:
        self._plan = plan
        self._run_dir = run_dir
        self._stop = stop
        self._phase = "starting"
        self._progress: Progress | None = None
        self._supervisor = Supervisor(plan.stages, stop_order=STOP_ORDER, say=self._say, on_change=self._write_state)

    async def run(self) -> None:
        try:
            self._say(f"logs and state: {self._run_dir.path}")
            async with Progress(self._supervisor.children) as self._progress:
                started = await _interruptible(self._start(), self._stop)
            self._progress = None
            if started is not None:
                self._phase = "ready"
                self._write_state()
                self._greet()
                await self._stop.asked.wait()
        finally:
            self._progress = None
            self._phase = "stopping"
            await self._shut_down()

    async def _start(self) -> bool:
        await self._supervisor.start()
        await self._endpoint_ready()
        return True

    async def _endpoint_ready(self) -> None:
        """The gateway must know its workers and the Conductor too."""
        last = "no answer"
        async with aiohttp.ClientSession() as http:
            for _ in range(int(_ENDPOINT_READY_S / 0.2)):
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with http.get(
                        self._plan.endpoint + "/ready", timeout=aiohttp.ClientTimeout(total=2)
                    ) as answer:
                        if answer.status == 200:
                            return
                        last = f"{answer.status} {(await answer.text())[:500]}"
                await asyncio.sleep(0.2)
        log = self._supervisor.children["gateway-0"].spec.log
        raise StartFailed(f"all roles run, but {self._plan.endpoint}/ready says: {last} (log: {log})")

    async def _shut_down(self) -> None:
        if self._stop.asked.is_set():
            self._say("stopping (Ctrl-C again: at once)")
        stopping = asyncio.create_task(self._supervisor.stop())
        hurry = asyncio.create_task(self._stop.at_once.wait())
        await asyncio.wait({stopping, hurry}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            stopping.cancel()
            await asyncio.gather(stopping, return_exceptions=True)
            await self._supervisor.stop(at_once=True)
        else:
            stopping.result()
        hurry.cancel()
        self._say("stopped")

    def _say(self, text: str) -> None:
        if self._progress is not None:
            self._progress.say(text)
        else:
            print(text, flush=True)

    def _greet(self) -> None:
        body = json.dumps(
            {"model": self._plan.model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32}
        )
        url = f"{self._plan.endpoint}/v1/chat/completions"
        self._say(
            f"\nMooncake serves {self._plan.model} at {self._plan.endpoint}/v1   (Ctrl-C stops it)\n\n"
            f"  curl {url} -H 'Content-Type: application/json' \\\n    -d '{body}'\n\n"
            f"  mooncake status --run-dir {self._run_dir.path}\n"
        )

    def _write_state(self) -> None:
        roles = {}
        for name, child in self._supervisor.children.items():
            http_url = child.ready.get("http_url", "")
            roles[name] = {
                "role": child.spec.role,
                "pid": child.pid,
                "port": child.spec.port,
                "http_url": self._plan.endpoint if child.spec.role == "gateway" else http_url,
                "address": child.ready.get("address", ""),
                "state": child.state,
                "restarts": child.restarts,
                "log": str(child.spec.log),
                "info": {},
            }
        state: dict[str, Any] = {
            "endpoint": self._plan.endpoint,
            "pid": self._supervisor.own_pid,
            "run_dir": str(self._run_dir.path),
            "cluster": CLUSTER,
            "cluster_token": self._plan.cluster_token,
            "etcd": self._plan.etcd,
            "model": self._plan.model,
            "phase": self._phase,
            "roles": roles,
        }
        self._run_dir.write_state(state)


class _Stop:
    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()

    def __call__(self) -> None:
        (self.at_once if self.asked.is_set() else self.asked).set()


def _signals() -> _Stop:
    stop = _Stop()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    return stop


async def _interruptible(work: Any, stop: _Stop) -> Any:
    """The result of `work`, or None when a stop was asked first (`work` is cancelled then)."""
    task, asked = asyncio.ensure_future(work), asyncio.create_task(stop.asked.wait())
    try:
        await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        asked.cancel()
        task.cancel()
        await asyncio.gather(task, asked, return_exceptions=True)


def main(config: UpConfig, config_file: Path | None) -> int:
    """For the command line: the exit code."""
    try:
        asyncio.run(run(config, config_file=config_file))
    except StartFailed as error:
        print(f"mooncake up: cannot start: {error}", file=sys.stderr)
        return 1
    return 0
