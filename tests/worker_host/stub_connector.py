"""A connector for a real vLLM that only speaks on the host link: it hands nothing over.

It lets the worker host be tested with a real engine alone. Named in `WorkerConfig.connector_module`.
"""

from __future__ import annotations

import time
from typing import Any

import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from mooncake.vllm import host_link
from tests.worker_host.stub_connector_name import FINGERPRINT
from transfer_engine.topology import Paths, Topology
from transfer_engine.topology_sysfs import Nic


class Nothing(KVConnectorMetadata):
    pass


class MooncakeConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_size = vllm_config.cache_config.block_size
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        half = "scheduler" if role == KVConnectorRole.SCHEDULER else "worker"
        self._link = zmq.Context.instance().socket(zmq.DEALER)
        self._link.setsockopt(zmq.IDENTITY, half.encode())
        self._link.connect(extra["host_link"])
        self._started: dict[str, tuple[str, int, float]] = {}
        if half == "scheduler":
            self._send(host_link.SchedulerHello(self._block_size, vllm_config.model_config.max_model_len))

    def _send(self, message: host_link.ToHost) -> None:
        self._link.send(host_link.encode(message))

    # worker half

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        first = next(iter(kv_caches.values()))
        self._send(
            host_link.WorkerHello(
                transfer_address="127.0.0.1:1",
                transfer_instance_id="stub",
                fingerprint=FINGERPRINT,
                layers=len(kv_caches),
                num_blocks=first.shape[0],
                block_size=self._block_size,
                block_bytes=first[0].nbytes,
                topology=Topology((Nic(name="mlx5_0"),), {"cpu:0": Paths(("mlx5_0",))}),
            )
        )
        self._send(host_link.Counters("worker", {'mooncake_connector_loads_total{result="ok"}': 3.0}))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    # scheduler half

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        mooncake = (request.kv_transfer_params or {}).get("mooncake")
        if mooncake and request.request_id not in self._started:
            self._started[request.request_id] = (mooncake["transfer_id"], request.num_computed_tokens, time.time())
            self._send(
                host_link.PrefillStarted(
                    mooncake["transfer_id"], request.num_computed_tokens, request.num_prompt_tokens, time.time()
                )
            )

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return Nothing()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        started = self._started.pop(request.request_id, None)
        if started is not None:
            transfer_id, cached, at_s = started
            self._send(host_link.PrefillFinished(transfer_id, request.num_prompt_tokens, cached, time.time() - at_s))
        return False, None
