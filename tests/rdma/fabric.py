"""Steers the NICs of fakeverbs.c from inside the process that was started with it (tests marked `elsewhere("fake")`).

Knows: the library's own functions. Does not know: pyverbs, the transport.
"""

from __future__ import annotations

import ctypes
from types import TracebackType

from tests.rdma.places import FAKE_NICS

ERROR, SILENCE = 1, 2
"""A NIC's requests end in "retries exceeded"; or they get lost, and so do their answers."""


class Fabric:
    """As a context manager, it leaves all NICs whole."""

    def __init__(self) -> None:
        self._library = library = ctypes.CDLL(None)
        library.fakeverbs_fault.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long]
        library.fakeverbs_port.argtypes = [ctypes.c_int, ctypes.c_int]
        library.fakeverbs_live.restype = ctypes.c_long
        for name in ("fakeverbs_bytes", "fakeverbs_requests"):
            getattr(library, name).restype = ctypes.c_ulong

    def fault(self, nic: int, kind: int, after: int = 0) -> None:
        """From the NIC's next `after`-th request on, until mended."""
        self._library.fakeverbs_fault(nic, kind, after)

    def mend(self, nic: int) -> None:
        """What was lost in silence goes through now, unless it was flushed meanwhile."""
        self._library.fakeverbs_fault(nic, 0, 0)

    def port(self, nic: int, up: bool) -> None:
        """Link up or down, with the event that a NIC raises."""
        self._library.fakeverbs_port(nic, int(up))

    def moved_bytes(self, nic: int) -> int:
        """Payload that the NIC moved as the requester."""
        return int(self._library.fakeverbs_bytes(nic))

    def requests(self, nic: int) -> int:
        return int(self._library.fakeverbs_requests(nic))

    def live_objects(self) -> int:
        """Contexts, queues, pairs, regions ... that were made and not destroyed, in the whole process."""
        return int(self._library.fakeverbs_live())

    def __enter__(self) -> Fabric:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for nic in range(FAKE_NICS):
            self.mend(nic)
            self.port(nic, True)
