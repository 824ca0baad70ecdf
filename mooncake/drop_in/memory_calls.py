"""The calls of the drop-in `TransferEngine` that are about local memory.

Knows: names, argument orders, return conventions. Does not know: how memory is registered (buffers).
"""

from __future__ import annotations

from typing import Any

from mooncake.common.errors import MooncakeError
from mooncake.drop_in import results
from mooncake.drop_in.arguments import integer, integers, text
from mooncake.drop_in.life import Life
from mooncake.drop_in.results import FAILURES, INVALID, complain, failing_with


class MemoryCalls(Life):
    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        """0; -7 for a range that overlaps another one. The same range again is fine and counts once."""
        addresses = [integer(buffer_addr, "buffer_addr")]
        return self._register(addresses, [integer(capacity, "capacity")], text(location, "location"))

    def batch_register_memory(self, buffer_addresses: Any, capacities: Any, location: str = "*") -> int:
        """All or nothing."""
        addresses = integers(buffer_addresses, "buffer_addresses").tolist()
        return self._register(addresses, integers(capacities, "capacities").tolist(), text(location, "location"))

    def _register(self, addresses: list[int], lengths: list[int], location: str) -> int:
        try:
            self._now.buffers.register(addresses, lengths, location)
        except FAILURES as error:
            complain("register_memory", error)
            return results.code_of(error)
        return 0

    def unregister_memory(self, buffer_addr: int) -> int:
        """0; -3 when no registered range starts there; -1 when a peer does not let go of it (ask again)."""
        return self._unregister([integer(buffer_addr, "buffer_addr")])

    def batch_unregister_memory(self, buffer_addresses: Any) -> int:
        return self._unregister(integers(buffer_addresses, "buffer_addresses").tolist())

    def _unregister(self, addresses: list[int]) -> int:
        try:
            self._now.buffers.unregister(addresses)
        except MooncakeError as error:
            complain("unregister_memory", error)
            return results.code_of(error)
        return 0

    @failing_with(0)
    def allocate_managed_buffer(self, length: int) -> int:
        """Address of registered memory, 0 when there is none. Its peers on this host may map it."""
        size = integer(length, "length")
        return self._now.buffers.allocate(size)

    @failing_with(INVALID)
    def free_managed_buffer(self, buffer_addr: int, length: int) -> int:
        address = integer(buffer_addr, "buffer_addr")
        integer(length, "length")
        self._now.buffers.free(address)
        return 0

    @failing_with(INVALID)
    def write_bytes_to_buffer(self, dest_address: int, src_ptr: bytes | str, length: int) -> int:
        """Copy `length` bytes into registered or managed memory."""
        data = src_ptr.encode() if isinstance(src_ptr, str) else src_ptr
        if not isinstance(data, (bytes, bytearray)):
            raise TypeError(f"write_bytes_to_buffer: bytes or str are needed, not {type(src_ptr).__name__}")
        address, size = integer(dest_address, "dest_address"), integer(length, "length")
        self._now.buffers.write(address, bytes(data), size)
        return 0

    @failing_with(b"")
    def read_bytes_from_buffer(self, source_address: int, length: int) -> bytes:
        """b"" when the range is not in one registered or managed buffer."""
        address, size = integer(source_address, "source_address"), integer(length, "length")
        return self._now.buffers.read(address, size)
