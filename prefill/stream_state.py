"""What the producer's state machine remembers of a transfer and of each consumer. Plain state; the rules are in stream_core.py."""

from __future__ import annotations

from collections.abc import Iterable

from mooncake.vllm.stream_protocol import Reserve, unpack_ids
from prefill.stream_events import Piece, TransferBegan


class Transfer:
    """A prefill leg. `ready[l]`: leading blocks that are final in layer `l`."""

    def __init__(self, began: TransferBegan, layers: int) -> None:
        self.transfer_id, self.req_id = began.transfer_id, began.req_id
        self.fan_out, self.deadline = began.fan_out, began.deadline
        self.digest, self.prompt_tokens = began.digest, began.prompt_tokens
        self.block_ids: list[int] = []
        self.ready = [0] * layers
        self.consumers: dict[str, Consumer] = {}
        self.gone = 0
        """Consumers that were served or will not be."""
        self.closing = ""
        """Why no consumer will be served any more."""
        self.pausing = False

    def learn(self, block_ids: tuple[int, ...], restart: bool) -> None:
        if restart:
            self.forget_progress()
        self.block_ids.extend(block_ids)

    def raise_ready(self, layer: int | None, blocks: int) -> None:
        blocks = min(blocks, len(self.block_ids))
        for index in range(len(self.ready)) if layer is None else (layer,):
            self.ready[index] = max(self.ready[index], blocks)

    def forget_progress(self) -> None:
        """The blocks are gone: nothing is final, and consumers need all of it again."""
        self.block_ids = []
        self.ready = [0] * len(self.ready)
        for consumer in self.consumers.values():
            consumer.rewind()


class Consumer:
    """One stream. `sent[l]`: index of the first block of layer `l` that was not given to a write."""

    def __init__(self, reserve: Reserve, deadline: float, layers: int) -> None:
        self.reserve, self.deadline = reserve, deadline
        self.targets = unpack_ids(reserve.block_ids)
        self.sent = [reserve.first_block] * layers
        self.inflight: dict[int, tuple[int, ...]] = {}
        self.void: set[int] = set()
        """Writes that a preemption stopped."""
        self.stopping = ""
        self.stopped = True
        """No write of it ended in doubt."""

    def write_ids(self) -> list[int]:
        return list(self.inflight)

    def rewind(self) -> None:
        self.sent = [self.reserve.first_block] * len(self.sent)
        self.void.update(self.inflight)

    def cut(self, transfer: Transfer, layers: Iterable[int]) -> tuple[Piece, ...]:
        """Takes what can be written now out of the given layers; layers with a write under way have to wait."""
        busy = {layer for written in self.inflight.values() for layer in written}
        first, end = self.reserve.first_block, self.reserve.first_block + len(self.targets)
        pieces = []
        for layer in layers:
            low, high = self.sent[layer], min(transfer.ready[layer], end)
            if layer not in busy and high > low:
                source = tuple(transfer.block_ids[low:high])
                pieces.append(Piece(layer, source, tuple(self.targets[low - first : high - first])))
                self.sent[layer] = high
        return tuple(pieces)

    def complete(self, transfer: Transfer) -> bool:
        """All blocks of all layers are acknowledged."""
        end = self.reserve.first_block + len(self.targets)
        return not self.inflight and all(sent >= end for sent in self.sent)


def refusal(reserve: Reserve, transfer: Transfer, layers: int, block_size: int) -> str:
    """Why this Reserve cannot be served from this transfer; "" when it can."""
    if reserve.digest != transfer.digest or reserve.prompt_tokens != transfer.prompt_tokens:
        return "prompt_mismatch"
    blocks = -(-transfer.prompt_tokens // block_size)
    wanted = len(reserve.block_ids) // 4
    if len(reserve.block_ids) % 4 or wanted < 1 or not 0 <= reserve.first_block <= blocks - wanted:
        return "bad_reserve"
    if reserve.first_block + wanted != blocks or len(reserve.layers) != layers:
        return "bad_reserve"
    return ""
