"""The producer's state machine: which blocks of which layer go to which consumer, and when a transfer is over.

Events in, effects out; no clock, no thread, no socket (paper §5.2: layer-wise streaming overlapped with prefill).
Rules: a block of a layer is written once it is final and its consumer is known, whichever comes last; one write per consumer
and layer at a time; a transfer ends when `fan_out` consumers are served or gone, or it is aborted, released or late; its
blocks are let go exactly once and only when nothing reads them; no consumer hears `Landed` before all its writes are acknowledged.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterable
from typing import assert_never

from mooncake.vllm.stream_protocol import Failed, Landed, Reserve
from prefill.stream_events import (
    BlocksKnown,
    ConsumerCancelled,
    Effect,
    Event,
    LayerReady,
    LetGo,
    Poisoned,
    Preempted,
    Quiet,
    Released,
    Reserved,
    StopWrite,
    StreamEnded,
    Tell,
    TransferBegan,
    TransferFinished,
    Write,
    WriteEnded,
)
from prefill.stream_state import Consumer, Transfer, refusal

_MAX_PARKED = 1024
_MAX_TOMBSTONES = 8192


class StreamCore:
    """All transfers of one worker."""

    def __init__(self, *, layers: int, block_size: int, fingerprint: str) -> None:
        self._layers, self._block_size, self._fingerprint = layers, block_size, fingerprint
        self._transfers: dict[str, Transfer] = {}
        self._writes: dict[int, Consumer] = {}
        self._parked: dict[tuple[str, str], Reserved] = {}
        self._ended: collections.OrderedDict[Hashable, tuple[str, bool]] = collections.OrderedDict()
        """How transfers and streams ended, and whether all their writes surely stopped; for late Reserves."""
        self._early_gone: collections.OrderedDict[str, int] = collections.OrderedDict()
        """Consumers that were refused or cancelled before their prefill leg began."""
        self._next_write = 1
        self._out: list[Effect] = []

    @property
    def transfers(self) -> int:
        """Transfers that are not over."""
        return len(self._transfers)

    @property
    def writes(self) -> int:
        """Writes under way."""
        return len(self._writes)

    @property
    def parked(self) -> int:
        """Reserves that wait for their prefill leg."""
        return len(self._parked)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Takes one event; effects are to be run in order."""
        match event:
            case TransferBegan():
                self._began(event, now)
            case BlocksKnown() | LayerReady() | TransferFinished() | Preempted() | Poisoned() | Released():
                self._about(event)
            case Reserved():
                self._reserved(event)
            case WriteEnded():
                self._write_ended(event)
            case ConsumerCancelled():
                self._cancelled(event)
            case _:
                assert_never(event)
        return self._take()

    def tick(self, now: float) -> list[Effect]:
        """Ends what is late."""
        for transfer in list(self._transfers.values()):
            if now >= transfer.deadline:
                self._close(transfer, "deadline")
                continue
            for consumer in [c for c in transfer.consumers.values() if now >= c.deadline]:
                self._stop(consumer, "deadline")
        for key in [key for key, parked in self._parked.items() if now >= parked.deadline]:
            self._tell_failed(self._parked.pop(key).reserve, "deadline", stopped=True)
        return self._take()

    def _take(self) -> list[Effect]:
        out, self._out = self._out, []
        return out

    # --- prefill leg ---

    def _began(self, event: TransferBegan, now: float) -> None:
        tid = event.transfer_id
        if tid in self._transfers or tid in self._ended:
            # Released before it began, or an id used twice: nothing is kept for it.
            self._out.append(LetGo(tid, event.req_id, self._ended.get(tid, ("duplicate", True))[0]))
            return
        transfer = self._transfers[tid] = Transfer(event, self._layers)
        transfer.gone = self._early_gone.pop(tid, 0)
        for key in [key for key in self._parked if key[0] == tid]:
            self._reserved(self._parked.pop(key))
        self._maybe_let_go(transfer)

    def _about(self, event: BlocksKnown | LayerReady | TransferFinished | Preempted | Poisoned | Released) -> None:
        transfer = self._transfers.get(event.transfer_id)
        if transfer is None:
            self._about_unknown(event)
            return
        match event:
            case BlocksKnown():
                transfer.learn(event.block_ids, event.restart)
            case LayerReady():
                transfer.raise_ready(event.layer, event.blocks)
                self._pump_all(transfer, event.layer)
            case TransferFinished():
                if not event.complete:
                    self._close(transfer, "prefill_aborted")
            case Preempted():
                self._pause(transfer)
            case Poisoned():
                for consumer in list(transfer.consumers.values()):
                    self._stop(consumer, "preempted")
            case Released():
                self._close(transfer, "released")
            case _:
                assert_never(event)

    def _about_unknown(self, event: Event) -> None:
        if isinstance(event, Preempted):
            self._out.append(Quiet(event.transfer_id))
        if isinstance(event, Released):
            self._never(event.transfer_id, "released")
        if isinstance(event, TransferFinished) and not event.complete:
            self._never(event.transfer_id, "prefill_aborted")

    def _never(self, transfer_id: str, reason: str) -> None:
        """A prefill leg that has not begun will not be served."""
        if transfer_id not in self._ended:
            self._bury(transfer_id, reason)
        for key in [key for key in self._parked if key[0] == transfer_id]:
            self._tell_failed(self._parked.pop(key).reserve, reason, stopped=True)

    def _pause(self, transfer: Transfer) -> None:
        """What was sent stays right, but is sent again after the request resumes: simpler, and preemption is rare."""
        transfer.forget_progress()
        transfer.pausing = True
        for consumer in transfer.consumers.values():
            self._out.extend(StopWrite(write_id) for write_id in consumer.write_ids())
        self._maybe_quiet(transfer)

    def _maybe_quiet(self, transfer: Transfer) -> None:
        if transfer.pausing and not any(consumer.inflight for consumer in transfer.consumers.values()):
            transfer.pausing = False
            self._out.append(Quiet(transfer.transfer_id))

    # --- consumers ---

    def _reserved(self, event: Reserved) -> None:
        reserve = event.reserve
        key = (reserve.transfer_id, reserve.consumer_id)
        if (ended := self._ended.get(key) or self._ended.get(reserve.transfer_id)) is not None:
            self._answer_late(reserve, *ended)
            return
        transfer = self._transfers.get(reserve.transfer_id)
        if reserve.fingerprint != self._fingerprint:
            self._refuse(transfer, reserve, "layout_mismatch")
        elif transfer is None:
            if key in self._parked or len(self._parked) < _MAX_PARKED:
                self._parked[key] = event
        elif reserve.consumer_id not in transfer.consumers:
            reason = transfer.closing or refusal(reserve, transfer, self._layers, self._block_size)
            if reason:
                self._refuse(transfer, reserve, reason)
                return
            consumer = Consumer(reserve, event.deadline, self._layers)
            transfer.consumers[reserve.consumer_id] = consumer
            self._pump(transfer, consumer, None)

    def _refuse(self, transfer: Transfer | None, reserve: Reserve, reason: str) -> None:
        self._bury((reserve.transfer_id, reserve.consumer_id), reason)
        self._tell_failed(reserve, reason, stopped=True)
        self._out.append(StreamEnded(reserve.transfer_id, reserve.consumer_id, reason))
        self._count_gone(transfer, reserve.transfer_id)

    def _count_gone(self, transfer: Transfer | None, transfer_id: str) -> None:
        if transfer is not None:
            transfer.gone += 1
            self._maybe_let_go(transfer)
            return
        self._early_gone[transfer_id] = self._early_gone.get(transfer_id, 0) + 1
        while len(self._early_gone) > _MAX_PARKED:
            self._early_gone.popitem(last=False)

    def _answer_late(self, reserve: Reserve, result: str, stopped: bool) -> None:
        if result == "ok" and (reserve.transfer_id, reserve.consumer_id) in self._ended:
            self._out.append(Tell(reserve, Landed(reserve.transfer_id, reserve.consumer_id)))
        else:
            self._tell_failed(reserve, "gone" if result == "ok" else result, stopped=stopped)

    def _cancelled(self, event: ConsumerCancelled) -> None:
        key = (event.transfer_id, event.consumer_id)
        transfer = self._transfers.get(event.transfer_id)
        self._parked.pop(key, None)
        if key in self._ended:
            return
        if transfer is not None and event.consumer_id in transfer.consumers:
            self._stop(transfer.consumers[event.consumer_id], "cancelled")
            return
        self._bury(key, "cancelled")
        if event.transfer_id not in self._ended:
            self._count_gone(transfer, event.transfer_id)

    # --- writes ---

    def _pump_all(self, transfer: Transfer, layer: int | None) -> None:
        for consumer in list(transfer.consumers.values()):
            self._pump(transfer, consumer, layer)

    def _pump(self, transfer: Transfer, consumer: Consumer, layer: int | None) -> None:
        """Starts one write of everything that is final, unsent and idle, in one layer or in all."""
        if consumer.stopping or transfer.pausing or transfer.closing:
            return
        layers = range(self._layers) if layer is None else (layer,)
        pieces = consumer.cut(transfer, layers)
        if pieces:
            write_id = self._next_write
            self._next_write += 1
            consumer.inflight[write_id] = tuple(piece.layer for piece in pieces)
            self._writes[write_id] = consumer
            self._out.append(Write(write_id, consumer.reserve, pieces, min(consumer.deadline, transfer.deadline)))

    def _write_ended(self, event: WriteEnded) -> None:
        consumer = self._writes.pop(event.write_id, None)
        if consumer is None:
            return
        transfer = self._transfers[consumer.reserve.transfer_id]
        layers = consumer.inflight.pop(event.write_id)
        consumer.stopped = consumer.stopped and event.stopped
        if transfer.pausing:
            self._maybe_quiet(transfer)
        void = event.write_id in consumer.void
        consumer.void.discard(event.write_id)
        if consumer.stopping:
            self._maybe_end(transfer, consumer)
        elif not event.stopped or not (event.ok or void):
            self._stop(consumer, event.reason or "write_failed")
        elif void:  # stopped by a preemption: whatever it placed is sent again when the request resumes
            self._pump(transfer, consumer, None)
        else:
            self._progress(transfer, consumer, layers)

    def _progress(self, transfer: Transfer, consumer: Consumer, layers: Iterable[int]) -> None:
        for layer in layers:
            self._pump(transfer, consumer, layer)
        if consumer.complete(transfer):
            self._end(transfer, consumer, "ok")

    # --- ends ---

    def _close(self, transfer: Transfer, reason: str) -> None:
        """No consumer will be served from now on."""
        if transfer.closing:
            return
        transfer.closing = reason
        for consumer in list(transfer.consumers.values()):
            self._stop(consumer, reason)
        self._maybe_let_go(transfer)

    def _stop(self, consumer: Consumer, reason: str) -> None:
        if not consumer.stopping:
            consumer.stopping = reason
            self._out.extend(StopWrite(write_id) for write_id in consumer.write_ids())
            self._maybe_end(self._transfers[consumer.reserve.transfer_id], consumer)

    def _maybe_end(self, transfer: Transfer, consumer: Consumer) -> None:
        if not consumer.inflight:
            self._end(transfer, consumer, consumer.stopping)

    def _end(self, transfer: Transfer, consumer: Consumer, result: str) -> None:
        reserve = consumer.reserve
        del transfer.consumers[reserve.consumer_id]
        transfer.gone += 1
        self._bury((reserve.transfer_id, reserve.consumer_id), result, consumer.stopped)
        if result == "ok":
            self._out.append(Tell(reserve, Landed(reserve.transfer_id, reserve.consumer_id)))
        elif result != "cancelled":
            self._tell_failed(reserve, result, stopped=consumer.stopped)
        self._out.append(StreamEnded(reserve.transfer_id, reserve.consumer_id, result))
        self._maybe_let_go(transfer)

    def _maybe_let_go(self, transfer: Transfer) -> None:
        if transfer.consumers or not (transfer.closing or transfer.gone >= transfer.fan_out):
            return
        if self._transfers.pop(transfer.transfer_id, None) is not None:
            result = transfer.closing or "ok"
            self._bury(transfer.transfer_id, result)
            self._maybe_quiet(transfer)
            self._out.append(LetGo(transfer.transfer_id, transfer.req_id, result))

    def _tell_failed(self, reserve: Reserve, reason: str, *, stopped: bool) -> None:
        self._out.append(Tell(reserve, Failed(reserve.transfer_id, reserve.consumer_id, reason, stopped)))

    def _bury(self, key: Hashable, result: str, stopped: bool = True) -> None:
        self._ended[key] = (result, stopped)
        while len(self._ended) > _MAX_TOMBSTONES:
            self._ended.popitem(last=False)
