"""One NIC at work: its thread, its reused chains, what is posted on it.

Knows: waiting for completions, events and errands without holding the GIL (select on descriptors; the verbs calls come after,
when they cannot block). Does not know: what a completion means (its owner does). Measured with completion events alone: a
thread that spins on the queue instead holds the GIL against the threads it waits for.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from transfer_engine.transports.rdma.chain import Chain, Probe
from transfer_engine.transports.rdma.device import Device
from transfer_engine.types import Opcode

CHAIN = 64
"""Work requests of one slice at most, hence of one post."""

DOZE_S = 0.2
log = logging.getLogger(__name__)


class Owner(Protocol):
    """Called on the NIC's thread."""

    def drain(self, nic: Nic) -> bool:
        """Take completions; whether there were any."""

    def port_changed(self, nic: Nic, active: bool) -> None: ...

    def tick(self, now: float) -> float:
        """Look after what is overdue; returns seconds until it wants to look again."""

    def broken(self, nic: Nic) -> None:
        """The thread has failed and ends: nothing will be heard of the NIC any more."""


class Nic:
    """`posted` and `outstanding_bytes`, chains and probe are guarded by the owner's lock. `rate` is relative (1: unknown)."""

    def __init__(self, index: int, device: Device, rate: float, owner: Owner) -> None:
        self.index = index
        self.device = device
        self.name = device.name
        self.rate = rate
        self.active = device.active
        self.posted = 0
        self.outstanding_bytes = 0
        self.last_used = 0
        self.tickets = itertools.count(1)
        self.owners: dict[int, Any] = {}
        """Endpoint of every ticket that is out."""
        e = device.api.e
        self.chains = {
            Opcode.WRITE: Chain(e.IBV_WR_RDMA_WRITE, CHAIN),
            Opcode.READ: Chain(e.IBV_WR_RDMA_READ, CHAIN),
        }
        self.probe = Probe()
        self._owner = owner
        self._errands: deque[Callable[[], None]] = deque()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._bell_lock = threading.Lock()
        self._due = 0.0
        self.dozing = False
        """Asleep for so long that whoever posts must wake it, or a deadline would be seen too late."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"te-rdma-{self.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call(self, errand: Callable[[], None]) -> None:
        """Run `errand` on the NIC's thread soon. Ignored once stopped."""
        self._errands.append(errand)
        self.wake()

    def wake(self) -> None:
        """Have `tick` called soon."""
        self._due = 0.0
        with self._bell_lock:
            if self._bell >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_write(self._bell, 1)

    def _run(self) -> None:
        try:
            poll = select.poll()
            for fd in (self.device.completion_fd, self.device.async_fd, self._bell):
                poll.register(fd, select.POLLIN)
            while not self._stopping:
                self._turn(poll)
        except Exception:  # a bug must not leave submissions without an end
            log.exception("%s: the thread of this NIC has failed", self.name)
            self._stopping = True
            self._owner.broken(self)

    def _turn(self, poll: select.poll) -> None:
        """Do what is due, then sleep until something comes. Asks for an event before the last look into the queue."""
        device, now = self.device, time.monotonic()
        if now >= self._due:
            self._due = math.inf  # a `wake` that comes in meanwhile lowers it
            self._due = min(self._due, now + self._owner.tick(now))
        device.arm()
        if self._owner.drain(self) or self._errands:
            return self._do_errands()
        wait_s = self._due - time.monotonic()
        self.dozing = wait_s > DOZE_S
        ready = [fd for fd, _ in poll.poll(max(0.0, wait_s * 1000))]
        self.dozing = False
        if device.completion_fd in ready:
            device.acknowledge()
        if device.async_fd in ready:
            self._events()
        if self._bell in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)
        self._do_errands()
        self._owner.drain(self)

    def _do_errands(self) -> None:
        while self._errands:
            self._errands.popleft()()

    def _events(self) -> None:
        e = self.device.api.e
        for event in self.device.events():
            if event in (e.IBV_EVENT_PORT_ERR, e.IBV_EVENT_DEVICE_FATAL):
                self.active = False
            elif event == e.IBV_EVENT_PORT_ACTIVE:
                self.active = True
            else:
                continue
            self._owner.port_changed(self, self.active)

    def stop(self, deadline: float) -> bool:
        """End the thread; False when it still runs at the deadline. The device stays open."""
        self._stopping = True
        self.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def close(self) -> None:
        """After `stop`, and after all queue pairs are gone."""
        with self._bell_lock:
            os.close(self._bell)
            self._bell = -1  # the number may be somebody else's soon
        self.device.close()
