"""Addresses, log lines, the side server, and a role's life."""

from __future__ import annotations

import logging
import re
import socket
import sys

import aiohttp
import pytest
from aiohttp import web

from mooncake.common.config import ClusterConfig
from mooncake.common.errors import ConfigError, MooncakeError
from mooncake.common.log import LogfmtFormatter
from mooncake.common.metrics import new_registry, serve_http
from mooncake.common.net import format_address, free_port, parse_address, port_is_free
from mooncake.common.registry import Registry
from mooncake.common.role import Role, parse_ready
from tests.etcd import Etcd


@pytest.mark.parametrize(("host", "text"), [("127.0.0.1", "127.0.0.1:80"), ("::1", "[::1]:80"), ("a.b", "a.b:80")])
def test_addresses(host: str, text: str) -> None:
    assert format_address(host, 80) == text and parse_address(text) == (host, 80)


@pytest.mark.parametrize("wrong", ["", "host", "host:", ":80", "::1:80", "host:x", "host:70000", "host:-1"])
def test_wrong_addresses(wrong: str) -> None:
    with pytest.raises(ConfigError):
        parse_address(wrong)


def test_free_ports() -> None:
    port = free_port()
    assert port_is_free("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", port)):
        assert not port_is_free("127.0.0.1", port)


def test_log_line_is_one_line() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, 'said "%s"', ("hi",), sys.exc_info())
    record.fields = {"n": 1, "path": "a b"}
    line = LogfmtFormatter("gateway", "gateway-0").format(record)
    assert "\n" not in line
    assert re.match(r"t=\S+Z level=error role=gateway name=gateway-0 logger=x msg=\"said \\\"hi\\\"\" n=1 ", line)
    assert 'path="a b"' in line and "ValueError: a\\nb" in line


async def get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as http, http.get(url) as answer:
        return answer.status, await answer.text()


async def test_side_server() -> None:
    ready = False

    async def hello(_request: web.Request) -> web.Response:
        return web.Response(text="hi")

    url = await serve_http(
        "127.0.0.1", 0, new_registry(), ready=lambda: ready, routes=[web.get("/hello", hello)], instance_id="i1"
    )
    assert (await get(f"{url}/health")) == (200, '{"status": "ok", "instance_id": "i1"}')
    assert (await get(f"{url}/ready"))[0] == 503
    ready = True
    assert (await get(f"{url}/ready"))[0] == 200
    assert (await get(f"{url}/hello"))[1] == "hi"
    text = (await get(f"{url}/metrics"))[1]
    assert "process_resident_memory_bytes" in text and "mooncake_event_loop_lag_seconds_bucket" in text
    with pytest.raises(MooncakeError, match="cannot listen"):
        await serve_http("127.0.0.1", int(url.rsplit(":", 1)[1]), new_registry(), ready=lambda: True)
    await url.close()
    with pytest.raises(aiohttp.ClientError):
        await get(f"{url}/health")


async def test_role_registers_and_leaves(etcd: Etcd, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = ClusterConfig(etcd=etcd.endpoints, lease_ttl_s=2)
    root, handlers, level = logging.getLogger(), logging.getLogger().handlers[:], logging.getLogger().level
    watcher = Registry(etcd.endpoints, cluster.cluster, lease_ttl_s=2)
    await watcher.start()
    try:
        async with Role(cluster, "prefill", "prefill-0") as role:
            url = await role.serve_http(ready=lambda: True)
            await role.register(address="127.0.0.1:1", info={"model": "tiny"})
            ready = parse_ready(capsys.readouterr().out.strip())
            assert ready == {"role": "prefill", "name": "prefill-0", "address": "127.0.0.1:1", "http_url": url}
            assert "mooncake_etcd_connected 1.0" in (await get(f"{url}/metrics"))[1]
            role.stop.set()
            await role.wait_for_stop()
            assert watcher.instances("worker")["prefill-0"].instance_id == role.instance_id
        await watcher._session._list()
        assert not watcher.instances("worker")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        await watcher.close()
