"""Nodes as a client reaches them: open segments for bytes, gRPC stubs for announcements, and who is dead.

Knows: one handle a node's life, one channel an address, bounded. Does not know: objects. Thread-safe.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from typing import Any

import grpc

from mooncake.common.errors import MooncakeError, PeerUnavailable, TransferError
from mooncake.common.proto import store_pb2 as pb
from mooncake.common.proto import store_pb2_grpc
from mooncake.common.rpc import sync_channel, to_mooncake_error
from transfer_engine import SegmentHandle, TransferEngine

_MAX_NODES = 1024
_OPEN_TIMEOUT_S = 2.0
_DEAD_S = 2.0


class NodeCall:
    """A call under way, so that several nodes can be asked at once."""

    def __init__(self, future: Any) -> None:
        self._future = future

    def result(self) -> Any:
        """Raises PeerUnavailable when the node cannot be reached or does not answer in time, else what it said."""
        if isinstance(self._future, MooncakeError):
            raise self._future
        try:
            return self._future.result()
        except grpc.FutureCancelledError as error:
            raise PeerUnavailable("the client is closing") from error
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise PeerUnavailable("the node does not answer in time") from error
            raise to_mooncake_error(error) from error


class PeerCache:
    """A node that could not be reached is not tried again for a moment: a dead peer costs one time-out, not one a call."""

    def __init__(self, engine: TransferEngine, *, token: str) -> None:
        self._engine = engine
        self._token = token
        self._lock = threading.Lock()
        self._handles: OrderedDict[str, SegmentHandle] = OrderedDict()
        self._stubs: OrderedDict[str, tuple[grpc.Channel, store_pb2_grpc.StoreNodeStub]] = OrderedDict()
        self._dead: dict[str, float] = {}
        self._closed = False

    def open(self, replica: pb.Replica, deadline: float) -> SegmentHandle:
        """The open segment of the replica's node. Raises PeerUnavailable (also for another life of the node)."""
        instance_id, now = replica.instance_id, time.monotonic()
        with self._lock:
            if self._dead.get(instance_id, 0.0) > now:
                raise PeerUnavailable(f"{replica.segment} could not be reached a moment ago")
            known = self._handles.get(instance_id)
            if known is not None:
                self._handles.move_to_end(instance_id)
                return known
        timeout_s = min(_OPEN_TIMEOUT_S, max(0.001, deadline - now))
        try:
            handle = self._engine.open_segment(replica.engine_address, instance_id=instance_id, timeout_s=timeout_s)
        except PeerUnavailable:
            self.mark_dead(instance_id)
            raise
        with self._lock:
            known = self._handles.setdefault(instance_id, handle)
            surplus = [handle] if known != handle else []
            while len(self._handles) > _MAX_NODES:
                surplus.append(self._handles.popitem(last=False)[1])
        self._close_handles(surplus)
        return known

    def mark_dead(self, instance_id: str) -> None:
        """Forget it, and fail at once for a moment."""
        now = time.monotonic()
        with self._lock:
            self._dead = {known: until for known, until in self._dead.items() if until > now}
            self._dead[instance_id] = now + _DEAD_S
            handle = self._handles.pop(instance_id, None)
        self._close_handles([handle] if handle is not None else [])

    def ask(self, address: str, method: str, request: Any, timeout_s: float) -> NodeCall:
        """Starts a call of a node's gRPC."""
        try:
            return NodeCall(getattr(self._stub(address), method).future(request, timeout=timeout_s))
        except ValueError as error:  # grpc says so too, when another thread has closed the channel
            return NodeCall(PeerUnavailable(str(error)))

    def _stub(self, address: str) -> store_pb2_grpc.StoreNodeStub:
        with self._lock:
            if self._closed:
                raise ValueError("the client is closed")
            if address not in self._stubs:
                channel = sync_channel(address, self._token)
                self._stubs[address] = (channel, store_pb2_grpc.StoreNodeStub(channel))
                while len(self._stubs) > _MAX_NODES:
                    self._stubs.popitem(last=False)[1][0].close()
            self._stubs.move_to_end(address)
            return self._stubs[address][1]

    def _close_handles(self, handles: list[SegmentHandle]) -> None:
        for handle in handles:
            with contextlib.suppress(TransferError):
                self._engine.close_segment(handle)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            handles, self._handles = list(self._handles.values()), OrderedDict()
            stubs, self._stubs = list(self._stubs.values()), OrderedDict()
        self._close_handles(handles)
        for channel, _ in stubs:
            channel.close()
