"""The first and the last calls of the drop-in `TransferEngine`.

Knows: when there is an engine behind the object. Does not know: what it is used for (memory_calls, transfer_calls, engine).
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

from mooncake.common.errors import TransferError
from mooncake.drop_in.arguments import text
from mooncake.drop_in.names import P2P
from mooncake.drop_in.results import INVALID, failing_with
from mooncake.drop_in.running import Running


class Life:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: Running | None = None
        self._end: weakref.finalize[..., Any] | None = None

    @property
    def _now(self) -> Running:
        running = self._running
        if running is None:
            raise TransferError("the engine is not initialized: call initialize() first")
        return running

    @failing_with(INVALID)
    def initialize(self, local_hostname: str, metadata_server: str, protocol: str, device_name: str) -> int:
        """0, or -1 with the reason in the log. Once more: starts anew, with nothing registered."""
        arguments = [
            text(local_hostname, "local_hostname"), text(metadata_server, "metadata_server"), text(protocol, "protocol"),
            text(device_name, "device_name"),
        ]  # fmt: skip
        with self._lock:
            self._close()
            self._running = running = Running(*arguments)
            self._end = weakref.finalize(self, _end, running, os.getpid())
        return 0

    def initialize_ext(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str, metadata_type: str
    ) -> int:
        """`initialize` with the metadata server's kind apart: P2PHANDSHAKE, etcd or http."""
        kind, server = text(metadata_type, "metadata_type"), text(metadata_server, "metadata_server")
        if kind and kind.upper() != P2P and "://" not in server:
            server = f"{kind}://{server}"
        return self.initialize(local_hostname, server, protocol, device_name)

    def close(self) -> None:
        """Not in the open-source API, where only the destructor does it. Idempotent."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        end, self._end, self._running = self._end, None, None
        if end is not None:
            end()

    @failing_with(INVALID)
    def get_rpc_port(self) -> int:
        """The port that peers name us by; -1 before `initialize`."""
        return self._now.port

    def get_engine(self) -> Any:
        """The engine itself, for `MooncakeDistributedStore.setup(engine=...)`; None before `initialize`."""
        return self._running.engine if self._running is not None else None

    def get_engine_ptr(self) -> int:
        """Always 0: there is no C++ object behind this one."""
        return 0


def _end(running: Running, pid: int) -> None:
    if os.getpid() == pid:  # a forked child holds copies of our sockets, and must not say goodbye for us
        running.close()
