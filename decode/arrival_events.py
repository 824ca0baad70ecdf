"""Events into and effects out of the consumer's state machine (arrival_core.py). Data only."""

from __future__ import annotations

from dataclasses import dataclass

# --- events ---


@dataclass(frozen=True)
class Wanted:
    """Blocks are allocated and wait for their KV. `deadline` is absolute."""

    req_id: str
    transfer_id: str
    peer_instance_id: str
    deadline: float


@dataclass(frozen=True)
class ReserveSent:
    """The Reserve is with the producer's engine."""

    req_id: str


@dataclass(frozen=True)
class ReserveFailed:
    """It is not. `fatal`: that producer is gone for good, so trying again is pointless."""

    req_id: str
    fatal: bool


@dataclass(frozen=True)
class HasLanded:
    """The producer's word that every byte is placed."""

    req_id: str
    transfer_id: str
    peer_instance_id: str


@dataclass(frozen=True)
class HasFailed:
    """The producer's word that the KV will not come; `stopped`: and that nothing is or will be written."""

    req_id: str
    transfer_id: str
    peer_instance_id: str
    reason: str
    stopped: bool


@dataclass(frozen=True)
class Aborted:
    """vLLM dropped the request; its blocks stay until it is reported."""

    req_id: str


@dataclass(frozen=True)
class FenceEnded:
    """`ok`: the producer will write no more bytes of this stream."""

    req_id: str
    ok: bool


Event = Wanted | ReserveSent | ReserveFailed | HasLanded | HasFailed | Aborted | FenceEnded

# --- effects ---


@dataclass(frozen=True)
class SendReserve:
    """Answer with `ReserveSent` or `ReserveFailed`."""

    req_id: str


@dataclass(frozen=True)
class SendCancel:
    """Tell the producer; nothing comes back."""

    req_id: str


@dataclass(frozen=True)
class Fence:
    """Make the producer's engine stop; answer with `FenceEnded`."""

    req_id: str


@dataclass(frozen=True)
class Report:
    """The load is over, exactly once per `Wanted`: "ok", "aborted", or why the request has to be recomputed."""

    req_id: str
    result: str


Effect = SendReserve | SendCancel | Fence | Report
