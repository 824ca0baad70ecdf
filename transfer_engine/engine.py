"""`TransferEngine`: the API of the paper's Listing 1 over the parts of this folder.

Knows: how the parts fit together, and the application's handles. Does not know: wire formats, states' inner rules, how a
transport moves bytes. Thread-safe. docs/transfer_engine.md states the guarantees.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from socket import socket
from typing import Any

from mooncake.common.errors import ConfigError, MooncakeError, TransferCancelled, TransferError, TransferTimeout
from transfer_engine import host
from transfer_engine.batch import Batch, Submission
from transfer_engine.config import EngineConfig
from transfer_engine.connections import Connections
from transfer_engine.control import Control, NotifyHandler
from transfer_engine.device.staging import DeviceMemory
from transfer_engine.express import Express
from transfer_engine.fence import FenceTable
from transfer_engine.handles import HandleTable
from transfer_engine.handshake import Hello, Identity
from transfer_engine.lanes import Job
from transfer_engine.link import Link
from transfer_engine.memory import RegionTable
from transfer_engine.notify import Dispatcher
from transfer_engine.protocol import EndpointOffer, GetFirstRegion, Goodbye, NicInfo, Notify, Reply
from transfer_engine.registration import Registration, extent
from transfer_engine.requests import parse
from transfer_engine.router import Router
from transfer_engine.segment import Directory, PeerRecord, Session
from transfer_engine.server import Listener
from transfer_engine.shared_buffer import SharedBuffer
from transfer_engine.transports import sysio
from transfer_engine.transports.base import Host, KeyedTransport, Stats, Transport
from transfer_engine.transports.local import LocalTransport
from transfer_engine.transports.rdma.transport import RdmaTransport
from transfer_engine.transports.shm import ShmTransport
from transfer_engine.transports.tcp import TcpTransport
from transfer_engine.transports.tcp_server import ServedStream
from transfer_engine.types import (
    BatchId,
    SegmentHandle,
    TransferRequest,
    TransferState,
    TransferStatus,
    TransferVector,
)
from transfer_engine.work import Terms, Work, check_notify

Requests = Sequence[TransferRequest] | TransferVector
TransportFactory = Callable[[Host], Transport]
_FACTORIES: dict[str, TransportFactory] = {
    "local": LocalTransport,
    "shm": ShmTransport,
    "rdma": RdmaTransport,
    "tcp": TcpTransport,
}
_CANCEL_GRACE_S = 0.2


class TransferEngine:
    """Moves bytes between registered memory of this process and of peers. `close` it, or use it as a context manager.

    `transports` adds ways by name. Raises ConfigError for an unknown transport or bad TLS files, OSError when it cannot bind, and
    Overloaded when it gets no thread.
    """

    def __init__(
        self, config: EngineConfig | None = None, *, transports: dict[str, TransportFactory] | None = None
    ) -> None:
        self.config = config = config or EngineConfig()
        factories = _FACTORIES | (transports or {})
        self._names = _usable(config, factories)
        self.instance_id = uuid.uuid4().hex
        self.counters = Stats()
        self.memory = RegionTable(config.max_regions)
        self.devices = DeviceMemory(config, self.memory)
        self.incoming = FenceTable(config.max_fences, config.fence_ttl_s)
        self.outgoing = FenceTable(config.max_fences, config.fence_ttl_s)
        self.peers = Directory(4 * config.max_peers + config.max_connections)
        self.notify_handler: NotifyHandler | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._batches: HandleTable[Batch] = HandleTable(config.max_batches, "batch")
        self._segments: HandleTable[Session] = HandleTable(16 * config.max_peers, "segment")
        self._probe = ctypes.create_string_buffer(self.instance_id.encode())
        if config.allow_ptracer:
            sysio.allow_any_ptracer()
        self._listener = Listener(config, self.counters)
        self.address = self._listener.address
        self.identity = self._identify()
        label = config.name or self.address
        self.notifications = Dispatcher(f"te-notify-{label}", config.notify_queue)
        self._callbacks = Dispatcher(f"te-callbacks-{label}", 4 * config.max_batches)
        self.connections = Connections(config, self.identity, self.peers)
        self._control = self.connections.control = Control(self)
        self._registration = Registration(self.memory, self._control, self.devices, config.cuda_driver)
        self._transports: list[Transport] = []
        with contextlib.ExitStack() as undo:  # half an engine would hold a port, threads and NICs
            undo.callback(self._listener.stop_accepting)
            self._work = Work(config, self.memory, self.outgoing, self.connections, self.counters, label)
            undo.callback(self._work.close)
            for name in self._names:
                self._transports.append(factories[name](self))
                undo.callback(self._transports[-1].close, 0.0)
            self._keyed = next((t for t in self._transports if isinstance(t, KeyedTransport)), None)
            self._registration.keyed = self._keyed
            self._router = self._work.router = Router(self, self._transports, self._control)
            self._express = Express(self._segments, self.memory, self.devices, self._router, self.counters)
            self._listener.start(self.identity, self._serve)
            undo.pop_all()

    def _identify(self) -> Identity:
        pid = os.getpid()
        return Identity(
            instance_id=self.instance_id,
            name=self.config.name,
            address=self.address,
            host_key=host.host_key(),
            pid=pid,
            start_ticks=host.start_ticks(pid),
            probe_address=ctypes.addressof(self._probe),
            transports=self._names,
        )

    def __enter__(self) -> TransferEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- memory -----------------------------------------------------------------------------------------------------

    def register_local_memory(
        self,
        address: int,
        length: int,
        *,
        owner: object | None = None,
        location: str = "cpu",
        remote_access: bool = True,
    ) -> None:
        """Make a range usable as source, and by peers as target (`remote_access`). The same range again counts up.
        `owner` is kept alive. `location`: `cpu`, `cpu:N` (NUMA node), `cuda:N`, or `*` to find out. GPU memory: what the
        GPU still writes must be synchronised before it is submitted. Raises RegionOverlap, ValueError (not a range, not
        mapped, not where it was said to be), ConfigError (`cuda:N` without a driver or such a GPU), DeviceError."""
        self._alive()
        self._registration.register(address, length, owner, location, remote_access)

    def register_buffer(self, buffer: Any, *, location: str | None = None, remote_access: bool = True) -> int:
        """Register a writable buffer, numpy array or torch tensor (contiguous, on CPU or GPU); returns its address. `location`
        defaults to where the tensor is. Raises like `register_local_memory`."""
        address, length, where = extent(buffer)
        location = where if location is None else location
        self.register_local_memory(address, length, owner=buffer, location=location, remote_access=remote_access)
        return address

    def unregister_local_memory(self, address: int, *, timeout_s: float = 5.0) -> None:
        """Undo one registration. With the last one, returns when nothing touches the range any more, peers with direct
        access included. Raises NotRegistered, and TransferTimeout: the range then is closed to new work; call again."""
        self._registration.unregister(address, timeout_s)

    def allocate_shared(self, length: int, name: str | None = None) -> SharedBuffer:
        """Registered memory that peers on this host can map: the fastest target. `name` only labels it in /proc."""
        self._alive()
        return self._registration.allocate_shared(length, name or "mooncake")

    # --- segments ---------------------------------------------------------------------------------------------------

    def open_segment(self, address: str, *, instance_id: str | None = None, timeout_s: float = 5.0) -> SegmentHandle:
        """Open the peer at `host:port`. Raises PeerUnavailable (unreachable, or not `instance_id`),
        AuthenticationFailed, TransferTimeout, Overloaded, ValueError."""
        self._alive()
        deadline = time.monotonic() + timeout_s
        session = self.connections.open(address, instance_id or "", deadline)
        self._router.prepare(session, deadline)
        return SegmentHandle(self._segments.allocate(session))

    def close_segment(self, handle: SegmentHandle) -> None:
        """Raises InvalidHandle. Transfers in progress go on; the control connection stays for the next opening."""
        session = self._segments.free(handle)
        if self.connections.release(session):
            self._router.forget(session)

    def segment_instance(self, handle: SegmentHandle) -> str:
        """The instance id of an open segment's peer. Raises InvalidHandle."""
        return self._segments.get(handle).instance_id

    def segment_is_up(self, handle: SegmentHandle) -> bool:
        """Whether nothing speaks against the peer: it has not closed, does not rest after a failure, and our connection to
        it stands. Costs no round trip. Raises InvalidHandle."""
        session = self._segments.get(handle)
        return session.down is None and session.link is not None and session.link.alive

    def first_region(self, handle: SegmentHandle, *, timeout_s: float = 2.0) -> tuple[int, int] | None:
        """(address, bytes) of the region that the peer registered first; None when it has none. Raises InvalidHandle,
        PeerUnavailable, TransferTimeout."""
        deadline = time.monotonic() + timeout_s
        reply = self._segments.get(handle).ensure_link(deadline).request(GetFirstRegion(), deadline)
        return (reply.regions[0].address, reply.regions[0].length) if reply.regions else None

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
        self,
        batch_id: BatchId,
        requests: Requests,
        *,
        deadline_s: float,
        group: int = 0,
        priority: int = 0,
        notify: bytes | None = None,
        max_retries: int | None = None,
        nic: str = "",
    ) -> None:
        """Start requests; returns at once. Greater `priority` goes first. `group` (64 bit, 0: none) is what the target
        can cancel. `notify` is delivered to every target after all bytes are placed, and is part of the transfer.
        `max_retries` per slice (default: the engine's) and `nic`, the local NIC to prefer while it works, are hints.
        Raises InvalidHandle, NotRegistered (local side), TransferCancelled (fenced), ValueError; the rest is status."""
        retries = self.config.max_retries if max_retries is None else max_retries
        terms = Terms(deadline_s, group, priority, notify, False, retries, nic)
        self._submit(self._batches.get(batch_id), requests, terms)

    def _submit(self, batch: Batch, requests: Requests, terms: Terms) -> None:
        terms.check(self.config.max_deadline_s)
        parts, lengths = parse(requests)
        sessions = {target: self._segments.get(target) for target, _, _ in parts}
        self._work.submit(batch, parts, lengths, sessions, terms)

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
        """Wait without blocking the event loop. Cancelling the task leaves the batch alone. Raises InvalidHandle."""
        batch = self._batches.get(batch_id)
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()

        def finish() -> None:
            if not over.done():
                over.set_result(None)

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(finish)

        if batch.add_callback(wake):
            await over
        return batch.status()

    def add_done_callback(self, batch_id: BatchId, callback: Callable[[TransferStatus], None]) -> None:
        """Call `callback(status)` on an engine thread once the batch is over (soon, when it is). All callbacks share
        that thread: a blocking one delays others. Raises InvalidHandle."""
        batch = self._batches.get(batch_id)

        def run() -> None:
            if not self._callbacks.put(lambda: callback(batch.status())):
                self.counters.add(lost_callbacks=1)

        if not batch.add_callback(run):
            run()

    def cancel(self, batch_id: BatchId) -> None:
        """Stop what has not happened yet; `wait` tells when it has stopped. Raises InvalidHandle."""
        stop_at = time.monotonic() + _CANCEL_GRACE_S
        for submission in list(self._batches.get(batch_id).submissions):
            submission.abort(TransferState.CANCELLED, TransferCancelled("cancelled by the initiator"), stop_at)

    def free_batch_id(self, batch_id: BatchId) -> None:
        """Raises InvalidHandle, and TransferError while the batch runs."""
        with self._lock:
            if not self._batches.get(batch_id).idle:
                raise TransferError("the batch is still running: wait for it or cancel it")
            self._batches.free(batch_id)

    def transfer_sync(
        self,
        requests: Requests,
        deadline_s: float,
        *,
        group: int = 0,
        priority: int = 0,
        notify: bytes | None = None,
        max_retries: int | None = None,
        nic: str = "",
    ) -> TransferStatus:
        """Submit and wait. Raises what made it fail; returns the status of success. A small transfer is moved by the
        calling thread itself, which spares two thread switches."""
        self._alive()
        if not group and notify is None and 0 < deadline_s <= self.config.max_deadline_s:
            deadline = time.monotonic() + deadline_s
            status = self._express.move(requests, deadline)
            if status is not None:
                return status
            deadline_s = max(0.001, deadline - time.monotonic())
        count = len(requests.source) if isinstance(requests, TransferVector) else len(requests)
        batch = Batch(max(1, count))
        try:
            retries = self.config.max_retries if max_retries is None else max_retries
            self._submit(batch, requests, Terms(deadline_s, group, priority, notify, True, retries, nic))
            if not batch.wait(deadline_s + 5.0):
                raise TransferTimeout(f"no end within {deadline_s} s and 5 s more")
        except BaseException:
            for submission in list(batch.submissions):
                submission.abort(TransferState.CANCELLED, TransferCancelled("the caller was interrupted"), 0.0)
                submission.open()  # it may have been interrupted before that
            raise
        status = batch.status()
        status.raise_for_error()
        return status

    # --- notifications and fences -----------------------------------------------------------------------------------

    def send_notify(self, segment: SegmentHandle, payload: bytes, *, deadline_s: float = 2.0) -> None:
        """Put `payload` (at most 64 KiB) into the peer's handler queue; returns when it is there. Raises InvalidHandle,
        PeerUnavailable, TransferTimeout, Overloaded (the queue is full), TransferError (no handler), ValueError."""
        check_notify(payload)
        session = self._segments.get(segment)
        deadline = time.monotonic() + deadline_s
        problem = session.down
        if problem is not None:
            raise problem
        session.ensure_link(deadline).request(Notify(bytes(payload)), deadline)

    def on_notify(self, callback: NotifyHandler) -> None:
        """`callback(peer_instance_id, peer_address, payload)` runs on one dispatcher thread, in order per peer; keep it
        short. Notifications that arrive before a handler is set are refused."""
        self.notify_handler = callback

    def cancel_incoming(
        self, group: int, peer: SegmentHandle | str, *, instance_id: str | None = None, timeout_s: float = 2.0
    ) -> bool:
        """The fence: after True, no byte of `group` from that initiator will be written into our memory any more, and
        later submissions of the group fail there. `peer` is the initiator's address or an open segment. True also when
        the initiator is proven gone. False: could not be proven in time (frozen or cut off while it had direct access);
        ask again later. Raises ValueError for group 0, Overloaded when too many fences are remembered."""
        if not 0 < group < 1 << 64:
            raise ValueError("group must be a 64 bit number above 0")
        deadline = time.monotonic() + timeout_s
        record = self._initiator(peer, instance_id, deadline)
        known = instance_id or (record.identity.instance_id if record is not None else "")
        return self._control.fence(record, known, group, max(0.0, deadline - time.monotonic()))

    def _initiator(self, peer: SegmentHandle | str, instance_id: str | None, deadline: float) -> PeerRecord | None:
        if not isinstance(peer, str):
            return self._segments.get(peer).record
        found = [self.peers.get(instance_id)] if instance_id is not None else self.peers.at_address(peer)
        if found and found[0] is not None:
            return found[0]
        try:
            within = min(deadline, time.monotonic() + self.config.connect_timeout_s)
            return self.connections.meet(peer, instance_id or "", within)
        except MooncakeError:
            return None  # it never spoke to us and cannot be asked: the fence on our side is all there is to do

    # --- for the parts ----------------------------------------------------------------------------------------------

    def session_of(self, instance_id: str) -> Session | None:
        return self.connections.get(instance_id)

    def link_to(self, record: PeerRecord, deadline: float) -> Link:
        return self.connections.link_to(record, deadline)

    def submissions_of(self, instance_id: str, group: int) -> list[Submission]:
        return self._work.submissions_of(instance_id, group)

    def nics(self) -> list[NicInfo]:
        return self._keyed.nics() if self._keyed is not None else []

    def learn_fences(self, session: Session, reply: Reply) -> None:
        self._control.learn_fences(session, reply)

    def accept_endpoint(self, record: PeerRecord, offer: EndpointOffer) -> EndpointOffer:
        if self._keyed is None:
            raise TransferError("this engine has no NIC to connect to")
        return self._keyed.accept(record, offer)

    def route(self, job: Job) -> None:
        self._router.route(job)

    def reroute(self, job: Job, after: Transport) -> None:
        self._router.reroute(job, after)

    def _serve(self, sock: socket, hello: Hello) -> None:
        if not hello.stream_id:
            return self.connections.serve(sock, hello)
        record = self.peers.meet(hello.identity)
        stream = ServedStream(sock, hello.identity.instance_id, self)
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
        """Counters since the start (`<transport>_<read|write>_<bytes|slices|seconds>`, `transfers_<state>`, ...), and
        gauges: `open_*`, `<transport>_queued_slices`, `live_transfers`, `regions`. As metrics: metrics.py."""
        gauges: dict[str, float] = {"open_streams": 0}
        for transport in self._transports:
            gauges |= transport.gauges()
        return (
            self.counters.snapshot()
            | self.devices.stats()
            | {
                "open_connections": self._listener.connections,
                "open_links": len(self.connections.links()),
                "open_sessions": len(self.connections.sessions()),
                **gauges,
                "live_transfers": self._work.live,
                "regions": len(self.memory.regions()),
            }
        )

    def close(self) -> None:
        """Cancel what runs, tell peers, end all threads and give all memory back; at most 3 s. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        began = time.monotonic()
        deadline = began + self.config.close_timeout_s
        self._listener.stop_accepting()
        self._work.cancel_all()
        half = began + self.config.close_timeout_s / 2
        quiet = True
        for transport in self._transports:
            quiet &= transport.close(half)
        try:
            self._control.revoke(0, 0, min(0.5, max(0.0, deadline - time.monotonic())))
        except TransferTimeout:
            self.counters.add(unrevoked_closes=1)
        if quiet:
            self._say_goodbye()
        self._listener.close(deadline)
        for link in self.connections.links():
            link.close()
        self._work.close()
        self.notifications.close(0.2)
        self._callbacks.close(0.2)
        for session in self.connections.sessions():
            session.regions.clear()
        self._registration.close()
        self.peers.close()

    def _say_goodbye(self) -> None:
        deadline = time.monotonic() + 0.2
        for record in self.peers.all():
            for link in list(record.links)[:1]:
                link.ask(Goodbye(), deadline, lambda _: None)


def _usable(config: EngineConfig, factories: dict[str, TransportFactory]) -> tuple[str, ...]:
    """The configured transports that this machine has. Raises ConfigError for an unknown one, and when none is left."""
    usable, reasons = [], []
    for name in config.transports:
        if name not in factories:
            raise ConfigError(f"unknown transport {name!r}; known: {', '.join(sorted(factories))}")
        unavailable = getattr(factories[name], "unavailable", None)
        reason = unavailable(config) if unavailable is not None else ""
        if reason:
            reasons.append(f"{name}: {reason}")
        else:
            usable.append(name)
    if not usable:
        raise ConfigError(f"transfer engine: no transport can be used; {'; '.join(reasons)}")
    return tuple(usable)
