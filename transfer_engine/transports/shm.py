"""Transport `shm`: the target is another process of the same user on this host.

Knows two ways, chosen per region: a shared buffer of the peer is mapped once and then copied to directly; any other
registered memory is reached by cross-memory attach (process_vm_readv/writev, one copy, no help from the target). Where the
kernel forbids both, the job goes on to the next transport. Only ranges that the peer registered are touched.
"""

from __future__ import annotations

import os

import numpy as np

from transfer_engine.lanes import Slice
from transfer_engine.memory import Hold, Region
from transfer_engine.segment import Session
from transfer_engine.shared_buffer import Mapping
from transfer_engine.slices import coalesce
from transfer_engine.transports import sysio
from transfer_engine.transports.copying import CopyTransport
from transfer_engine.types import Opcode


class ShmTransport(CopyTransport):
    name = "shm"

    def reaches(self, session: Session) -> bool:
        identity = session.record.identity
        return session.record.same_host and identity.pid != os.getpid() and "shm" in identity.transports

    def usable(self, session: Session, region: object) -> bool:
        assert isinstance(region, Region)
        return isinstance(region.backing, Mapping) or self._cross_copy_works(session)

    def _cross_copy_works(self, session: Session) -> bool:
        """Read the peer's instance id from its memory: permission and identity in one."""
        if session.cross_copy_ok is None:
            identity = session.record.identity
            try:
                found = sysio.read_memory(identity.pid, identity.probe_address, len(identity.instance_id))
                session.cross_copy_ok = found == identity.instance_id.encode()
            except OSError:
                session.cross_copy_ok = False
        return session.cross_copy_ok

    def _copy(self, piece: Slice, session: Session, hold: Hold) -> None:
        local, remote, length = piece.columns.local, piece.columns.remote, piece.columns.length
        write = piece.job.opcode is Opcode.WRITE
        mappings = [region.backing for region in hold.regions if isinstance(region.backing, Mapping)]
        if len(mappings) == len(hold.regions):
            here = remote + (np.uint64(mappings[0].delta) if len(mappings) == 1 else _per_row(hold))
            local, here, length = coalesce(local, here, length)
            return sysio.copy(here, local, length) if write else sysio.copy(local, here, length)
        # Mixed slices take the way that serves both kinds of region.
        local, remote, length = coalesce(local, remote, length)
        sysio.cross_copy(session.record.identity.pid, local, remote, length, write=write)


def _per_row(hold: Hold) -> np.ndarray:
    deltas = np.array([r.backing.delta if isinstance(r.backing, Mapping) else 0 for r in hold.table], np.uint64)
    return deltas[hold.rows]
