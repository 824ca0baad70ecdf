"""One opened NIC: its verbs objects, limits, GID and memory registrations.

Knows: the objects of one device and the order in which they go. Does not know: threads, peers, slices. Calls hold the GIL
(pyverbs never releases it), so nothing here may block.
"""

from __future__ import annotations

import contextlib
import select
from typing import Any

from mooncake.common.errors import TransferError
from transfer_engine.device.staging import DmaBuf
from transfer_engine.memory import Region
from transfer_engine.protocol import NicInfo
from transfer_engine.transports.rdma import verbs
from transfer_engine.transports.rdma.verbs import Gid

_POLL = 64


class Device:
    """Raises TransferError when it cannot be opened."""

    def __init__(self, name: str, port: int, completions: int) -> None:
        self.api = api = verbs.load()
        self.name, self.port = name, port
        try:
            self.context, self.async_fd = verbs.opened(lambda: api.Context(name=name))
            self.channel, self.completion_fd = verbs.opened(lambda: api.CompChannel(self.context))
            attributes = self.context.query_device()
            self.depth = min(completions, attributes.max_cqe)
            """Completions that fit."""
            self.max_reads = max(1, min(16, attributes.max_qp_rd_atom))
            self.max_requests = attributes.max_qp_wr
            state = self.context.query_port(port)
            self.pd = api.PD(self.context)
            self.cq = api.CQ(self.context, self.depth, None, self.channel, 0)
        except api.Error as error:
            raise TransferError(f"RDMA device {name}: {error}") from error
        self.active = state.state == api.e.IBV_PORT_ACTIVE
        self.link_layer, self.lid = state.link_layer, state.lid
        self.mtu_bytes = 128 << state.active_mtu
        self.max_message_bytes = state.max_msg_sz or 1 << 30
        self.gid: Gid = verbs.choose_gid(self.context, port, self.link_layer)
        self._regions: dict[Region, Any] = {}

    @property
    def registrations(self) -> int:
        return len(self._regions)

    def info(self, numa_node: int, rate_bits_per_s: float) -> NicInfo:
        return NicInfo(self.name, self.gid.text, self.mtu_bytes, numa_node, int(rate_bits_per_s))

    def renew_gid(self) -> Gid:
        """Look the GID up again: its index moves when addresses come and go, and goes with the link on some NICs."""
        with contextlib.suppress(TransferError, self.api.Error):
            self.gid = verbs.choose_gid(self.context, self.port, self.link_layer)
        return self.gid

    # --- memory -----------------------------------------------------------------------------------------------------

    def register(self, region: Region, dmabuf: DmaBuf | None = None) -> int:
        """Pin a region, by its address or as a dmabuf, and give it keys; returns the remote one. Raises TransferError."""
        e = self.api.e
        access = e.IBV_ACCESS_LOCAL_WRITE
        if region.remote_access:
            access |= e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ
        try:
            if dmabuf is not None:
                made = self.api.DmaBufMR(self.pd, region.length, access, dmabuf=dmabuf.fd, offset=dmabuf.offset)
            else:
                made = self.api.MR(self.pd, region.length, access, address=region.address)
        except self.api.Error as error:
            raise TransferError(f"{self.name} refuses memory at {region.address:#x}: {error}{_hint(region)}") from error
        self._regions[region] = made
        return int(made.rkey)

    def unregister(self, region: Region) -> None:
        """Void the keys: from now on the NIC refuses them. Idempotent."""
        made = self._regions.pop(region, None)
        if made is not None:
            made.close()

    def local_key(self, region: Region) -> int:
        """Raises KeyError for a region that was never registered here."""
        return int(self._regions[region].lkey)

    # --- completions and events -------------------------------------------------------------------------------------

    def completions(self) -> list[Any]:
        """What is in the queue now, at most 64."""
        return self.cq.poll(_POLL)[1] or []

    def arm(self) -> None:
        """Have the next completion make `completion_fd` readable. Look into the queue once more after it."""
        self.cq.req_notify()

    def acknowledge(self) -> None:
        """Take the event that made `completion_fd` readable."""
        while _readable(self.completion_fd):
            self.channel.get_cq_event(self.cq)
            self.cq.ack_events(1)

    def events(self) -> list[int]:
        """Asynchronous events waiting now."""
        found = []
        while _readable(self.async_fd):
            event = self.context.get_async_event()
            found.append(int(event.event_type))
            event.ack()
        return found

    def close(self) -> None:
        """Queue pairs must be gone."""
        for region in list(self._regions):
            self.unregister(region)
        for part in (self.cq, self.channel, self.pd, self.context):
            with contextlib.suppress(self.api.Error):
                part.close()


def _readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _hint(region: Region) -> str:
    if region.location.startswith("cuda"):
        return " (GPU memory needs a NIC and driver with peer access: NVIDIA's open kernel modules for dmabuf, or modprobe nvidia-peermem)"
    return " (locked memory is limited: ulimit -l unlimited, or LimitMEMLOCK=infinity in a service)"
