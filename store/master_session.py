"""Calls to whichever store master leads: finds it, remembers it, looks again when it is gone.

Knows: addresses, channels, the circuit breaker. Does not know: what the calls mean. Blocking, thread-safe.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from mooncake.common.errors import MooncakeError, StoreUnavailable
from mooncake.common.proto import store_pb2_grpc
from mooncake.common.rpc import sync_channel, to_mooncake_error
from store.breaker import Breaker

Masters = Sequence[str] | Callable[[], Sequence[str]]
_MIN_TIMEOUT_S = 0.001
_log = logging.getLogger(__name__)


class MasterSession:
    """`masters`: addresses of which one leads, or a function that tells them (best first)."""

    def __init__(self, masters: Masters, *, token: str, breaker: Breaker) -> None:
        self._masters = masters
        self._token = token
        self.breaker = breaker
        self._lock = threading.Lock()
        self._stubs: dict[str, tuple[grpc.Channel, store_pb2_grpc.StoreMasterStub]] = {}
        self._leader = ""
        self._closed = False

    def call(self, method: str, request: Any, deadline: float) -> Any:
        """The answer, before the monotonic `deadline`. Raises StoreUnavailable when no leader gave one, else what the
        leader said (BadRequest, Overloaded, AuthenticationFailed...)."""
        if self._closed:
            raise StoreUnavailable("this store client is closed")
        if deadline - time.monotonic() < _MIN_TIMEOUT_S:
            raise StoreUnavailable("the deadline has passed")  # says nothing about the master
        if not self.breaker.allow(time.monotonic()):
            raise StoreUnavailable("no store master answered lately; trying again soon")
        tried = "no store master is known"
        for address in self._addresses():
            try:
                answer = self._ask(address, method, request, deadline)
            except StoreUnavailable as error:
                tried = f"{address}: {error}"
                if self._leader == address:
                    self._leader = ""
                if time.monotonic() >= deadline:
                    break
            except MooncakeError:
                self.breaker.success()
                raise
            else:
                self._leader = address
                self.breaker.success()
                return answer
        self.breaker.failure(time.monotonic())
        raise StoreUnavailable(tried)

    def _addresses(self) -> list[str]:
        """The last leader first."""
        known = self._masters() if callable(self._masters) else self._masters
        leader = self._leader
        return sorted(dict.fromkeys(known), key=lambda address: address != leader)

    def _ask(self, address: str, method: str, request: Any, deadline: float) -> Any:
        timeout_s = deadline - time.monotonic()
        if timeout_s < _MIN_TIMEOUT_S:
            raise StoreUnavailable("the deadline has passed")
        try:
            return getattr(self._stub(address), method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
                raise StoreUnavailable(f"no answer to {method} in time") from error
            raise to_mooncake_error(error, unavailable=StoreUnavailable) from error
        except ValueError as error:  # grpc: the channel was closed by another thread
            raise StoreUnavailable(str(error)) from error

    def _stub(self, address: str) -> store_pb2_grpc.StoreMasterStub:
        with self._lock:
            if self._closed:
                raise StoreUnavailable("this store client is closed")
            if address not in self._stubs:
                channel = sync_channel(address, self._token)
                self._stubs[address] = (channel, store_pb2_grpc.StoreMasterStub(channel))
                self._trim(address)
            return self._stubs[address][1]

    def _trim(self, keep: str, most: int = 8) -> None:
        for address in list(self._stubs)[:-most]:
            if address != keep:
                self._stubs.pop(address)[0].close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for channel, _ in self._stubs.values():
                channel.close()
            self._stubs.clear()
