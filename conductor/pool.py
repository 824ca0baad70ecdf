"""How much of a prompt the store pool holds: one question to the store master before each placement (paper §3, §5.2).

A placement never depends on the store: the question has a deadline of milliseconds, and after a few failures in a row a
circuit breaker stops asking for a while. Not knowing counts as "the pool holds nothing".
Knows: the store's names for blocks (block_key.store_keys), the master's Query call. Does not know: placements.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import grpc
import grpc.aio

from conductor.config import ConductorConfig
from mooncake.common.block_key import pack_keys, store_keys
from mooncake.common.clock import Clock
from mooncake.common.ids import BlockKey
from mooncake.common.proto import store_pb2, store_pb2_grpc
from mooncake.common.rpc import aio_channel

_log = logging.getLogger(__name__)


class Pool(Protocol):
    """What the service asks."""

    async def prefix_tokens(self, keys: Sequence[BlockKey], block_size: int) -> int:
        """Leading tokens of the prompt that the pool holds; 0 when that cannot be found out in time."""
        ...


class Breaker:
    """Closed until `failures` failures in a row; then open for `open_s`; then one try decides."""

    def __init__(self, *, failures: int, open_s: float) -> None:
        self._limit = failures
        self._open_s = open_s
        self._failures = 0
        self._retry_at_s = 0.0

    @property
    def is_open(self) -> bool:
        return self._failures >= self._limit

    def allows(self, now: float) -> bool:
        """Whether to try. While open, each try that is let through moves the next one `open_s` away."""
        if not self.is_open:
            return True
        if now < self._retry_at_s:
            return False
        self._retry_at_s = now + self._open_s
        return True

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self, now: float) -> None:
        self._failures += 1
        if self._failures == self._limit:
            self._retry_at_s = now + self._open_s


class StorePool:
    """Asks the store master that `master()` names at the moment ("" for none)."""

    def __init__(self, config: ConductorConfig, clock: Clock, master: Callable[[], str], *, token: str) -> None:
        self._block_tokens = config.store_block_tokens
        self._deadline_s = config.pool_lookup_deadline_s
        self._clock = clock
        self._master = master
        self._token = token
        self._address = ""
        self._channel: grpc.aio.Channel | None = None
        self._stub: store_pb2_grpc.StoreMasterStub | None = None
        self.breaker = Breaker(failures=config.pool_breaker_failures, open_s=config.pool_breaker_open_s)
        self.failures = 0

    async def prefix_tokens(self, keys: Sequence[BlockKey], block_size: int) -> int:
        """Leading tokens of the prompt that the pool holds; 0 when that cannot be found out in time."""
        objects = self._objects(keys, block_size)
        if not objects:
            return 0
        stub = await self._connected()
        if stub is None or not self.breaker.allows(self._clock.now()):
            return 0
        try:
            answer = await stub.Query(store_pb2.QueryRequest(keys=pack_keys(objects)), timeout=self._deadline_s)
        except grpc.aio.AioRpcError as error:
            self.failures += 1
            self.breaker.failed(self._clock.now())
            _log.debug("store look-up failed", extra={"fields": {"master": self._address, "code": error.code()}})
            return 0
        self.breaker.succeeded()
        return min(answer.prefix, len(objects)) * self._block_tokens

    def _objects(self, keys: Sequence[BlockKey], block_size: int) -> Sequence[BlockKey]:
        """Names of the prompt's full store blocks; none when the engine's blocks do not divide a store block."""
        if not keys or block_size <= 0 or self._block_tokens % block_size:
            return ()
        return store_keys(keys, self._block_tokens // block_size)

    async def _connected(self) -> store_pb2_grpc.StoreMasterStub | None:
        address = self._master()
        if address != self._address:
            await self.close()
            self._address = address
            if address:
                self._channel = aio_channel(address, self._token)
                self._stub = store_pb2_grpc.StoreMasterStub(self._channel)
        return self._stub

    async def close(self) -> None:
        channel, self._channel, self._stub, self._address = self._channel, None, None, ""
        if channel is not None:
            await channel.close()
