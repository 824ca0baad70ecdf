"""Transport `local`: initiator and target are engines of one process (or the same engine); a plain copy."""

from __future__ import annotations

import os

from transfer_engine.lanes import Slice
from transfer_engine.memory import Hold, Region
from transfer_engine.segment import Session
from transfer_engine.slices import coalesce
from transfer_engine.transports import sysio
from transfer_engine.transports.copying import CopyTransport
from transfer_engine.types import Opcode


class LocalTransport(CopyTransport):
    name = "local"

    def reaches(self, session: Session) -> bool:
        record = session.record
        return record.same_host and record.identity.pid == os.getpid() and "local" in record.identity.transports

    def usable(self, session: Session, region: object) -> bool:
        return True

    def _copy_one(self, session: Session, theirs: Region, write: bool, source: int, offset: int, length: int) -> None:
        sysio.copy_one(offset, source, length) if write else sysio.copy_one(source, offset, length)

    def _copy(self, piece: Slice, session: Session, hold: Hold) -> None:
        if self.engine.memory.has_devices or session.regions.has_devices:
            mine = self.engine.memory.locate(piece.columns.local, piece.columns.length)
            theirs = session.regions.locate(piece.columns.remote[mine.row] + mine.offset, mine.length)
            return self._copy_here(piece, mine.refine(theirs), theirs)
        local, remote, length = coalesce(piece.columns.local, piece.columns.remote, piece.columns.length)
        if piece.job.opcode is Opcode.WRITE:
            sysio.copy(remote, local, length)
        else:
            sysio.copy(local, remote, length)
