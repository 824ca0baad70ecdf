"""Events into and effects out of the producer's state machine (stream_core.py). Data only."""

from __future__ import annotations

from dataclasses import dataclass

from mooncake.vllm.stream_protocol import Failed, Landed, Reserve

# --- events ---


@dataclass(frozen=True)
class TransferBegan:
    """The first chunk of a prefill leg is scheduled. Its blocks are held until `LetGo`."""

    transfer_id: str
    req_id: str
    fan_out: int
    digest: bytes
    prompt_tokens: int
    deadline: float


@dataclass(frozen=True)
class BlocksKnown:
    """Engine blocks of the prompt, appended to those known, or all of them when `restart`."""

    transfer_id: str
    block_ids: tuple[int, ...]
    restart: bool = False


@dataclass(frozen=True)
class LayerReady:
    """The first `blocks` blocks hold their final KV in `layer` (None: in every layer)."""

    transfer_id: str
    layer: int | None
    blocks: int


@dataclass(frozen=True)
class TransferFinished:
    """The engine is done with the request; `complete`: all KV of the prompt was computed."""

    transfer_id: str
    complete: bool


@dataclass(frozen=True)
class Preempted:
    """The blocks are about to be reused: answer `Quiet` when nothing reads them any more."""

    transfer_id: str


@dataclass(frozen=True)
class Poisoned:
    """The blocks were reused while they were read: what was sent cannot be trusted."""

    transfer_id: str


@dataclass(frozen=True)
class Reserved:
    """A consumer wants the transfer. `deadline` is absolute."""

    reserve: Reserve
    deadline: float


@dataclass(frozen=True)
class WriteEnded:
    """A write is over. `stopped`: surely no byte of it will be placed any more."""

    write_id: int
    ok: bool
    stopped: bool = True
    reason: str = ""


@dataclass(frozen=True)
class ConsumerCancelled:
    """The consumer does not want it (any more)."""

    transfer_id: str
    consumer_id: str


@dataclass(frozen=True)
class Released:
    """The worker host says: nobody will come for this transfer."""

    transfer_id: str


Event = (
    TransferBegan
    | BlocksKnown
    | LayerReady
    | TransferFinished
    | Preempted
    | Poisoned
    | Reserved
    | WriteEnded
    | ConsumerCancelled
    | Released
)

# --- effects ---


@dataclass(frozen=True)
class Piece:
    """Part of a write: these blocks of one layer, pairwise."""

    layer: int
    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]


@dataclass(frozen=True)
class Write:
    """Start a write; it must end with `WriteEnded`."""

    write_id: int
    reserve: Reserve
    pieces: tuple[Piece, ...]
    deadline: float


@dataclass(frozen=True)
class StopWrite:
    """Cancel a write; `WriteEnded` still has to come."""

    write_id: int


@dataclass(frozen=True)
class Tell:
    """Send a message to the consumer that sent `reserve`."""

    reserve: Reserve
    message: Landed | Failed


@dataclass(frozen=True)
class StreamEnded:
    """One consumer is served ("ok") or not (the reason)."""

    transfer_id: str
    consumer_id: str
    result: str


@dataclass(frozen=True)
class Quiet:
    """Nothing reads the blocks of the preempted transfer."""

    transfer_id: str


@dataclass(frozen=True)
class LetGo:
    """The transfer is over: its blocks are not needed. Exactly once per `TransferBegan`."""

    transfer_id: str
    req_id: str
    result: str


Effect = Write | StopWrite | Tell | StreamEnded | Quiet | LetGo
