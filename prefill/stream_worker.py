"""The producer in the worker process: feeds the state machine and runs its effects on the transfer engine.

vLLM's thread only posts events; one thread runs the machine; engine threads report the ends of writes. Knows: threads, batches,
addresses. Does not know: the rules (stream_core.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, assert_never

from mooncake.common.errors import MooncakeError, PeerUnavailable, TransferCancelled
from mooncake.vllm.device import computed_fence
from mooncake.vllm.event_thread import EventThread
from mooncake.vllm.host_link import PrefillFinished
from mooncake.vllm.kv_layout import copy_ranges
from mooncake.vllm.step_plan import Chunk, StepPlan, TransferStart
from mooncake.vllm.stream_protocol import Cancel, Reserve, group_of
from mooncake.vllm.worker_runtime import Stepper, WorkerRuntime
from prefill.stream_core import StreamCore
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
from transfer_engine.types import BatchId, Opcode, TransferRequest, TransferStatus

_Post = Event | tuple[Event, ...] | Callable[[], None]
_log = logging.getLogger(__name__)
_TICK_S = 0.5
_TELL_TRIES = 3
_TELL_TIMEOUT_S = 3.0
_PREEMPT_WAIT_S = 5.0


class StreamWorker:
    """`begin_step`, `layer_computed`, `end_step` and `preempt` are called by vLLM's thread."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._rt = runtime
        layout = runtime.layout
        self._core = StreamCore(
            layers=len(layout.layers), block_size=layout.block_size, fingerprint=runtime.fingerprint
        )
        self._batches: dict[int, BatchId] = {}
        self._writes: dict[int, Write] = {}
        self._quiet: dict[str, threading.Event] = {}
        self._steps: list[Chunk] = []
        self._starts: dict[str, TransferStart] = {}
        self._ticker = Stepper(_TICK_S)
        self._thread: EventThread[_Post] = EventThread(
            "mooncake-stream-out", self._on_event, tick_s=_TICK_S, on_error=lambda: runtime.counters.add("errors_total")
        )

    # --- vLLM's thread ---

    def begin_step(self, plan: StepPlan) -> None:
        """Before the forward pass."""
        events: list[Event] = [TransferFinished(end.transfer_id, end.complete) for end in plan.ended]
        for end in plan.ended:
            self._starts.pop(end.transfer_id, None)
        for chunk in plan.chunks:
            if (start := chunk.start) is not None:
                self._rt.reports.hold(chunk.req_id)
                self._starts[chunk.transfer_id] = start
                self._rt.traces.add(chunk.transfer_id, "prefill_started", cached_tokens=start.cached_tokens)
                events.append(
                    TransferBegan(
                        chunk.transfer_id,
                        chunk.req_id,
                        start.fan_out,
                        start.digest,
                        start.prompt_tokens,
                        start.deadline,
                    )
                )
            events.append(BlocksKnown(chunk.transfer_id, tuple(chunk.block_ids), chunk.restart))
        self._steps = plan.chunks
        if events:
            self._thread.post(tuple(events))

    def layer_computed(self, layer: int, kv: Any) -> None:
        """The forward pass has left an attention layer."""
        if self._steps:
            self._thread.post(computed_fence(kv))
            now = time.time()
            for chunk in self._steps:
                self._rt.traces.add(chunk.transfer_id, "layer_computed", now, layer=layer, blocks=chunk.ready_blocks)
            self._thread.post(tuple(LayerReady(chunk.transfer_id, layer, chunk.ready_blocks) for chunk in self._steps))

    def end_step(self, computed: Callable[[], None]) -> None:
        """The forward pass is over: layers whose hook did not fire are final too."""
        if self._steps:
            self._thread.post(computed)
        for chunk in self._steps:
            self._thread.post(LayerReady(chunk.transfer_id, None, chunk.ready_blocks))
            if chunk.last:
                self._tell_finished(chunk.transfer_id)
        self._steps = []

    def _tell_finished(self, transfer_id: str) -> None:
        if (start := self._starts.pop(transfer_id, None)) is not None:
            now = time.time()
            self._rt.traces.add(transfer_id, "prefill_finished", now)
            self._rt.link.send(
                PrefillFinished(
                    transfer_id=transfer_id,
                    prompt_tokens=start.prompt_tokens,
                    cached_tokens=start.cached_tokens,
                    compute_s=now - start.scheduled_at,
                    request_id=start.request_id,
                )
            )

    def preempt(self, transfer_ids: list[str]) -> None:
        """Returns when nothing reads the blocks of these transfers any more."""
        waiting = {tid: threading.Event() for tid in transfer_ids}
        self._quiet.update(waiting)
        for tid in transfer_ids:
            self._thread.post(Preempted(tid))
        deadline = time.monotonic() + _PREEMPT_WAIT_S
        for tid, event in waiting.items():
            if not event.wait(max(0.0, deadline - time.monotonic())):
                _log.error("transfer %s did not stop reading preempted blocks: it fails", tid)
                self._thread.post(Poisoned(tid))
            self._quiet.pop(tid, None)

    # --- messages ---

    def reserved(self, reserve: Reserve) -> None:
        """From the engine's notification thread."""
        deadline = time.monotonic() + min(max(reserve.deadline_s, 0.0), 3600.0)
        self._rt.in_pool(self._rt.senders, lambda: self._open(reserve, deadline))

    def cancelled(self, message: Cancel) -> None:
        self._thread.post(ConsumerCancelled(message.transfer_id, message.consumer_id))

    def released(self, transfer_id: str) -> None:
        """From the host link's thread."""
        self._thread.post(Released(transfer_id))

    def _open(self, reserve: Reserve, deadline: float) -> None:
        """The machine hears of a consumer once its engine can be written to."""
        try:
            self._rt.peers.segment(reserve.address, reserve.instance_id)
        except MooncakeError as error:
            self._rt.counters.add("unreachable_consumers_total")
            _log.warning("consumer %s at %s: %s", reserve.consumer_id, reserve.address, error)
            return
        self._rt.traces.add(reserve.transfer_id, "reserved", consumer=reserve.consumer_id)
        self._thread.post(Reserved(reserve, deadline))

    # --- the machine's thread ---

    def _on_event(self, event: _Post | None) -> None:
        if callable(event):
            event()  # waits until the device has written the KV that the next events speak of
            return
        now = time.monotonic()
        for one in event if isinstance(event, tuple) else () if event is None else (event,):
            self._run(self._core.handle(one, now))
        if self._ticker.due(now):
            self._run(self._core.tick(now))
            self._collect_lost()
            self._rt.counters.gauge("held_transfers", self._core.transfers)

    def _run(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Write():
                    self._write(effect)
                case StopWrite():
                    if (batch := self._batches.get(effect.write_id)) is not None:
                        self._rt.engine.cancel(batch)
                case Tell():
                    self._rt.in_pool(self._rt.senders, lambda tell=effect: self._tell(tell))  # type: ignore[misc]
                case StreamEnded():
                    self._rt.counters.add("transfers_total", result=effect.result)
                    self._rt.traces.add(
                        effect.transfer_id, "stream_ended", consumer=effect.consumer_id, result=effect.result
                    )
                case Quiet():
                    if (waiter := self._quiet.get(effect.transfer_id)) is not None:
                        waiter.set()
                case LetGo():
                    self._rt.reports.unhold(effect.req_id)
                    self._rt.traces.finish(effect.transfer_id)
                case _:
                    assert_never(effect)

    def _write(self, write: Write) -> None:
        requests, reserve = [], write.reserve
        try:
            segment = self._rt.peers.segment(reserve.address, reserve.instance_id, 0.5)
            for piece in write.pieces:
                base, stride = reserve.layers[piece.layer]
                layer = self._rt.layout.layers[piece.layer]
                for source, target, length in copy_ranges(
                    layer, piece.source_blocks, base, stride, piece.target_blocks
                ):
                    requests.append(TransferRequest(Opcode.WRITE, source, segment, target, length))
            self._submit(write, requests)
        except (MooncakeError, ValueError) as error:
            if not isinstance(error, TransferCancelled):  # the consumer's fence: it has given up
                _log.warning("write for transfer %s failed at once: %s", reserve.transfer_id, error)
            self._thread.post(WriteEnded(write.write_id, ok=False, reason=_reason(error)))

    def _submit(self, write: Write, requests: list[TransferRequest]) -> None:
        engine, reserve = self._rt.engine, write.reserve
        batch = engine.allocate_batch_id(len(requests))
        left_s = min(max(write.deadline - time.monotonic(), 0.001), engine.config.max_deadline_s)
        group = group_of(reserve.transfer_id, reserve.consumer_id)
        try:
            engine.submit_transfer(batch, requests, deadline_s=left_s, group=group)
        except BaseException:
            engine.free_batch_id(batch)
            raise
        self._batches[write.write_id], self._writes[write.write_id] = batch, write
        engine.add_done_callback(batch, lambda status: self._thread.post(self._ended(write.write_id, status)))

    def _ended(self, write_id: int, status: TransferStatus) -> WriteEnded:
        """On an engine thread."""
        if (batch := self._batches.pop(write_id, None)) is not None:
            self._rt.engine.free_batch_id(batch)
            write = self._writes.pop(write_id)
            self._rt.counters.add("layers_sent_bytes_total", status.transferred_bytes)
            if status.error is not None and not isinstance(status.error, TransferCancelled):
                _log.warning("write for transfer %s failed: %s", write.reserve.transfer_id, status.error)
            now = time.time()
            for piece in write.pieces if status.ok else ():
                self._rt.traces.add(
                    write.reserve.transfer_id, "layer_sent", now, layer=piece.layer, blocks=len(piece.source_blocks),
                    consumer=write.reserve.consumer_id,
                )  # fmt: skip
        return WriteEnded(write_id, status.ok, status.quiesced, _reason(status.error))

    def _collect_lost(self) -> None:
        """The engine may drop a callback when its queue is full; nothing may wait for ever because of that."""
        for write_id, batch in list(self._batches.items()):
            try:
                status = self._rt.engine.get_batch_status(batch)
            except MooncakeError:
                continue
            if status.state.terminal and write_id in self._batches:
                self._run(self._core.handle(self._ended(write_id, status), time.monotonic()))

    # --- pool threads ---

    def _tell(self, tell: Tell) -> None:
        reserve = tell.reserve
        for _ in range(_TELL_TRIES):
            try:
                self._rt.peers.send(reserve.address, reserve.instance_id, tell.message, _TELL_TIMEOUT_S)
                return
            except PeerUnavailable:
                return  # its blocks went with it
            except MooncakeError as error:
                _log.warning("telling %s failed: %s", reserve.consumer_id, error)
        # The consumer repeats its Reserve and is answered then.

    def close(self) -> None:
        self._thread.close()


def _reason(error: Exception | None) -> str:
    if error is None:
        return ""
    return "peer_unavailable" if isinstance(error, PeerUnavailable) else "write_failed"
