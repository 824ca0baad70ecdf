"""The workers that a gateway can reach, by model: the registry's picture, and what this gateway itself has seen of them.

Knows: worker records (docs/protocol.md §2), requests in flight from here, circuit breakers, who tokenizes as we do.
Does not know: placement, legs, or how membership is kept (mooncake.common.registry).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mooncake.common.registry import InstanceRecord, Kind
from mooncake.gateway.circuit import Circuits
from mooncake.gateway.metrics import GatewayMetrics

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Worker:
    """One life of one vLLM worker."""

    name: str
    instance_id: str
    http_url: str
    engine_url: str
    model: str
    model_path: str
    roles: frozenset[str]
    fingerprint: str = ""
    block_size: int = 16
    max_model_len: int = 0
    transfer_address: str = ""
    transfer_instance_id: str = ""
    adapters: tuple[str, ...] = ()
    draining: bool = False


def worker_of(record: InstanceRecord) -> Worker | None:
    """None when the record lacks what a request needs."""
    info: dict[str, Any] = record.info
    try:
        return Worker(
            name=record.name,
            instance_id=record.instance_id,
            http_url=record.http_url.rstrip("/"),
            engine_url=str(info["engine_url"]).rstrip("/"),
            model=str(info["model"]),
            model_path=str(info.get("model_path", "")),
            roles=frozenset(info.get("roles") or ("prefill", "decode")),
            fingerprint=str(info.get("fingerprint", "")),
            block_size=int(info.get("block_size") or 16),
            max_model_len=int(info.get("max_model_len") or 0),
            transfer_address=str(info.get("transfer_address", "")),
            transfer_instance_id=str(info.get("transfer_instance_id", "")),
            adapters=tuple(info.get("lora_adapters") or ()),
            draining=bool(info.get("draining", False)),
        )
    except (KeyError, TypeError, ValueError) as error:
        _log.warning("unusable worker record", extra={"fields": {"name": record.name, "error": repr(error)}})
        return None


@dataclass(frozen=True)
class Model:
    """A served model: what its workers have in common, and they."""

    name: str
    workers: tuple[Worker, ...]
    model_path: str
    fingerprint: str
    block_size: int
    max_model_len: int
    lora: str = ""
    """The adapter, when the client named one."""


WorkerCallback = Callable[[Kind, Worker], None]


@dataclass
class Directory:
    """Mutated only on the event loop."""

    metrics: GatewayMetrics
    circuits: Circuits
    workers: dict[str, Worker] = field(default_factory=dict)
    in_flight: Counter[str] = field(default_factory=Counter)
    mismatched: set[str] = field(default_factory=set)
    """Instance ids whose token ids differ from ours."""
    _watchers: list[WorkerCallback] = field(default_factory=list)
    _when_down: dict[str, set[Callable[[], None]]] = field(default_factory=dict)

    # --- membership ---

    def on_record(self, kind: Kind, record: InstanceRecord) -> None:
        """What `Registry.watch("worker", …)` calls."""
        old = self.workers.get(record.name)
        new = None if kind == "down" else worker_of(record)
        if kind == "down" and old is not None and old.instance_id != record.instance_id:
            return
        if old is not None and (new is None or new.instance_id != old.instance_id):
            self._forget(old)
        if new is not None:
            self.workers[new.name] = new
        self.metrics.know_models({name for w in self.workers.values() for name in (w.model, *w.adapters)})
        self._count()
        if new is not None or old is not None:
            worker = new or old
            assert worker is not None
            for callback in self._watchers:
                callback(kind, worker)

    def _forget(self, worker: Worker) -> None:
        self.workers.pop(worker.name, None)
        self.circuits.forget(worker.instance_id)
        self.mismatched.discard(worker.instance_id)
        for metric in (self.metrics.circuit_open, self.metrics.tokenizer_mismatch):
            labels = (worker.instance_id,) if metric is self.metrics.circuit_open else (worker.model, worker.name)
            if labels in metric._metrics:
                metric.remove(*labels)
        for callback in self._when_down.pop(worker.instance_id, set()):
            callback()

    def _count(self) -> None:
        counts = Counter((w.model, role) for w in self.workers.values() for role in w.roles)
        self.metrics.instances.clear()
        for (model, role), number in counts.items():
            self.metrics.instances.labels(self.metrics.model(model), role).set(number)

    def watch(self, callback: WorkerCallback) -> None:
        self._watchers.append(callback)

    def when_down(self, worker: Worker, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls back once when that life of the worker ends. Returns how to forget it."""
        self._when_down.setdefault(worker.instance_id, set()).add(callback)

        def forget() -> None:
            waiting = self._when_down.get(worker.instance_id)
            if waiting is not None:
                waiting.discard(callback)
                if not waiting:
                    del self._when_down[worker.instance_id]

        return forget

    # --- lookup ---

    def names(self) -> list[str]:
        """Model names that clients may ask for, adapters included."""
        return sorted({name for w in self.workers.values() for name in (w.model, *w.adapters)})

    def model(self, name: str) -> Model | None:
        """None when no worker serves that name."""
        serving = tuple(w for w in self.workers.values() if w.model == name)
        lora = ""
        if not serving:
            serving = tuple(w for w in self.workers.values() if name in w.adapters)
            lora = name
        if not serving:
            return None
        # KVCache passes between equal layouts only, so keys are made for what most workers have.
        layout, _ = Counter((w.fingerprint, w.block_size) for w in serving).most_common(1)[0]
        lengths = [w.max_model_len for w in serving if w.max_model_len]
        return Model(serving[0].model, serving, serving[0].model_path, *layout, min(lengths, default=1 << 30), lora)

    def by_instance_id(self, name: str, instance_id: str) -> Worker | None:
        worker = self.workers.get(name)
        return worker if worker is not None and worker.instance_id == instance_id else None

    def tokenizes_alike(self, model: Model) -> bool:
        return not any(w.instance_id in self.mismatched for w in model.workers)

    # --- what happened ---

    def sent(self, worker: Worker) -> None:
        self.in_flight[worker.instance_id] += 1
        self.circuits.tried(worker.instance_id, time.monotonic())

    def ended(self, worker: Worker) -> None:
        self.in_flight[worker.instance_id] -= 1
        if self.in_flight[worker.instance_id] <= 0:
            del self.in_flight[worker.instance_id]

    def failed(self, worker: Worker) -> None:
        if self.circuits.failure(worker.instance_id, time.monotonic()):
            _log.warning(
                "avoiding an instance", extra={"fields": {"name": worker.name, "instance_id": worker.instance_id}}
            )
            self.metrics.circuit_open.labels(worker.instance_id).set(1)

    def succeeded(self, worker: Worker) -> None:
        self.circuits.success(worker.instance_id)
        if (worker.instance_id,) in self.metrics.circuit_open._metrics:
            self.metrics.circuit_open.remove(worker.instance_id)
