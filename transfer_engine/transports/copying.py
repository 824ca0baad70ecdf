"""Direct copies: what `local` and `shm` have in common.

Knows: a job whose target memory this process can reach by itself is copied slice by slice on the engine's copy threads.
Does not know: how the target's addresses become reachable (`_copy` of a subclass). The copy runs without the GIL; between
two slices cancels, deadlines and revocations are seen.
"""

from __future__ import annotations

import errno
import threading
import time

import numpy as np

from mooncake.common.errors import (
    DeviceError,
    MooncakeError,
    NotRegistered,
    PeerUnavailable,
    TransferCancelled,
    TransferError,
)
from transfer_engine.config import MAX_IOV
from transfer_engine.lanes import Job, Lane, Slice
from transfer_engine.memory import HOST, Hold, Located, Region
from transfer_engine.segment import Session
from transfer_engine.slices import coalesce, slice_size
from transfer_engine.transports import sysio
from transfer_engine.transports.base import Host, counted
from transfer_engine.types import Opcode, TransferState, TransferStatus

INLINE_BYTES = 64 << 10
"""A job up to this size is copied by the submitting thread: waking another would take longer."""


INLINE_SYNC_BYTES = 1 << 20
"""The same when the submitting thread is going to wait for the end anyway."""


class CopyTransport:
    """One lane for all peers."""

    name = ""

    def __init__(self, engine: Host) -> None:
        self.engine = engine
        self.lane = Lane(f"te-{self.name}", engine.config.copy_threads, self._work)
        self._counted = counted(self.name)

    def reaches(self, session: Session) -> bool:
        raise NotImplementedError

    def usable(self, session: Session, region: object) -> bool:
        """Whether a region of the peer can be reached directly."""
        raise NotImplementedError

    def _copy(self, piece: Slice, session: Session, hold: Hold) -> None:
        raise NotImplementedError

    def claim(self, job: Job, session: Session) -> tuple[Job | None, Job | None]:
        if not self.reaches(session) or not session.regions_known:
            return None, job
        rows, regions = session.regions.rows(job.columns.remote, job.columns.length)
        touched = set(rows.tolist())
        usable = {row for row in touched if row >= 0 and self.usable(session, regions[row])}
        if usable == touched:
            return job, None
        if not usable:
            return None, job
        good = np.isin(rows, list(usable))
        return job.part(job.columns.take(good)), job.part(job.columns.take(~good))

    def submit(self, job: Job) -> None:
        config = self.engine.config
        waits = job.submission.inline_thread == threading.get_ident()
        if job.n_bytes <= (INLINE_SYNC_BYTES if waits else INLINE_BYTES) and self.lane.idle:
            job.cut(config.slice_min_bytes, MAX_IOV)
            while (piece := job.take()) is not None:
                self._move(piece)
            return
        size = slice_size(job.n_bytes, config.copy_threads, config.slice_min_bytes, config.slice_bytes)
        if not self.lane.push(job, job.cut(size, MAX_IOV)):
            job.submission.abort_closed()

    def exchange(
        self, session: Session, opcode: Opcode, source: int, offset: int, length: int, deadline: float
    ) -> TransferStatus | None:
        """Copy one range of host memory on the caller's thread. None: it takes the long way, which also says what is wrong."""
        if time.monotonic() >= deadline:
            return None
        theirs = session.regions.hold_one(offset, length)
        if theirs is None:
            return None
        began = time.perf_counter()
        try:
            if not self.usable(session, theirs):
                return None
            self._copy_one(session, theirs, opcode is Opcode.WRITE, source, offset, length)
        except OSError:
            return None
        finally:
            session.regions.release_one(theirs)
        self.engine.counters.exchanged(self._counted[opcode], length, time.perf_counter() - began)
        return TransferStatus(TransferState.COMPLETED, length)

    def _copy_one(self, session: Session, theirs: Region, write: bool, source: int, offset: int, length: int) -> None:
        raise NotImplementedError

    def _work(self, lane: Lane) -> None:
        while not lane.closed:
            piece = lane.take(self.engine.config.idle_timeout_s)
            if piece is None:
                return
            self._move(piece)

    def _move(self, piece: Slice) -> None:
        job, began = piece.job, time.perf_counter()
        session = job.session
        assert isinstance(session, Session)
        submission = job.submission
        try:
            problem = session.down
            if problem is not None:
                raise problem
            hold = session.regions.hold(piece.columns.remote, piece.columns.length)
            try:
                self._copy(piece, session, hold)
            finally:
                session.regions.release(hold)
        except OSError as error:
            self._failed(piece, session, error)
        except MooncakeError as error:
            self.engine.counters.add(device_errors=isinstance(error, DeviceError))
            submission.fail_slice(error)
        except BaseException as error:  # a bug must not leave a submission without an end
            submission.fail_slice(TransferError(f"{self.name}: {error!r}"))
            raise
        else:
            self.engine.counters.moved(self.name, piece, time.perf_counter() - began)
            submission.finish_slice(piece.columns.index, piece.columns.length, piece.n_bytes)

    def _copy_here(self, piece: Slice, local: Located, remote: Located) -> None:
        """Copy ranges that this process reaches, some of them device memory. Equal rows."""
        target, source = (remote, local) if piece.job.opcode is Opcode.WRITE else (local, remote)
        plain = (target.device == HOST) & (source.device == HOST)
        if plain.any():
            sysio.copy(*coalesce(target.address[plain], source.address[plain], target.length[plain]))
        if not plain.all():
            self.engine.devices.copy(target.take(~plain), source.take(~plain), lambda: self._go_on(piece))

    def _go_on(self, piece: Slice) -> None:
        """Asked while a slice waits for a staging buffer. Raises TransferCancelled."""
        if self.lane.closed or piece.job.submission.stop_at <= time.monotonic():
            raise TransferCancelled(f"{self.name}: given up")

    def _failed(self, piece: Slice, session: Session, error: OSError) -> None:
        submission = piece.job.submission
        match error.errno:
            case errno.EPERM | errno.ENOSYS:
                session.cross_copy_ok = False
                self.engine.reroute(piece.job.part(piece.columns), self)
                submission.return_slice()
            case errno.ESRCH:
                submission.fail_slice(PeerUnavailable(f"{session.address}: the process has ended"))
            case errno.EFAULT:
                submission.fail_slice(
                    NotRegistered(f"{session.address}: registered memory is not mapped any more (either side)")
                )
            case _:
                submission.fail_slice(TransferError(f"{self.name}: {error}"))

    def gauges(self) -> dict[str, float]:
        return {f"{self.name}_queued_slices": self.lane.queued}

    def peer_down(self, session: Session, error: MooncakeError) -> None:
        """Slices find out by themselves."""

    def forget(self, session: Session) -> None:
        """Nothing is held per session."""

    def close(self, deadline: float) -> bool:
        self.lane.close()
        return self.lane.join(deadline)
