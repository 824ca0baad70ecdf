"""Direct probes of instances whose key vanished: is the process really gone, or only its lease?

Knows: one health question (`GET http_url/health`, else a TCP connect to `address`).
Does not know: etcd, or what being down means to others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import aiohttp

from mooncake.common.errors import ConfigError
from mooncake.common.net import parse_address

_FAILURES_UNTIL_DOWN = 2


class Prober:
    """Asks each watched key's process now and then, until it fails twice in a row or the key is forgotten."""

    def __init__(self, *, timeout_s: float = 1.0, every_s: float = 1.0) -> None:
        self._timeout_s = timeout_s
        self._every_s = every_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._http: aiohttp.ClientSession | None = None

    def watch(self, key: str, http_url: str, address: str, instance_id: str, on_down: Callable[[], None]) -> None:
        """Starts probing unless that key is probed already."""
        if key not in self._tasks:
            self._tasks[key] = asyncio.create_task(
                self._run(key, http_url, address, instance_id, on_down), name=f"probe {key}"
            )

    def forget(self, key: str) -> None:
        """The key is back (or of no interest any more)."""
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._http is not None:
            await self._http.close()

    async def _run(self, key: str, http_url: str, address: str, instance_id: str, on_down: Callable[[], None]) -> None:
        failures = 0
        while failures < _FAILURES_UNTIL_DOWN:
            if await self._alive(http_url, address, instance_id):
                failures = 0
                await asyncio.sleep(self._every_s)
            else:
                failures += 1
                if failures < _FAILURES_UNTIL_DOWN:
                    await asyncio.sleep(self._every_s / 2)
        self._tasks.pop(key, None)
        on_down()

    async def _alive(self, http_url: str, address: str, instance_id: str) -> bool:
        if http_url:
            return await self._http_alive(http_url, instance_id)
        if address:
            return await self._tcp_alive(address)
        return False

    async def _http_alive(self, http_url: str, instance_id: str) -> bool:
        if self._http is None:
            self._http = aiohttp.ClientSession()
        try:
            async with self._http.get(
                http_url.rstrip("/") + "/health", timeout=aiohttp.ClientTimeout(total=self._timeout_s)
            ) as answer:
                if answer.status != 200:
                    return False
                try:
                    body = await answer.json(content_type=None)
                except ValueError:
                    return True
                said = body.get("instance_id") if isinstance(body, dict) else None
                return said is None or said == instance_id
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def _tcp_alive(self, address: str) -> bool:
        try:
            host, port = parse_address(address)
            async with asyncio.timeout(self._timeout_s):
                _, writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError, ConfigError):
            return False
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True
