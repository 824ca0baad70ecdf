"""What the scheduler half tells the worker half before an engine step (vLLM's `KVConnectorMetadata`, pickled).

Knows: the shapes. Times are `time.monotonic()` seconds, which the processes of one machine share.
Does not know: who makes or follows the plans (prefill/, decode/), or vLLM: mooncake.connector registers these classes with it, so that
plans can be made and followed in tests that have no ten seconds for its import.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TransferStart:
    """A prefill leg whose first chunk is scheduled: what Reserves are matched with."""

    fan_out: int
    digest: bytes
    prompt_tokens: int
    cached_tokens: int
    """Already there when the first chunk was scheduled: local prefix and store."""
    deadline: float
    scheduled_at: float
    """Unix time."""
    request_id: str


@dataclass(frozen=True)
class Chunk:
    """A prefill leg in this step. After it, the first `ready_blocks` blocks of `block_ids` (whole table) are complete."""

    req_id: str
    transfer_id: str
    block_ids: list[int]
    """Only the new ones, to be appended; the whole table when `restart`."""
    restart: bool
    ready_blocks: int
    last: bool
    start: TransferStart | None = None


@dataclass(frozen=True)
class TransferEnd:
    """The engine is done with a prefill leg. `complete`: all of its KV was computed."""

    transfer_id: str
    req_id: str
    complete: bool


@dataclass(frozen=True)
class StreamLoad:
    """A decoding leg whose blocks are allocated."""

    req_id: str
    transfer_id: str
    peer_address: str
    peer_instance_id: str
    digest: bytes
    prompt_tokens: int
    first_block: int
    block_ids: list[int]
    deadline: float


@dataclass(frozen=True)
class StreamCancel:
    """A decoding leg that will never reserve (it ended before, or did not need to)."""

    req_id: str
    transfer_id: str
    peer_address: str
    peer_instance_id: str


@dataclass(frozen=True)
class StoreLoad:
    """Load these store blocks; the first `skip_blocks` engine blocks of the first one are in the local prefix already."""

    req_id: str
    keys: list[bytes]
    block_ids: list[int]
    """Engine blocks to fill, in order: len(keys) * blocks_per_object - skip_blocks."""
    skip_blocks: int
    deadline: float


@dataclass(frozen=True)
class StoreSave:
    """One store block that this step completes."""

    req_id: str
    key: bytes
    block_ids: list[int]


@dataclass
class StepPlan:
    """All of it. Empty lists mean: nothing new."""

    preempted: list[str] = field(default_factory=list)
    preempted_transfers: list[str] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    ended: list[TransferEnd] = field(default_factory=list)
    loads: list[StreamLoad] = field(default_factory=list)
    cancels: list[StreamCancel] = field(default_factory=list)
    aborted_loads: list[str] = field(default_factory=list)
    """Requests that were aborted while one of their loads (stream or store) was under way."""
    store_loads: list[StoreLoad] = field(default_factory=list)
    saves: list[StoreSave] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    """Finished requests whose blocks wait for our word (`finished_sending`)."""

    def empty(self) -> bool:
        """True when the worker half has nothing new to do."""
        return not any(vars(self).values())


@dataclass
class WorkerIdentity:
    """Worker half to scheduler half, once at start."""

    fingerprint: str
    transfer_address: str
    transfer_instance_id: str
