"""`mooncake gateway`: the role's start-up and end. Knows the registry, uvicorn and signals; does not know requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn

from mooncake.common.config import ClusterConfig
from mooncake.common.errors import MooncakeError
from mooncake.common.metrics import start_loop_lag
from mooncake.common.net import format_address
from mooncake.common.role import Role
from mooncake.gateway.app import make_app
from mooncake.gateway.config import GatewayConfig
from mooncake.gateway.gateway import Gateway

_log = logging.getLogger(__name__)
CLIENT_KEEPALIVE_S = 75  # longer than clients keep idle connections, so that it is they who close them
BACKLOG = 2048
LAST_WORDS_S = 3.0


async def run(cluster: ClusterConfig, config: GatewayConfig, *, name: str, port: int | None) -> None:
    """Serves until SIGTERM or SIGINT; requests in flight then have `graceful_shutdown_s` to end. Port None or 0: a free one.

    Raises MooncakeError when the port is taken.
    """
    async with Role(cluster, "gateway", name) as role:
        listener = _listen(cluster.host, port or 0)
        gateway = Gateway(
            config, role.metrics, name=name, instance_id=role.instance_id, cluster_token=cluster.cluster_token
        )
        lag = start_loop_lag(role.metrics)
        stop_watching = [
            role.registry.watch("worker", gateway.directory.on_record),
            role.registry.watch_leader("conductor", gateway.placer.on_leader),
        ]
        server = _server(gateway)
        serving = asyncio.create_task(server.serve([listener]), name="http")
        try:
            http_url = "http://" + format_address(cluster.host, listener.getsockname()[1])
            await role.register(http_url=http_url, info={"models": gateway.directory.names()})
            await role.wait_for_stop(serving)
        finally:
            gateway.stopping = True
            server.should_exit = True
            await asyncio.wait({serving}, timeout=config.graceful_shutdown_s)
            gateway.end_requests()
            await asyncio.wait({serving}, timeout=LAST_WORDS_S)
            serving.cancel()
            for stop in stop_watching:
                stop()
            lag.cancel()
            await gateway.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise MooncakeError(f"cannot listen on {format_address(host, port)}: {error.strerror or error}") from error
    return listener


class _Server(uvicorn.Server):
    """Signals are the role's to handle."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _server(gateway: Gateway) -> uvicorn.Server:
    settings = uvicorn.Config(
        make_app(gateway),
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=CLIENT_KEEPALIVE_S,
        timeout_graceful_shutdown=int(gateway.config.graceful_shutdown_s + 2 * LAST_WORDS_S),
    )
    return _Server(settings)
