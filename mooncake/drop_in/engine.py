"""`TransferEngine` of the drop-in API, call for call what engines like vLLM and SGLang use (docs/drop_in.md, the contract).

Knows: what is asked of peers and of the machine; the rest of the calls is inherited. Does not know: how anything is done. A
runtime failure is a negative number (0 where an id or address is returned) and one log line; a wrong argument is TypeError.
Any number of threads may call; the GIL is free while a call waits.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mooncake.common.errors import TransferError
from mooncake.drop_in import results, settings
from mooncake.drop_in.arguments import text
from mooncake.drop_in.memory_calls import MemoryCalls
from mooncake.drop_in.results import INVALID, complain, failing_with
from mooncake.drop_in.running import TransferNotify
from mooncake.drop_in.transfer_calls import TransferCalls, TransferOpcode
from transfer_engine import topology


class TransferEngine(MemoryCalls, TransferCalls):
    """One engine; nothing works before `initialize`. Deleting it, or `close`, ends it."""

    TransferOpcode: ClassVar[type[TransferOpcode]] = TransferOpcode

    @failing_with(results.BAD_NAME)
    def send_probe(self, peer_server_name: str) -> int:
        """0 when an engine with our token answers there; -102 when none does, -101 for a name that is none, -1 before
        `initialize`. A probe that is answered ends the rest that a silent peer was given."""
        target = text(peer_server_name, "peer_server_name")
        if self._running is None:
            return INVALID
        return 0 if self._running.peers.probe(target) else results.UNREACHABLE

    @failing_with(0)
    def get_first_buffer_address(self, segment_name: str) -> int:
        """Where the peer's first registered range starts; 0 when it has none or does not answer."""
        name, running = text(segment_name, "segment_name"), self._now
        with running.peers.use(name) as segment:
            found = running.engine.first_region(segment)
        return found[0] if found is not None else 0

    @failing_with(INVALID)
    def warmup_efa_segment(self, segment_name: str) -> int:
        """There is no EFA here; what is left of the idea is to connect before the first transfer. 0 when the peer answers."""
        name = text(segment_name, "segment_name")
        with self._now.peers.use(name):
            return 0

    def get_notifies(self) -> list[TransferNotify]:
        """What has arrived since the last call, oldest first."""
        return self._running.notes.take() if self._running is not None else []

    @failing_with("{}")
    def get_local_topology(self, device_name: str | None = None) -> str:
        """JSON: memory location to preferred and other NICs. `device_name`: a comma list of NICs to look at."""
        wanted = settings.nics(text(device_name, "device_name")) if device_name else ()
        found = topology.discover()
        known = {nic.name for nic in found.nics}
        return (found.only(known.intersection(wanted)) if wanted else found).matrix_json()

    # --- what this build does not have ------------------------------------------------------------------------------

    def transfer_write_on_cuda(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, *_: Any
    ) -> int:
        """Always -1: transfers are not ordered with a CUDA stream. Synchronize it, then use `transfer_sync_write`."""
        complain(
            "transfer_write_on_cuda", TransferError("not supported: synchronize the stream, then transfer_sync_write")
        )
        return INVALID

    def transfer_read_on_cuda(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, *_: Any
    ) -> int:
        """Always -1, like `transfer_write_on_cuda`."""
        complain("transfer_read_on_cuda", TransferError("not supported: use transfer_sync_read, then the stream"))
        return INVALID
