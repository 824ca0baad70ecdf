"""Transport `rdma`: one-sided reads and writes by the NICs, over as many of them as there are (paper 3.2.2).

Knows: the engine's seam: what is claimed, how jobs are cut, registration with every NIC, opening and closing devices. Does not
know: scheduling, faults (scheduler, lifecycle). docs/transfer_engine.md states the rules.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path as File

import numpy as np

from mooncake.common.errors import MooncakeError, TransferError
from transfer_engine import topology
from transfer_engine.config import EngineConfig
from transfer_engine.lanes import Job
from transfer_engine.memory import Region
from transfer_engine.protocol import EndpointOffer, NicInfo
from transfer_engine.segment import PeerRecord, Session
from transfer_engine.slices import Columns, split, split_at
from transfer_engine.topology import Topology
from transfer_engine.topology_sysfs import Nic as TopologyNic
from transfer_engine.transports.base import Host
from transfer_engine.transports.rdma import verbs
from transfer_engine.transports.rdma.device import Device
from transfer_engine.transports.rdma.keys import location_groups
from transfer_engine.transports.rdma.nic import CHAIN, Nic
from transfer_engine.transports.rdma.path import Tiers
from transfer_engine.transports.rdma.scheduler import Scheduler
from transfer_engine.transports.rdma.served import ServedEndpoints

INLINE_BYTES = 128 << 10
"""A job up to this size is looked after by the thread that waits for it: a thread switch less."""

_MAX_TIERS = 1024
log = logging.getLogger(__name__)


class RdmaTransport:
    """Raises ConfigError for an unknown NIC in `EngineConfig.nics`, TransferError when a device cannot be opened."""

    name = "rdma"

    def __init__(self, engine: Host) -> None:
        self.engine = engine
        config = engine.config
        self._topology = discover(config)
        self._scheduler = Scheduler(engine, self)
        self._nics: list[Nic] = []
        self._registering = threading.Lock()
        self._tiers_of: dict[tuple[str, str], Tiers] = {}
        try:
            for index, found in enumerate(self._topology.nics):
                device = Device(found.name, found.port, config.rdma_completions)
                self._nics.append(Nic(index, device, found.rate_bits_per_s or 1.0, self._scheduler))
        except BaseException:
            for nic in self._nics:
                nic.close()
            raise
        places = zip(self._nics, self._topology.nics, strict=True)
        self._infos = [nic.device.info(found.numa_node, found.rate_bits_per_s) for nic, found in places]
        self._index = {nic.name: nic.index for nic in self._nics}
        self._message_bytes = min(nic.device.max_message_bytes for nic in self._nics)
        self._served = ServedEndpoints(config, engine.counters, self._nics)
        self._scheduler.start(self._nics)

    @classmethod
    def unavailable(cls, config: EngineConfig) -> str:
        """Why this machine cannot offer it, and the fix; "" when it can."""
        return verbs.unavailable()

    # --- registration -----------------------------------------------------------------------------------------------

    def nics(self) -> list[NicInfo]:
        return list(self._infos)

    def register(self, region: Region) -> tuple[int, ...]:
        with self._registering:
            if keys := self._as_dmabuf(region):
                return keys
            try:
                return tuple(nic.device.register(region) for nic in self._nics)
            except TransferError as error:
                self._unregister(region)
                if not region.location.startswith("cuda") or self.engine.identity.transports[-1] == self.name:
                    raise
                log.warning("GPU memory goes by other transports: %s", error)
                return ()

    def _as_dmabuf(self, region: Region) -> tuple[int, ...]:
        """Keys of GPU memory that all NICs reach without nvidia-peermem. pyverbs gives a dmabuf the addresses of its offsets."""
        found = self.engine.devices.dmabuf_fd(region) if verbs.load().DmaBufMR is not None else None
        if found is None:
            return ()
        try:
            keys = tuple(nic.device.register(region, found) for nic in self._nics)
        except TransferError as error:
            log.info("no dmabuf: %s", error)
            self._unregister(region)
            return ()
        finally:
            os.close(found.fd)
        region.nic_shift = (found.offset - region.address) % (1 << 64)
        return keys

    def unregister(self, region: Region) -> None:
        with self._registering:
            self._unregister(region)

    def _unregister(self, region: Region) -> None:
        for nic in self._nics:
            nic.device.unregister(region)

    def accept(self, record: PeerRecord, offer: EndpointOffer) -> EndpointOffer:
        return self._served.accept(record, offer)

    # --- jobs -------------------------------------------------------------------------------------------------------

    def claim(self, job: Job, session: Session) -> tuple[Job | None, Job | None]:
        if "rdma" not in session.record.identity.transports or not session.regions_known or not session.nics:
            return None, job
        rows, regions = session.regions.rows(job.columns.remote, job.columns.length)
        if (rows < 0).any():  # a range may span regions that touch: each has keys of its own
            cut = job.part(_cut(job.columns, regions, of_peer=True))
            rows, regions = session.regions.rows(cut.columns.remote, cut.columns.length)
            if (rows < 0).any():
                return None, job
            job = cut
        count = len(session.nics)
        unusable = [row for row in set(rows.tolist()) if row < 0 or len(regions[row].keys) != count]
        bad = np.isin(rows, unusable) if unusable else None
        here, mine = self.engine.memory.rows(job.columns.local, job.columns.length)
        unreached = [row for row in set(here.tolist()) if row >= 0 and not mine[row].keys]
        if unreached:
            bad = np.isin(here, unreached) | (False if bad is None else bad)
        if bad is not None and bad.all():
            return None, job
        if self._alternative(session) and not self._scheduler.promising(session, self._everywhere()):
            return None, job
        if bad is None:
            return job, None
        return job.part(job.columns.take(~bad)), job.part(job.columns.take(bad))

    def submit(self, job: Job) -> None:
        session = job.session
        assert isinstance(session, Session)
        for location, columns in self._by_location(job.columns).items():
            tiers = self._tiers(location, job.submission.nic)
            size = self._slice_bytes(job.n_bytes, len(tiers[0]))
            part = job.part(split(columns, min(size, self._message_bytes)))
            part.cut(size, CHAIN)
            if not self._scheduler.add(session, part, tiers):
                job.submission.abort_closed()
        if job.submission.inline_thread == threading.get_ident() and job.n_bytes <= INLINE_BYTES:
            self._scheduler.help(job.submission)

    def _slice_bytes(self, n_bytes: int, paths: int) -> int:
        """One slice a path while that keeps them between the limits: every slice costs Python the same, whatever its size."""
        config = self.engine.config
        return max(config.rdma_slice_min_bytes, min(config.rdma_slice_bytes, -(-n_bytes // paths)))

    def _by_location(self, columns: Columns) -> dict[str, Columns]:
        rows, regions = self.engine.memory.rows(columns.local, columns.length)
        if (rows < 0).any():
            columns = _cut(columns, regions, of_peer=False)
            rows, regions = self.engine.memory.rows(columns.local, columns.length)
        groups = location_groups([region.location for region in regions], rows)
        if len(groups) == 1:
            return dict.fromkeys(groups, columns)
        return {location: columns.take(at) for location, at in groups.items()}

    def _tiers(self, location: str, hint: str) -> Tiers:
        """Local NICs for memory at a location, best first; the hinted one before all."""
        known = self._tiers_of.get((location, hint))
        if known is None:
            known = self._make_tiers(location, hint)
            if len(self._tiers_of) < _MAX_TIERS:  # locations come from applications
                self._tiers_of[location, hint] = known
        return known

    def _make_tiers(self, location: str, hint: str) -> Tiers:
        paths = self._topology.paths(location)
        tiers = [[self._index[name] for name in names] for names in (paths.preferred, paths.secondary) if names]
        listed = {index for tier in tiers for index in tier}
        rest = [index for index in self._index.values() if index not in listed]
        if rest:
            tiers.append(rest)
        if hint in self._index:
            tiers.insert(0, [self._index[hint]])
        return tiers

    def _everywhere(self) -> Tiers:
        return [range(len(self._nics))]

    def _alternative(self, session: Session) -> bool:
        """Whether another transport, later in the order of preference, may take the peer's jobs."""
        mine = self.engine.identity.transports
        return bool(set(mine[mine.index(self.name) + 1 :]) & set(session.record.identity.transports))

    def elsewhere(self, job: Job, session: Session) -> bool:
        if not self._alternative(session) or job.submission.doomed:
            return False
        self.engine.counters.add(rdma_reroutes=1)
        for piece in iter(job.take, None):
            rest = job.part(piece.columns)
            self.engine.reroute(rest, self)
            job.submission.return_slice()
        return True

    def peer_down(self, session: Session, error: MooncakeError) -> None:
        self._scheduler.fail_peer(session, error)

    def forget(self, session: Session) -> None:
        self._scheduler.forget(session)

    # --- the end ----------------------------------------------------------------------------------------------------

    def gauges(self) -> dict[str, float]:
        endpoints = len(self._scheduler.lifecycle.endpoints) + len(self._served)
        return {"open_endpoints": endpoints, "rdma_queued_slices": self._scheduler.queued}

    def close(self, deadline: float) -> bool:
        self._scheduler.close()
        while not (quiet := self._scheduler.quiet) and time.monotonic() < deadline:
            time.sleep(0.005)
        self._served.close()
        for nic in self._nics:
            if nic.stop(deadline):
                nic.close()
            else:
                quiet = False
        return quiet


def _cut(columns: Columns, regions: Iterable[Region], *, of_peer: bool) -> Columns:
    """Cut pieces where they cross from one region into the next, on our side or the peer's."""
    borders = np.array(sorted(region.address for region in regions), np.uint64)
    if not of_peer:
        return split_at(columns, borders)
    remote, local, length, index = split_at(
        Columns(columns.remote, columns.local, columns.length, columns.index), borders
    )
    return Columns(local, remote, length, index)


def discover(config: EngineConfig) -> Topology:
    """The NICs that an engine of that configuration uses, in the order of its keys. Raises ConfigError."""
    found = topology.discover(override=File(config.topology_file) if config.topology_file else None)
    usable = verbs.load().device_names()  # a device without a provider library is in sysfs only
    hidden = sorted(set(usable) - {nic.name for nic in found.nics})  # and in a container it may be the other way round
    whole = Topology((*found.nics, *(TopologyNic(name=name) for name in hidden)), found.locations)
    return whole.only(config.nics or [nic.name for nic in whole.nics if nic.name in usable])
