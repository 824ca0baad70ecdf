"""`MooncakeConnector`, the class that vLLM loads (`kv_connector_module_path: mooncake.connector`).

A facade over two halves that vLLM builds in two processes: in the scheduler's process it plans (scheduler.py), in the
worker's it moves bytes (worker.py). Knows: vLLM's contract, vllm/distributed/kv_transfer/kv_connector/v1/base.py (0.32).
Does not know: legs, stores. It sits above `prefill` and `decode`, so that imports stay acyclic.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.platforms import current_platform
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from mooncake.common.errors import ConfigError
from mooncake.connector.scheduler import SchedulerHalf
from mooncake.connector.worker import WorkerHalf
from mooncake.vllm.connector_config import parse
from mooncake.vllm.quiet import quiet_message_queues
from mooncake.vllm.step_plan import StepPlan, WorkerIdentity

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

KVConnectorMetadata.register(StepPlan)
KVConnectorHandshakeMetadata.register(WorkerIdentity)


class MooncakeConnector(KVConnectorBase_V1, SupportsHMA):
    """Streams KV from prefill to decoding workers, and loads from and saves to the store. `kv_role` is always `kv_both`."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        _refuse_unsupported(vllm_config, kv_cache_config)
        _share_logging()
        if current_platform.is_cpu():
            quiet_message_queues()
        config = parse(self._kv_transfer_config.kv_connector_extra_config)
        engine_id = str(self._kv_transfer_config.engine_id)
        self._scheduler: Any = None
        self._worker: Any = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(config, vllm_config, engine_id)
        else:
            self._worker = WorkerHalf(config, vllm_config, kv_cache_config.num_blocks, engine_id)

    # --- worker ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._worker.identity()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, StepPlan)
        self._worker.preempt(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepPlan)
        # Here and not in start_load_kv, which vLLM calls after the forward pass when loads are asynchronous.
        self._worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        if self.has_connector_metadata():
            self._worker.layer_computed(layer_name, kv_layer)

    def wait_for_save(self) -> None:
        self._worker.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        batch = self._worker.take_reports()
        return KVConnectorTransferResults(
            finished_sending=batch.sent, finished_recving=batch.received, failed_recving=batch.failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_bad_blocks()

    # --- scheduler ---

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        identity = next(iter(metadata.values()))
        assert isinstance(identity, WorkerIdentity)
        self._scheduler.meet_worker(identity)

    def on_new_request(self, request: Request) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched(request, num_computed_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        if num_external_tokens == 0:
            return {}
        streamed = self._scheduler.is_decode_leg(request.request_id)
        return {CacheHitSource.P2P if streamed else CacheHitSource.HOST: num_external_tokens}

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduler.plan_step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.on_output(connector_output)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request), None

    def has_pending_push_work(self) -> bool:
        return self._scheduler.pending()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True  # a full CUDA graph would skip save_kv_layer

    # --- both ---

    def shutdown(self) -> None:
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.close()


def _refuse_unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raises ConfigError for engines whose KV this connector cannot move."""
    parallel = vllm_config.parallel_config
    if parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1:
        raise ConfigError("MooncakeConnector moves the KV of one rank: tensor and pipeline parallel size must be 1")
    if len(kv_cache_config.kv_cache_groups) > 1:
        raise ConfigError(
            f"this model has {len(kv_cache_config.kv_cache_groups)} KV cache groups: start vLLM with "
            "--disable-hybrid-kv-cache-manager"
        )


def _share_logging() -> None:
    """Our loggers write where vLLM's do."""
    theirs = logging.getLogger("vllm")
    for name in ("mooncake", "prefill", "decode", "store", "transfer_engine"):
        ours = logging.getLogger(name)
        if theirs.handlers and not ours.handlers:
            ours.handlers = list(theirs.handlers)
            ours.setLevel(theirs.level or logging.INFO)
            ours.propagate = False
