"""What both halves of the worker side stand on: transfer engine, registered KV memory, peers, reports, host link, traces.

Knows: how they are built from the configuration and taken down. Does not know: prefill or decoding.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from mooncake.common.errors import ConfigError
from mooncake.vllm.connector_config import ConnectorConfig
from mooncake.vllm.counters import CounterSet
from mooncake.vllm.fingerprint import engine_facts, fingerprint, model_identity
from mooncake.vllm.host_link import WorkerHello
from mooncake.vllm.kv_layout import KVLayout, describe
from mooncake.vllm.link_client import HostLinkClient
from mooncake.vllm.peers import Peers
from mooncake.vllm.reports import Reports
from mooncake.vllm.traces import TraceBook
from mooncake.vllm.waker import Pinger
from transfer_engine.config import EngineConfig
from transfer_engine.engine import TransferEngine
from transfer_engine.metrics import samples
from transfer_engine.topology import of_engine

_log = logging.getLogger(__name__)


class WorkerRuntime:
    """Built in the worker process. `layout` and `fingerprint` exist after `register`."""

    layout: KVLayout
    fingerprint: str

    def __init__(self, config: ConnectorConfig, engine_id: str, on_release: Callable[[str], None]) -> None:
        self.config = config
        self.counters = CounterSet()
        self.link = HostLinkClient(config.host_link, f"{config.name}-worker", self.counters, on_release)
        self.traces = TraceBook(self.link.send)
        self._pinger = Pinger(engine_id)
        self.reports = Reports(self._pinger.ping)
        settings = engine_config(config)
        self.topology = of_engine(settings)
        """What the streams' engine sees of this machine."""
        self.engine = TransferEngine(settings)
        self.store_engine = self.engine if not config.store_nics else _store_engine(config)
        """Moves store traffic; one of its own where that has NICs of its own, so that it never slows down streams."""
        self.counters.read_from(lambda: samples(e.stats() for e in {self.engine, self.store_engine}))
        self.peers = Peers(self.engine)
        self.senders = ThreadPoolExecutor(8, thread_name_prefix="mooncake-send")
        self.fencers = ThreadPoolExecutor(4, thread_name_prefix="mooncake-fence")
        self._kv: Mapping[str, Any] = {}

    def register(self, kv_caches: Mapping[str, Any], vllm_config: Any, num_blocks: int) -> None:
        """Describes and registers the KV memory and tells the host. Raises ConfigError for a layout that cannot be moved."""
        self._kv = kv_caches
        self.layout = describe(kv_caches, num_blocks, vllm_config.cache_config.block_size)
        model = vllm_config.model_config
        self.fingerprint = fingerprint(
            self.layout,
            engine=engine_facts(vllm_config, (layer.name for layer in self.layout.layers)),
            model=model_identity(model.model, model.revision, model.hf_config),
            salt=self.config.fingerprint_salt,
        )
        for address, length in _storages(kv_caches):
            for engine in {self.engine, self.store_engine}:
                engine.register_local_memory(address, length, owner=kv_caches, location="*")
        self.link.send(
            WorkerHello(
                transfer_address=self.engine.address,
                transfer_instance_id=self.engine.instance_id,
                fingerprint=self.fingerprint,
                layers=len(self.layout.layers),
                num_blocks=num_blocks,
                block_size=self.layout.block_size,
                block_bytes=self.layout.layers[0].block_bytes,
                topology=self.topology,
            )
        )
        _log.info(
            "MooncakeConnector: %d layers of %d blocks, %d bytes a block in all, fingerprint %s, transfer engine at %s",
            len(self.layout.layers), num_blocks, self.layout.bytes_per_block, self.fingerprint[:16], self.engine.address,
        )  # fmt: skip

    def in_pool(self, pool: ThreadPoolExecutor, call: Callable[[], None]) -> None:
        """Runs `call` on a pool thread; what it raises is logged and counted."""

        def run() -> None:
            try:
                call()
            except Exception:
                self.counters.add("errors_total")
                _log.exception("MooncakeConnector: a background call failed")

        try:
            pool.submit(run)
        except RuntimeError:
            _log.debug("the connector is closed")

    def close(self) -> None:
        self.senders.shutdown(wait=False, cancel_futures=True)
        self.fencers.shutdown(wait=False, cancel_futures=True)
        for engine in {self.engine, self.store_engine}:
            engine.close()
        self.link.close()
        self._pinger.close()


def engine_config(config: ConnectorConfig) -> EngineConfig:
    """Raises ConfigError naming the wrong field of `transfer`."""
    raw: dict[str, Any] = {"name": config.name, **config.transfer, "cluster_token": b""}
    try:
        parsed = msgspec.convert(raw, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"kv_connector_extra_config.transfer: {error}") from error
    return msgspec.structs.replace(parsed, cluster_token=config.cluster_token.encode())


def _store_engine(config: ConnectorConfig) -> TransferEngine:
    changes: dict[str, Any] = {"nics": tuple(config.store_nics), "port": 0, "name": f"{config.name}-store"}
    return TransferEngine(msgspec.structs.replace(engine_config(config), **changes))


def _storages(kv_caches: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Address and length of the allocations that hold the caches, each once."""
    found = {}
    for tensor in kv_caches.values():
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sorted(found.items())


class Stepper:
    """Calls `tick` at most every `every_s`; for handlers whose thread may never be idle."""

    def __init__(self, every_s: float) -> None:
        self._every_s, self._at = every_s, 0.0
        self._lock = threading.Lock()

    def due(self, now: float) -> bool:
        with self._lock:
            if now < self._at:
                return False
            self._at = now + self._every_s
            return True
