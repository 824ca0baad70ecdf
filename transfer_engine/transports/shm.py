"""Transport `shm`: the target is another process of the same user on this host.

Knows two ways, chosen per region: a shared buffer of the peer is mapped once and then copied to directly; any other
registered memory is reached by cross-memory attach (process_vm_readv/writev, one copy, no help from the target). Where the
kernel forbids both, the job goes on to the next transport, as it does for GPU memory of the peer; our own is staged. Only ranges that
the peer registered are touched.
"""

from __future__ import annotations

import contextlib
import errno
import os

import numpy as np

from transfer_engine.lanes import Slice
from transfer_engine.memory import HOST, Hold, Located, Region
from transfer_engine.segment import Session
from transfer_engine.shared_buffer import Mapping
from transfer_engine.slices import U64, coalesce
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
        if region.device != HOST:
            return False
        return isinstance(region.backing, Mapping) or self._cross_copy_works(session)

    def _cross_copy_works(self, session: Session) -> bool:
        """Read the peer's instance id from its memory: permission and identity in one."""
        if session.cross_copy_ok is None:
            identity = session.record.identity
            try:
                found = sysio.read_memory(identity.pid, identity.probe_address, len(identity.instance_id))
                session.cross_copy_ok = found == identity.instance_id.encode()
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.ENOSYS):
                    return False  # not a verdict for good: try again next time
                session.cross_copy_ok = False
        return session.cross_copy_ok

    def _copy_one(self, session: Session, theirs: Region, write: bool, source: int, offset: int, length: int) -> None:
        if isinstance(theirs.backing, Mapping):
            here = (offset + theirs.backing.delta) & ((1 << 64) - 1)
            return sysio.copy_one(here, source, length) if write else sysio.copy_one(source, here, length)
        mine, far, count = (np.array([number], np.uint64) for number in (source, offset, length))
        sysio.cross_copy(session.record.identity.pid, mine, far, count, write=write)

    def _copy(self, piece: Slice, session: Session, hold: Hold) -> None:
        local, remote, length = piece.columns.local, piece.columns.remote, piece.columns.length
        write = piece.job.opcode is Opcode.WRITE
        mappings = [region.backing for region in hold.regions if isinstance(region.backing, Mapping)]
        if len(mappings) == len(hold.regions):
            here = remote + (np.uint64(mappings[0].delta) if len(mappings) == 1 else _per_row(hold))
            if self.engine.memory.has_devices:
                mine = self.engine.memory.locate(local, length)
                return self._copy_here(piece, mine, _on_host(here, length).refine(mine))
            local, here, length = coalesce(local, here, length)
            return sysio.copy(here, local, length) if write else sysio.copy(local, here, length)
        # Mixed slices take the way that serves both kinds of region.
        if self.engine.memory.has_devices:
            return self._cross_copy_staged(piece, session)
        local, remote, length = coalesce(local, remote, length)
        sysio.cross_copy(session.record.identity.pid, local, remote, length, write=write)

    def _cross_copy_staged(self, piece: Slice, session: Session) -> None:
        columns, write = piece.columns, piece.job.opcode is Opcode.WRITE
        stage = self.engine.devices.outgoing if write else self.engine.devices.incoming
        with contextlib.closing(stage(columns.local, columns.length, lambda: self._go_on(piece))) as parts:
            for part in parts:
                ranges = coalesce(part.address, columns.remote[part.row] + part.offset, part.length)
                sysio.cross_copy(session.record.identity.pid, *ranges, write=write)


def _on_host(address: U64, length: U64) -> Located:
    count = len(address)
    return Located(address, length, np.full(count, HOST), np.arange(count), np.zeros(count, np.uint64))


def _per_row(hold: Hold) -> np.ndarray:
    deltas = np.array([r.backing.delta if isinstance(r.backing, Mapping) else 0 for r in hold.table], np.uint64)
    return deltas[hold.rows]
