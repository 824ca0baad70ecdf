"""The calls of the drop-in `TransferEngine` that move bytes.

Knows: names, argument orders, return conventions, deadlines. Does not know: how peers are found (peers) or bytes moved.
Every argument is checked before anything happens.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from mooncake.drop_in import settings
from mooncake.drop_in.arguments import U64, integer, integers, text
from mooncake.drop_in.life import Life
from mooncake.drop_in.results import FAILURES, INVALID, complain, failing_with
from mooncake.drop_in.running import Note, TransferNotify
from transfer_engine import BatchId, Opcode, TransferEngine, TransferState, TransferVector


class TransferOpcode(enum.Enum):
    """Read: peer to local memory; Write: local to peer's memory."""

    Read = 0
    Write = 1

    def __int__(self) -> int:
        return int(self.value)

    __index__ = __int__


_OPCODES = {TransferOpcode.Read: Opcode.READ, TransferOpcode.Write: Opcode.WRITE}


class TransferCalls(Life):
    # --- transfers that wait ----------------------------------------------------------------------------------------

    def transfer_sync_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        """0 when every byte is placed, -1 otherwise."""
        return self.transfer_sync(
            target_hostname, buffer, peer_buffer_address, length, TransferOpcode.Write, None, transport_hint
        )

    def transfer_sync_read(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        return self.transfer_sync(
            target_hostname, buffer, peer_buffer_address, length, TransferOpcode.Read, None, transport_hint
        )

    def transfer_sync(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, opcode: TransferOpcode,
        notify: TransferNotify | None = None, transport_hint: str = "",
    ) -> int:  # fmt: skip
        """`notify` reaches the peer's `get_notifies` once all bytes are placed, and is part of the success."""
        columns = _one(buffer, peer_buffer_address, length)
        return self._transfer(target_hostname, columns, opcode, notify, transport_hint)

    def batch_transfer_sync_write(
        self, target_hostname: str, buffers: Any, peer_buffer_addresses: Any, lengths: Any, transport_hint: str = ""
    ) -> int:
        return self.batch_transfer_sync(
            target_hostname, buffers, peer_buffer_addresses, lengths, TransferOpcode.Write, None, transport_hint
        )

    def batch_transfer_sync_read(
        self, target_hostname: str, buffers: Any, peer_buffer_addresses: Any, lengths: Any, transport_hint: str = ""
    ) -> int:
        return self.batch_transfer_sync(
            target_hostname, buffers, peer_buffer_addresses, lengths, TransferOpcode.Read, None, transport_hint
        )

    def batch_transfer_sync(
        self, target_hostname: str, buffers: Any, peer_buffer_addresses: Any, lengths: Any, opcode: TransferOpcode,
        notify: TransferNotify | None = None, transport_hint: str = "",
    ) -> int:  # fmt: skip
        columns = _many(buffers, peer_buffer_addresses, lengths)
        return self._transfer(target_hostname, columns, opcode, notify, transport_hint)

    def _transfer(
        self, target: str, columns: Columns, opcode: TransferOpcode, notify: TransferNotify | None, hint: str
    ) -> int:
        name, direction, payload = _terms(target, opcode, notify, hint)
        return self._move(name, columns, direction, payload)

    def _move(self, target: str, columns: Columns, direction: Opcode, payload: bytes | None) -> int:
        try:
            running, (local, remote, lengths) = self._now, _checked(columns)
            deadline = settings.deadline_s(int(lengths.sum()))
            with running.peers.use(target) as segment:
                vector = TransferVector(direction, segment, local, remote, lengths)
                running.engine.transfer_sync(vector, deadline, notify=payload)
        except FAILURES as error:
            complain(f"transfer with {target}", error)
            return INVALID
        return 0

    # --- transfers that are asked for later -------------------------------------------------------------------------

    def batch_transfer_async_write(
        self, target_hostname: str, buffers: Any, peer_buffer_addresses: Any, lengths: Any, transport_hint: str = ""
    ) -> int:
        """An id for `get_batch_transfer_status`, 0 when it could not be started."""
        return self.batch_transfer_async(
            target_hostname, buffers, peer_buffer_addresses, lengths, TransferOpcode.Write, transport_hint
        )

    def batch_transfer_async_read(
        self, target_hostname: str, buffers: Any, peer_buffer_addresses: Any, lengths: Any, transport_hint: str = ""
    ) -> int:
        return self.batch_transfer_async(
            target_hostname, buffers, peer_buffer_addresses, lengths, TransferOpcode.Read, transport_hint
        )

    def batch_transfer_async(
        self, target_hostname: str, buffers: Any, peer_buffer_addresses: Any, lengths: Any, opcode: TransferOpcode,
        transport_hint: str = "",
    ) -> int:  # fmt: skip
        columns = _many(buffers, peer_buffer_addresses, lengths)
        name, direction, _ = _terms(target_hostname, opcode, None, transport_hint)
        return self._submit(name, columns, direction)

    def transfer_submit_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        """An id for `transfer_check_status`, 0 when it could not be started."""
        columns = _one(buffer, peer_buffer_address, length)
        name, direction, _ = _terms(target_hostname, TransferOpcode.Write, None, transport_hint)
        return self._submit(name, columns, direction)

    def _submit(self, target: str, columns: Columns, direction: Opcode) -> int:
        try:
            running, (local, remote, lengths) = self._now, _checked(columns)
            with running.peers.use(target) as segment:
                return _start(running.engine, TransferVector(direction, segment, local, remote, lengths))
        except FAILURES as error:
            complain(f"transfer with {target}", error)
            return 0

    def get_batch_transfer_status(self, batch_ids: Any) -> int:
        """Waits until all are over and frees them; 0 when all went well, -1 otherwise."""
        results = [self._wait(batch_id) for batch_id in integers(batch_ids, "batch_ids").tolist()]
        return 0 if all(result == 1 for result in results) else INVALID

    @failing_with(INVALID)
    def _wait(self, batch_id: int) -> int:
        engine = self._now.engine
        engine.wait(BatchId(batch_id), engine.config.max_deadline_s + 5.0)
        return self.transfer_check_status(batch_id)

    @failing_with(INVALID)
    def transfer_check_status(self, batch_id: int) -> int:
        """1 done, 0 running, -1 failed, -2 timed out. Anything but 0 frees the id."""
        batch, engine = BatchId(integer(batch_id, "batch_id")), self._now.engine
        status = engine.get_batch_status(batch)
        if not status.state.terminal:
            return 0
        engine.free_batch_id(batch)
        if status.error is not None:
            complain("transfer", status.error)
        return 1 if status.ok else -2 if status.state is TransferState.TIMED_OUT else INVALID


Columns = tuple[U64, U64, U64]


def _start(engine: TransferEngine, vector: TransferVector) -> int:
    batch = engine.allocate_batch_id(max(1, len(vector.length)))
    try:
        engine.submit_transfer(batch, vector, deadline_s=settings.deadline_s(sum(map(int, vector.length))))
    except BaseException:
        engine.free_batch_id(batch)
        raise
    return int(batch)


def _one(buffer: Any, peer_buffer_address: Any, length: Any) -> Columns:
    row = integer(buffer, "buffer"), integer(peer_buffer_address, "peer_buffer_address"), integer(length, "length")
    return integers(row[:1], "buffer"), integers(row[1:2], "peer_buffer_address"), integers(row[2:], "length")


def _many(buffers: Any, peer_buffer_addresses: Any, lengths: Any) -> Columns:
    return (
        integers(buffers, "buffers"),
        integers(peer_buffer_addresses, "peer_buffer_addresses"),
        integers(lengths, "lengths"),
    )


def _checked(columns: Columns) -> Columns:
    if len({len(column) for column in columns}) != 1:
        counts = ", ".join(str(len(column)) for column in columns)
        raise ValueError(f"buffers, peer_buffer_addresses and lengths differ in number: {counts}")
    return columns


def _terms(target: Any, opcode: Any, notify: Any, hint: Any) -> tuple[str, Opcode, bytes | None]:
    """Argument checks that come before anything happens. The hint is not followed: the engine chooses by request."""
    text(hint, "transport_hint")
    if not isinstance(opcode, TransferOpcode):
        raise TypeError(f"opcode must be a TransferOpcode, not {opcode!r}")
    if notify is not None and not isinstance(notify, TransferNotify):
        raise TypeError(f"notify must be a TransferNotify or None, not {notify!r}")
    payload = None if notify is None else msgspec.msgpack.encode(Note(notify.name, notify.msg))
    return text(target, "target_hostname"), _OPCODES[opcode], payload
