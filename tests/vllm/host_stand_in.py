"""A worker host that only listens: collects what the connector halves of one engine say."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import zmq

from mooncake.vllm.host_link import (
    Counters,
    Release,
    StoreMasters,
    ToHost,
    TraceEvents,
    WorkerHello,
    decode_to_host,
    encode,
)

T = TypeVar("T")


class HostStandIn:
    def __init__(self, directory: Path, name: str) -> None:
        self.endpoint = f"ipc://{directory}/{name}.sock"
        self.messages: list[ToHost] = []
        self._worker: bytes | None = None
        self._outbox: list[bytes] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"host-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.bind(self.endpoint)
        while not self._closing:
            while self._outbox and self._worker:
                socket.send_multipart([self._worker, self._outbox.pop(0)])
            if socket.poll(20):
                identity, payload = socket.recv_multipart()
                message = decode_to_host(payload)
                if isinstance(message, WorkerHello):
                    self._worker = identity
                self.messages.append(message)
        socket.close(0)
        context.term()

    def release(self, transfer_id: str) -> None:
        self._outbox.append(encode(Release(transfer_id)))

    def store_masters(self, *addresses: str) -> None:
        self._outbox.append(encode(StoreMasters(list(addresses))))

    def wait_for(self, kind: type[T], wanted: Callable[[T], bool] = lambda _: True, timeout_s: float = 10.0) -> T:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for message in list(self.messages):
                if isinstance(message, kind) and wanted(message):
                    return message
            time.sleep(0.01)
        raise TimeoutError(f"no {kind.__name__} within {timeout_s} s")

    def peer(self) -> dict[str, str]:
        """What a decoding leg has to know of this engine."""
        hello = self.wait_for(WorkerHello, timeout_s=240)
        return {"peer_address": hello.transfer_address, "peer_instance_id": hello.transfer_instance_id}

    def counters(self) -> dict[str, float]:
        """The last values of all halves."""
        values: dict[str, float] = {}
        for message in list(self.messages):
            if isinstance(message, Counters):
                values |= message.values
        return values

    def trace(self, transfer_id: str) -> list[dict[str, Any]]:
        return [
            event
            for message in list(self.messages)
            if isinstance(message, TraceEvents) and message.transfer_id == transfer_id
            for event in message.events
        ]

    def close(self) -> None:
        self._closing = True
        self._thread.join(2)
