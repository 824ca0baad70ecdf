"""The consumer in the worker process: feeds the state machine and runs its effects on the transfer engine.

Knows: threads, messages, fences. Does not know: the rules (arrival_core.py).
"""

from __future__ import annotations

import logging
import time
from typing import assert_never

from decode.arrival_core import ABORTED, ArrivalCore, Phase
from decode.arrival_events import (
    Aborted,
    Effect,
    Event,
    Fence,
    FenceEnded,
    HasFailed,
    HasLanded,
    Report,
    ReserveFailed,
    ReserveSent,
    SendCancel,
    SendReserve,
    Wanted,
)
from mooncake.common.errors import AuthenticationFailed, MooncakeError, PeerUnavailable
from mooncake.vllm.event_thread import EventThread
from mooncake.vllm.step_plan import StepPlan, StreamCancel, StreamLoad
from mooncake.vllm.stream_protocol import (
    MAX_MESSAGE_BYTES,
    REASONS,
    Cancel,
    Failed,
    Landed,
    Message,
    Reserve,
    group_of,
    pack_ids,
)
from mooncake.vllm.worker_runtime import Stepper, WorkerRuntime

_log = logging.getLogger(__name__)
_TICK_S = 0.1
_SEND_TIMEOUT_S = 2.0
_FENCE_TIMEOUT_S = 2.0


