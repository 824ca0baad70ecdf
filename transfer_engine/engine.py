"""`TransferEngine`: the API of the paper's Listing 1 over the parts of this folder.

Knows: how the parts fit together, and the life of a submission from the application's call to its end. Does not know: wire
formats, states' inner rules, how a transport moves bytes. Thread-safe. docs/transfer_engine.md states the guarantees.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from mooncake.common.errors import ConfigError, MooncakeError, PeerUnavailable, TransferCancelled, TransferError, TransferTimeout
from transfer_engine import host
from transfer_engine.batch import Batch, Submission
from transfer_engine.config import MAX_NOTIFY_BYTES, EngineConfig
from transfer_engine.connections import Connections
from transfer_engine.control import Control, NotifyHandler
from transfer_engine.fence import FenceTable
from transfer_engine.handles import HandleTable
from transfer_engine.handshake import Hello, Identity
from transfer_engine.lanes import Job
from transfer_engine.link import Link
from transfer_engine.memory import Hold, Region, RegionTable
from transfer_engine.notify import Dispatcher
from transfer_engine.protocol import Goodbye, Notify
from transfer_engine.requests import parse
from transfer_engine.router import Router
from transfer_engine.segment import Directory, PeerRecord, Session
from transfer_engine.server import Listener
from transfer_engine.shared_buffer import SharedBuffer
from transfer_engine.slices import slice_size, split
from transfer_engine.sweep import Sweeper
from transfer_engine.transports import sysio
from transfer_engine.transports.base import Host, Stats, Transport
from transfer_engine.transports.local import LocalTransport
from transfer_engine.transports.shm import ShmTransport
from transfer_engine.transports.tcp import TcpTransport
from transfer_engine.transports.tcp_server import ServedStream
from transfer_engine.types import BatchId, SegmentHandle, TransferRequest, TransferState, TransferStatus, TransferVector

Requests = Sequence[TransferRequest] | TransferVector
TransportFactory = Callable[[Host], Transport]
_FACTORIES: dict[str, TransportFactory] = {"local": LocalTransport, "shm": ShmTransport, "tcp": TcpTransport}


class TransferEngine:
    """Moves bytes between registered memory of this process and of peers. `close` it, or use it as a context manager.

    Raises ConfigError for an unknown transport and OSError when it cannot bind.
    """

    def __init__(self, config: EngineConfig | None = None, *, transports: dict[str, TransportFactory] | None = None) -> None:
        self.config = config = config or EngineConfig()
        factories = _FACTORIES | (transports or {})
        for name in config.transports:
            if name not in factories:
                raise ConfigError(f"unknown transport {name!r}; known: {', '.join(sorted(factories))}")
        self.instance_id = uuid.uuid4().hex
        self.counters = Stats()
        self.memory = RegionTable(config.max_regions)
        self.incoming = FenceTable(config.max_fences, config.fence_ttl_s)
        self.outgoing = FenceTable(config.max_fences, config.fence_ttl_s)
        self.peers = Directory(4 * config.max_peers + config.max_connections)
        self.notify_handler: NotifyHandler | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._live: set[Submission] = set()
        self._buffers: set[SharedBuffer] = set()
        self._batches: HandleTable[Batch] = HandleTable(config.max_batches, "batch")
        self._segments: HandleTable[Session] = HandleTable(16 * config.max_peers, "segment")
        self._probe = ctypes.create_string_buffer(self.instance_id.encode())
        if config.allow_ptracer:
            sysio.allow_any_ptracer()
        self._listener = Listener(config, self.counters)
        self.address = self._listener.address
        pid = os.getpid()
        self.identity = Identity(
            self.instance_id, config.name, self.address, host.host_key(), pid, host.start_ticks(pid),
            ctypes.addressof(self._probe), config.transports,
        )  # fmt: skip
        label = config.name or self.address
        self.notifications = Dispatcher(f"te-notify-{label}", config.notify_queue)
        self._callbacks = Dispatcher(f"te-callbacks-{label}", 4 * config.max_batches)
        self.connections = Connections(config, self.identity, self.peers)
        self.control = self.connections.control = Control(self)
        self._transports = [factories[name](self) for name in config.transports]
        self._router = Router(self, self._transports, self.control)
        self._sweeper = Sweeper(f"te-sweep-{label}", self._sweep)
        self._listener.start(self.identity, self._serve)

    def __enter__(self) -> TransferEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- memory -----------------------------------------------------------------------------------------------------

    def register_local_memory(
        self, address: int, length: int, *, owner: object | None = None, location: str = "cpu", remote_access: bool = True
    ) -> None:
        """Make a range usable as source, and by peers as target (`remote_access`). The same range again counts up. `owner` is
        kept alive. Raises RegionOverlap, ValueError (not a range, or not mapped)."""
        self._alive()
        if length > 0 and 0 < address < 1 << 64 and not sysio.is_mapped(address, length):
            raise ValueError(f"[{address:#x}, +{length}) is not mapped memory of this process")
        self.memory.add(Region(address, length, remote_access, location, owner))

    def register_buffer(self, buffer: Any, *, location: str = "cpu", remote_access: bool = True) -> int:
        """Register a writable buffer, numpy array or torch tensor (contiguous) and return its address. Raises ValueError."""
        address, length = _extent(buffer)
        self.register_local_memory(address, length, owner=buffer, location=location, remote_access=remote_access)
        return address

    def unregister_local_memory(self, address: int, *, timeout_s: float = 5.0) -> None:
        """Undo one registration. With the last one, returns when nothing touches the range any more, peers with direct access
        included. Raises NotRegistered, and TransferTimeout: the range then stays closed to new work; call again."""
        region = self.memory.drop_reference(address)
        if region is None:
            return
        deadline = time.monotonic() + timeout_s
        if region.remote_access and not self._closed:
            self.control.revoke(region.address, region.length, timeout_s)
        self.memory.wait_unused(region, max(0.0, deadline - time.monotonic()))
        self.memory.remove(region)

    def allocate_shared(self, length: int, name: str | None = None) -> SharedBuffer:
        """Registered memory that peers on this host can map: the fastest target. `name` only labels it in /proc."""
        self._alive()
        buffer = SharedBuffer(length, name or "mooncake", self._free_shared)
        self.memory.add(Region(buffer.address, length, owner=None, location="cpu", backing=buffer.info))
        with self._lock:
            self._buffers.add(buffer)
        return buffer

    def _free_shared(self, buffer: SharedBuffer) -> None:
        if not self._closed:
            self.unregister_local_memory(buffer.address)
        with self._lock:
            self._buffers.discard(buffer)

    # --- segments ---------------------------------------------------------------------------------------------------

    def open_segment(self, address: str, *, instance_id: str | None = None, timeout_s: float = 5.0) -> SegmentHandle:
        """Open the peer at `host:port`. Raises PeerUnavailable (unreachable, or not `instance_id`), AuthenticationFailed,
        TransferTimeout, Overloaded, ValueError."""
        self._alive()
        deadline = time.monotonic() + timeout_s
        session = self.connections.open(address, instance_id or "", deadline)
        self._router.prepare(session, deadline)
        return SegmentHandle(self._segments.allocate(session))

    def close_segment(self, handle: SegmentHandle) -> None:
        """Raises InvalidHandle. Transfers in progress go on; connections stay for the next opening until they idle out."""
        session = self._segments.free(handle)
        if self.connections.release(session):
            self._router.forget(session)

    def segment_instance(self, handle: SegmentHandle) -> str:
        """The instance id of an open segment's peer."""
        return self._segments.get(handle).instance_id

    def send_probe(self, address: str, *, timeout_s: float = 2.0) -> bool:
        """Whether an engine that holds our token answers there."""
        return self.connections.probe(address, time.monotonic() + timeout_s)

    # --- transfers --------------------------------------------------------------------------------------------------

    def allocate_batch_id(self, batch_size: int) -> BatchId:
        """Room for `batch_size` requests. Raises Overloaded when `max_batches` are in use, ValueError."""
        self._alive()
        if not 0 < batch_size <= self.config.max_batch_requests:
            raise ValueError(f"batch_size must be 1 to {self.config.max_batch_requests}, not {batch_size}")
        return BatchId(self._batches.allocate(Batch(batch_size)))

    def submit_transfer(
        self, batch_id: BatchId, requests: Requests, *, deadline_s: float, group: int = 0, priority: int = 0, notify: bytes | None = None
    ) -> None:
        """Start requests; returns at once. Greater `priority` goes first. `group` (64 bit, 0: none) is what the target can
        cancel. `notify` is delivered to every target after all bytes are placed, and is part of the transfer.
        Raises InvalidHandle, NotRegistered (local side), TransferCancelled (fenced group), ValueError; the rest is status."""
        if not 0 < deadline_s <= self.config.max_deadline_s:
            raise ValueError(f"deadline_s must be above 0 and at most {self.config.max_deadline_s}")
        if not 0 <= group < 1 << 64:
            raise ValueError("group must be a 64 bit number")
        _check_notify(notify)
        parts, lengths = parse(requests)
        sessions = {target: self._segments.get(target) for target, _, _ in parts}
        filled = [(target, opcode, columns.take(columns.length > 0)) for target, opcode, columns in parts]
        filled = [part for part in filled if len(part[2].length)]
        hold = None
        if filled:
            hold = self.memory.hold(
                np.concatenate([c.local for _, _, c in filled]), np.concatenate([c.length for _, _, c in filled])
            )
        try:
            submission = self._admit(batch_id, lengths, list(sessions.values()), deadline_s, group, priority, notify, hold)
        except BaseException:
            if hold is not None:
                self.memory.release(hold)
            raise
        self._sweeper.expect(submission.deadline)
        for target, opcode, columns in filled:
            self._router.route(Job(submission, sessions[target], opcode, self._split(columns)))
        submission.open()

    def _admit(
        self, batch_id: BatchId, lengths: Any, sessions: list[Session], deadline_s: float, group: int, priority: int,
        notify: bytes | None, hold: Hold | None,
    ) -> Submission:  # fmt: skip
        with self._lock:
            self._alive()
            batch = self._batches.get(batch_id)
            peers = frozenset(session.instance_id for session in sessions)
            if group and any((peer, group) in self.outgoing for peer in peers):
                raise TransferCancelled(f"group {group:#x} was cancelled by the target")
            submission = Submission(
                batch, lengths, deadline=time.monotonic() + deadline_s, group=group, priority=priority, notify=notify,
                peers=peers, effects=self,
            )  # fmt: skip
            submission.hold = hold
            batch.admit(submission)
            self._live.add(submission)
            return submission

    def _split(self, columns: Any) -> Any:
        config = self.config
        lanes = max(config.streams_per_peer, config.copy_threads)
        return split(columns, slice_size(int(columns.length.sum()), lanes, config.slice_min_bytes, config.slice_bytes))

    def get_transfer_status(self, batch_id: BatchId, index: int) -> TransferStatus:
        """Status of one request, counted in the order of submission. Raises InvalidHandle."""
        return self._batches.get(batch_id).request_status(index)

    def get_batch_status(self, batch_id: BatchId) -> TransferStatus:
        """Raises InvalidHandle."""
        return self._batches.get(batch_id).status()

    def wait(self, batch_id: BatchId, timeout_s: float) -> TransferStatus:
        """Block until the batch is over or `timeout_s` has passed; tells its status either way. Raises InvalidHandle."""
        batch = self._batches.get(batch_id)
        batch.wait(timeout_s)
        return batch.status()

    async def wait_async(self, batch_id: BatchId) -> TransferStatus:
        """Wait without blocking the event loop. Cancelling the task does not cancel the batch. Raises InvalidHandle."""
        batch = self._batches.get(batch_id)
        loop = asyncio.get_running_loop()
        over = loop.create_future()

        def finish() -> None:
            if not over.done():
                over.set_result(None)

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(finish)
            except RuntimeError:  # the loop is closed; nobody waits any more
                pass

        if batch.add_callback(wake):
            await over
        return batch.status()

    def add_done_callback(self, batch_id: BatchId, callback: Callable[[TransferStatus], None]) -> None:
        """Call `callback(status)` on an engine thread once the batch is over (soon, when it is). Raises InvalidHandle."""
        batch = self._batches.get(batch_id)

        def run() -> None:
            if not self._callbacks.put(lambda: callback(batch.status())):
                self.counters.add(lost_callbacks=1)

        if not batch.add_callback(run):
            run()

    def cancel(self, batch_id: BatchId) -> None:
        """Stop what has not happened yet; `wait` tells when it has stopped. Raises InvalidHandle."""
        for submission in list(self._batches.get(batch_id).submissions):
            submission.abort(TransferState.CANCELLED, TransferCancelled("cancelled by the initiator"), time.monotonic() + 0.2)

    def free_batch_id(self, batch_id: BatchId) -> None:
        """Raises InvalidHandle, and TransferError while the batch runs."""
        with self._lock:
            if not self._batches.get(batch_id).idle:
                raise TransferError("the batch is still running: wait for it or cancel it")
            self._batches.free(batch_id)

    def transfer_sync(self, requests: Requests, deadline_s: float, *, group: int = 0, priority: int = 0, notify: bytes | None = None) -> TransferStatus:
        """Submit, wait and free. Raises what made it fail; returns the status of success."""
        count = len(requests.source) if isinstance(requests, TransferVector) else len(requests)
        batch_id = self.allocate_batch_id(max(1, count))
        batch = self._batches.get(batch_id)
        try:
            self.submit_transfer(batch_id, requests, deadline_s=deadline_s, group=group, priority=priority, notify=notify)
            if not batch.wait(deadline_s + 5.0):
                raise TransferTimeout(f"no end within {deadline_s} s and 5 s more")
            status = batch.status()
        except BaseException:
            for submission in list(batch.submissions):
                submission.abort_closed()
            raise
        finally:
            if not batch.add_callback(lambda: cast(None, self._batches.free(batch_id))):
                self._batches.free(batch_id)
        status.raise_for_error()
        return status

    # --- notifications and fences -----------------------------------------------------------------------------------

    def send_notify(self, segment: SegmentHandle, payload: bytes, *, deadline_s: float = 2.0) -> None:
        """Put `payload` (at most 64 KiB) into the peer's handler queue; returns when it is there. Raises InvalidHandle,
        PeerUnavailable, TransferTimeout, Overloaded (the queue is full), TransferError (no handler there), ValueError."""
        _check_notify(payload)
        session = self._segments.get(segment)
        deadline = time.monotonic() + deadline_s
        if session.record.said_goodbye:
            raise PeerUnavailable(f"{session.address}: instance {session.instance_id} has closed")
        session.ensure_link(deadline).request(Notify(bytes(payload)), deadline)

    def on_notify(self, callback: NotifyHandler) -> None:
        """`callback(peer_instance_id, peer_address, payload)` runs on one dispatcher thread, in order per peer; keep it short."""
        self.notify_handler = callback

    def cancel_incoming(
        self, group: int, peer: SegmentHandle | str, *, instance_id: str | None = None, timeout_s: float = 2.0
    ) -> bool:
        """The fence: after True, no byte of `group` from that initiator will be written into our memory any more, and later
        submissions of the group fail there. `peer` is the initiator's address or an open segment. True also when the initiator
        is proven gone. False: could not be proven in time (frozen or cut off while it had direct access); ask again later.
        Raises ValueError for group 0, Overloaded when too many fences are remembered."""
        if not 0 < group < 1 << 64:
            raise ValueError("group must be a 64 bit number above 0")
        record = self._initiator(peer, instance_id)
        known = instance_id or (record.identity.instance_id if record is not None else "")
        deadline = time.monotonic() + timeout_s
        if record is None and isinstance(peer, str):
            try:
                record = self.connections.meet(peer, known, min(deadline, time.monotonic() + self.config.connect_timeout_s))
                known = record.identity.instance_id
            except MooncakeError:
                pass  # it never spoke to us: the local fence is all there is to do
        return self.control.fence(record, known, group, max(0.0, deadline - time.monotonic()))

    def _initiator(self, peer: SegmentHandle | str, instance_id: str | None) -> PeerRecord | None:
        if not isinstance(peer, str):
            return self._segments.get(peer).record
        if instance_id is not None:
            return self.peers.get(instance_id)
        found = self.peers.at_address(peer)
        return found[0] if found else None

    # --- for the parts ----------------------------------------------------------------------------------------------

    def session_of(self, instance_id: str) -> Session | None:
        return self.connections.get(instance_id)

    def link_to(self, record: PeerRecord, deadline: float) -> Link:
        return self.connections.link_to(record, deadline)

    def submissions_of(self, instance_id: str, group: int) -> list[Submission]:
        with self._lock:
            return [s for s in self._live if s.group == group and instance_id in s.peers]

    def reroute(self, job: Job, after: Transport) -> None:
        self._router.reroute(job, after)

    def bytes_placed(self, submission: Submission) -> None:
        sessions = [s for s in map(self.connections.get, submission.peers) if s is not None]
        self._router.notify(submission, sessions)

    def settled(self, submission: Submission) -> None:
        hold = submission.hold
        if isinstance(hold, Hold):
            self.memory.release(hold)
        submission.hold = None
        with self._lock:
            self._live.discard(submission)
        self.counters.add(**{f"transfers_{submission.state.value}": 1, "transfer_requests": len(submission.length)})

    def _sweep(self, now: float) -> float | None:
        with self._lock:
            live = list(self._live)
        for submission in live:
            if submission.deadline <= now and not submission.doomed:
                submission.abort(TransferState.TIMED_OUT, TransferTimeout("the transfer's deadline passed"), now)
        for link in self.connections.links():
            link.expire(now)
        waiting = [s.deadline for s in live if not s.doomed]
        return min(waiting) if waiting else None

    def _serve(self, sock: Any, hello: Hello) -> None:
        if not hello.stream_id:
            return self.connections.serve(sock, hello)
        record = self.peers.meet(hello.identity)
        stream = ServedStream(
            sock, hello.identity.instance_id, self.memory, self.incoming, self.counters,
            buffer_bytes=self.config.socket_buffer_bytes, stall_timeout_s=self.config.stall_timeout_s,
        )  # fmt: skip
        record.streams[hello.stream_id] = stream
        try:
            stream.run()
        finally:
            record.streams.pop(hello.stream_id, None)

    def _alive(self) -> None:
        if self._closed:
            raise TransferError("the transfer engine is closed")

    # --- life -------------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Counters since the start, and gauges: `open_*`, `live_transfers`, `regions`."""
        gauges: dict[str, float] = {
            "open_connections": self._listener.connections,
            "open_links": len(self.connections.links()),
            "open_sessions": len(self.connections.sessions()),
            "live_transfers": len(self._live),
            "regions": len(self.memory.regions()),
        }
        for transport in self._transports:
            if isinstance(transport, TcpTransport):
                gauges["open_streams"] = transport.open_streams
        return self.counters.snapshot() | gauges

    def close(self) -> None:
        """Cancel what runs, tell peers, end all threads and give all memory back; at most 3 s. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            live = list(self._live)
        began = time.monotonic()
        deadline = began + self.config.close_timeout_s
        self._listener.stop_accepting()
        for submission in live:
            submission.abort(TransferState.CANCELLED, TransferCancelled("the transfer engine is closed"), began)
        half = began + self.config.close_timeout_s / 2
        quiet = all([transport.close(half) for transport in self._transports])
        if any(record.granted and not record.proven_gone() for record in self.peers.all()):
            try:
                self.control.revoke(0, 0, min(0.5, max(0.0, deadline - time.monotonic())))
            except TransferTimeout:
                self.counters.add(unrevoked_closes=1)
        if quiet:
            self._say_goodbye()
        self._listener.close(deadline)
        for link in self.connections.links():
            link.close()
        self._sweeper.close(0.2)
        self.notifications.close(0.2)
        self._callbacks.close(0.2)
        for session in self.connections.sessions():
            session.regions.clear()
        for buffer in list(self._buffers):
            buffer.close()
        self.memory.clear()

    def _say_goodbye(self) -> None:
        deadline = time.monotonic() + 0.2
        for record in self.peers.all():
            for link in list(record.links)[:1]:
                link.ask(Goodbye(), deadline, lambda _: None)


def _check_notify(payload: bytes | None) -> None:
    if payload is not None and len(payload) > MAX_NOTIFY_BYTES:
        raise ValueError(f"a notification holds at most {MAX_NOTIFY_BYTES} bytes, not {len(payload)}")


def _extent(buffer: Any) -> tuple[int, int]:
    """(address, bytes) of a writable contiguous buffer. Raises ValueError."""
    if hasattr(buffer, "data_ptr"):  # torch
        if not buffer.is_contiguous():
            raise ValueError("a tensor must be contiguous to be registered")
        return buffer.data_ptr(), buffer.numel() * buffer.element_size()
    try:
        view = memoryview(buffer)
    except TypeError as error:
        raise ValueError(f"{type(buffer).__name__} is not a buffer") from error
    if view.readonly or not view.c_contiguous:
        raise ValueError("a buffer must be writable and contiguous to be registered")
    array = np.frombuffer(view, np.uint8)
    return array.ctypes.data, view.nbytes


