"""Names of what is counted here, for whoever exports them. `<nic>` is the device's name.

Knows: names only. Values are in `TransferEngine.stats()` beside those of the other transports (`rdma_write_bytes`,
`rdma_write_slices`, `rdma_write_seconds` and the same for read).
"""

from __future__ import annotations

from transfer_engine.lanes import Slice
from transfer_engine.transports.base import Stats

PER_NIC = {
    "write_bytes": "bytes written through the NIC",
    "write_slices": "slices written through the NIC",
    "write_seconds": "time from posting a slice to its completion, summed",
    "read_bytes": "bytes read through the NIC",
    "read_slices": "slices read through the NIC",
    "read_seconds": "time from posting a slice to its completion, summed",
    "errors": "endpoints that broke or could not be opened, its port's failures included",
    "port_up": "times its port came back",
    "port_down": "times its port lost its link",
}
"""`rdma_<nic>_<key>`."""

TOTALS = {
    "rdma_connects": "queue pairs made for transfers from here",
    "rdma_accepts": "queue pairs made for a peer's transfers to here",
    "rdma_evictions": "idle endpoints closed to make room (SIEVE)",
    "rdma_retries": "slices sent again",
    "rdma_failovers": "slices sent again because their path failed",
    "rdma_reroutes": "jobs handed to another transport because no path worked",
}


def moved(counters: Stats, nic: str, piece: Slice, seconds: float) -> None:
    what = piece.job.opcode.name.lower()
    counters.moved("rdma", piece, seconds)
    per_nic = {"bytes": piece.n_bytes, "slices": 1, "seconds": seconds}
    counters.add(**{f"rdma_{nic}_{what}_{key}": amount for key, amount in per_nic.items()})