class ArrivalWorker:
    """`begin_step` is called by vLLM's thread, the rest by engine and pool threads."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._rt = runtime
        self._core = ArrivalCore(reserve_every_s=runtime.config.reserve_every_s)
        self._loads: dict[str, StreamLoad] = {}
        self._ticker = Stepper(_TICK_S)
        self._thread: EventThread[Event] = EventThread(
            "mooncake-stream-in", self._on_event, tick_s=_TICK_S, on_error=lambda: runtime.counters.add("errors_total")
        )

    # --- vLLM's thread ---

    def begin_step(self, plan: StepPlan) -> None:
        """Before the forward pass."""
        for load in plan.loads:
            self._rt.reports.load_began(load.req_id)
            self._loads[load.req_id] = load
            self._thread.post(Wanted(load.req_id, load.transfer_id, load.peer_instance_id, load.deadline))
        for req_id in plan.aborted_loads:
            self._thread.post(Aborted(req_id))
        for cancel in plan.cancels:
            self._send_cancel(cancel)

    # --- messages ---

    def landed(self, message: Landed, peer_instance_id: str) -> None:
        self._thread.post(HasLanded(message.consumer_id, message.transfer_id, peer_instance_id))

    def failed(self, message: Failed, peer_instance_id: str) -> None:
        reason = message.reason if message.reason in REASONS else "other"
        self._thread.post(
            HasFailed(message.consumer_id, message.transfer_id, peer_instance_id, reason, message.stopped)
        )

    # --- the machine's thread ---

    def _on_event(self, event: Event | None) -> None:
        now = time.monotonic()
        if event is not None:
            self._run(self._core.handle(event, now))
        if self._ticker.due(now):
            self._run(self._core.tick(now))
            self._gauges()

    def _run(self, effects: list[Effect]) -> None:
        for effect in effects:
            load = self._loads[effect.req_id]
            match effect:
                case SendReserve():
                    self._rt.in_pool(self._rt.senders, lambda load=load: self._send_reserve(load))  # type: ignore[misc]
                case SendCancel():
                    self._send_cancel(
                        StreamCancel(load.req_id, load.transfer_id, load.peer_address, load.peer_instance_id)
                    )
                case Fence():
                    self._rt.in_pool(self._rt.fencers, lambda load=load: self._fence(load))  # type: ignore[misc]
                case Report():
                    self._report(load, effect.result)
                case _:
                    assert_never(effect)

    def _report(self, load: StreamLoad, result: str) -> None:
        del self._loads[load.req_id]
        ok, wanted = result == "ok", result != ABORTED
        self._rt.counters.add("loads_total", source="stream", result=result)
        if not ok and wanted:
            tokens = load.prompt_tokens - load.first_block * self._rt.layout.block_size
            self._rt.counters.add("recomputed_tokens_total", tokens, reason=result)
            _log.warning(
                "KV of transfer %s did not arrive (%s): %d tokens to recompute", load.transfer_id, result, tokens
            )
        self._rt.traces.add(load.transfer_id, "landed" if ok else "load_failed", consumer=load.req_id, result=result)
        self._rt.traces.finish(load.transfer_id)
        self._rt.reports.load_ended(load.req_id, failed=not ok and wanted)

    def _gauges(self) -> None:
        quarantined = self._core.in_phase(Phase.QUARANTINED)
        blocks = sum(len(self._loads[req_id].block_ids) for req_id in quarantined)
        self._rt.counters.gauge("waiting_loads", self._core.loads)
        self._rt.counters.gauge("quarantined_blocks", blocks)

    # --- pool threads ---

    def _send_reserve(self, load: StreamLoad) -> None:
        if load.req_id not in self._loads:
            return  # reported meanwhile
        reserve = self._reserve(load)
        if len(reserve.block_ids) + 20 * len(reserve.layers) > MAX_MESSAGE_BYTES:
            self._thread.post(ReserveFailed(load.req_id, fatal=True))
            return
        try:
            self._rt.peers.send(load.peer_address, load.peer_instance_id, reserve, _SEND_TIMEOUT_S)
        except (PeerUnavailable, AuthenticationFailed, ValueError) as error:
            _log.warning("producer %s of transfer %s: %s", load.peer_address, load.transfer_id, error)
            self._thread.post(ReserveFailed(load.req_id, fatal=True))
        except MooncakeError as error:
            _log.warning("producer %s of transfer %s: %s", load.peer_address, load.transfer_id, error)
            self._thread.post(ReserveFailed(load.req_id, fatal=False))
        else:
            self._rt.traces.add(load.transfer_id, "reserve_sent", consumer=load.req_id)
            self._thread.post(ReserveSent(load.req_id))

    def _reserve(self, load: StreamLoad) -> Reserve:
        return Reserve(
            transfer_id=load.transfer_id,
            consumer_id=load.req_id,
            address=self._rt.engine.address,
            instance_id=self._rt.engine.instance_id,
            fingerprint=self._rt.fingerprint,
            digest=load.digest,
            prompt_tokens=load.prompt_tokens,
            first_block=load.first_block,
            block_ids=pack_ids(load.block_ids),
            layers=[(layer.base, layer.stride) for layer in self._rt.layout.layers],
            deadline_s=max(0.0, load.deadline - time.monotonic()),
        )

    def _send_cancel(self, cancel: StreamCancel) -> None:
        message: Message = Cancel(cancel.transfer_id, cancel.req_id)

        def send() -> None:
            try:
                self._rt.peers.send(cancel.peer_address, cancel.peer_instance_id, message, _SEND_TIMEOUT_S)
            except MooncakeError as error:
                _log.info("cancel of transfer %s not delivered: %s", cancel.transfer_id, error)

        if cancel.peer_address:
            self._rt.in_pool(self._rt.senders, send)

    def _fence(self, load: StreamLoad) -> None:
        group = group_of(load.transfer_id, load.req_id)
        ok = False
        try:
            ok = self._rt.engine.cancel_incoming(
                group, load.peer_address, instance_id=load.peer_instance_id, timeout_s=_FENCE_TIMEOUT_S
            )
        except MooncakeError as error:
            _log.warning("fence of transfer %s: %s", load.transfer_id, error)
        finally:
            self._rt.traces.add(load.transfer_id, "fenced" if ok else "fence_failed", consumer=load.req_id)
            self._thread.post(FenceEnded(load.req_id, ok))

    def close(self) -> None:
        self._thread.close()
