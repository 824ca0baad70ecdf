"""KV events from vLLM's PUB socket, applied in order to `HeldBlocks` without holding up the event loop.

vLLM binds an ipc endpoint (facts/vllm.md §4: ipc and wildcards are bound, other addresses connected to) in the host's
private folder, so nothing listens on any network interface. Frames: topic, sequence (8 bytes big-endian), payload.
A gap in the sequence is counted; what was known stays (most of it is still true, and vLLM would not tell it again), and
blocks whose parents got lost are dropped one by one as they come.
Knows: frames. Does not know: what events mean (kv_events.py), the Conductor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq
import zmq.asyncio

from mooncake.vllm.kv_events import BadEvent, HeldBlocks, decode_batch

_log = logging.getLogger(__name__)
_HIGH_WATER_MARK = 200_000


class KVEventSocket:
    """`connect` before vLLM starts; `run` when `HeldBlocks` exists (messages wait in the socket until then)."""

    def __init__(self, endpoint: str) -> None:
        self.gaps = 0
        self.lost_batches = 0
        self.batches = 0
        self.bad_batches = 0
        self.endpoint = endpoint
        self._expected = 0
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None

    def connect(self) -> None:
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(self.endpoint)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._context.term()

    async def run(self, held: HeldBlocks, on_change: Callable[[], None]) -> None:
        """Applies events until cancelled; `on_change` is called when there is a delta to tell."""
        assert self._socket is not None
        while True:
            await self.handle(await self._socket.recv_multipart(), held)
            if held.has_delta:
                on_change()

    async def handle(self, frames: list[bytes], held: HeldBlocks) -> None:
        """One message of the socket."""
        if len(frames) != 3 or len(frames[1]) != 8:
            self.bad_batches += 1
            return
        self._check_sequence(int.from_bytes(frames[1], "big"), held)
        try:
            events = decode_batch(frames[2])
        except BadEvent as error:
            self.bad_batches += 1
            _log.warning("unreadable KV events", extra={"fields": {"error": str(error)}})
            return
        self.batches += 1
        for tag, fields in events:
            for _ in held.apply(tag, fields):
                await asyncio.sleep(0)

    def _check_sequence(self, sequence: int, held: HeldBlocks) -> None:
        if sequence > self._expected:
            self.gaps += 1
            self.lost_batches += sequence - self._expected
            _log.warning("KV events were lost", extra={"fields": {"batches": sequence - self._expected}})
        elif sequence < self._expected:
            held.clear()  # another engine speaks
        self._expected = sequence + 1
