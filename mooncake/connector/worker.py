"""MooncakeConnector in the worker process: passes each step's plan to the producer, the consumer and the store.

Runs on vLLM's thread and never waits there, except for preempted blocks. Knows: the order of the hooks in a step. Does not know: rules.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from decode.arrival_worker import ArrivalWorker
from mooncake.vllm.connector_config import ConnectorConfig
from mooncake.vllm.device import computed_fence
from mooncake.vllm.reports import Batch
from mooncake.vllm.step_plan import StepPlan, StoreSave, WorkerIdentity
from mooncake.vllm.store_io import StoreIO
from mooncake.vllm.stream_protocol import Cancel, Failed, Landed, Reserve, decode
from mooncake.vllm.worker_runtime import WorkerRuntime
from prefill.stream_worker import StreamWorker
from store.client import StoreClient

_log = logging.getLogger(__name__)


class WorkerHalf:
    """See MooncakeConnector for who calls what."""

    def __init__(self, config: ConnectorConfig, vllm_config: Any, num_blocks: int, engine_id: str) -> None:
        self._vllm_config, self._num_blocks = vllm_config, num_blocks
        self._rt = WorkerRuntime(config, engine_id, self._release)
        self._producer: StreamWorker | None = None
        self._consumer: ArrivalWorker | None = None
        self._layer_index: dict[str, int] = {}
        self._bad_blocks: set[int] = set()
        self._store: StoreIO | None = None
        self._saves: list[StoreSave] = []

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        self._rt.register(kv_caches, self._vllm_config, self._num_blocks)
        self._layer_index = {layer.name: index for index, layer in enumerate(self._rt.layout.layers)}
        self._producer, self._consumer = StreamWorker(self._rt), ArrivalWorker(self._rt)
        self._any_kv = next(iter(kv_caches.values()))
        if (config := self._rt.config.store) is not None:
            client = StoreClient(
                self._rt.store_engine,
                config.masters or self._rt.link.store_masters,
                token=self._rt.config.cluster_token,
                name=f"{self._rt.config.name}-worker",
                local_segment=config.local_segment,
            )
            self._store = StoreIO(self._rt, config, client)
        self._rt.engine.on_notify(self._on_message)

    def identity(self) -> WorkerIdentity:
        engine = self._rt.engine
        return WorkerIdentity(self._rt.fingerprint, engine.address, engine.instance_id)

    # --- a step, in vLLM's order ---

    def preempt(self, plan: StepPlan) -> None:
        if plan.preempted_transfers:
            assert self._producer is not None
            self._producer.preempt(plan.preempted_transfers)
        if plan.preempted and self._store is not None:
            self._store.preempt(plan.preempted)

    def begin_step(self, plan: StepPlan) -> None:
        assert self._producer is not None
        assert self._consumer is not None
        self._producer.begin_step(plan)
        self._consumer.begin_step(plan)
        if self._store is not None:
            for load in plan.store_loads:
                self._store.load(load)
            for req_id in plan.aborted_loads:
                self._store.abort(req_id)
            self._saves = plan.saves
        for req_id in plan.held:
            self._rt.reports.finished(req_id)

    def layer_computed(self, layer_name: str, kv_layer: Any) -> None:
        index = self._layer_index.get(layer_name)
        if index is not None and self._producer is not None:
            self._producer.layer_computed(index, kv_layer)

    def end_step(self) -> None:
        assert self._producer is not None
        computed = computed_fence(self._any_kv)
        self._producer.end_step(computed)
        if self._saves and self._store is not None:
            self._store.save(self._saves, computed)
            self._saves = []

    def take_reports(self) -> Batch:
        batch = self._rt.reports.take()
        self._bad_blocks |= batch.bad_blocks
        return batch

    def take_bad_blocks(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    # --- messages, on the engine's and the link's threads ---

    def _on_message(self, peer_instance_id: str, peer_address: str, payload: bytes) -> None:
        assert self._producer is not None
        assert self._consumer is not None
        try:
            message = decode(payload)
        except msgspec.DecodeError as error:
            self._rt.counters.add("unreadable_messages_total")
            _log.warning("unreadable message from %s: %s", peer_address, error)
            return
        match message:
            case Reserve():
                if message.instance_id == peer_instance_id:
                    self._producer.reserved(message)
            case Cancel():
                self._producer.cancelled(message)
            case Landed():
                self._consumer.landed(message, peer_instance_id)
            case Failed():
                self._consumer.failed(message, peer_instance_id)

    def _release(self, transfer_id: str) -> None:
        if self._producer is not None:
            self._producer.released(transfer_id)

    def close(self) -> None:
        for part in (self._store, self._producer, self._consumer):
            if part is not None:
                part.close()
        self._rt.close()
