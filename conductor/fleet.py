"""The fleet: which workers there are, what they hold, and what is known of each model (paper §3, Conductor's inputs).

Fed by the registry (who is there), by workers' streams (blocks, load, measurements) and by time. A worker whose stream
broke is a suspect; it is gone when the registry agrees, or after a grace.
Knows: instances, prefix index, speculation, estimators of each model. Does not know: placements and their charges
(core.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from conductor.config import ConductorConfig
from conductor.estimators import ModelEstimators
from conductor.instances import Instance, InstanceTable
from conductor.messages import PlaceRequest, WorkerAck, WorkerReport
from conductor.placement import ModelState
from conductor.prefix_index import PrefixIndex
from conductor.speculation import Speculation
from mooncake.common.ids import InstanceId, RequestId


class Fleet:
    """`in_use(model)` says whether requests of a model are still open, so that its estimators must stay."""

    def __init__(self, config: ConductorConfig, *, in_use: Callable[[str], bool]) -> None:
        self._config = config
        self._in_use = in_use
        self._models: dict[str, ModelState] = {}
        self._table = InstanceTable(max_instances=config.max_instances)
        self._index = PrefixIndex(max_keys_per_instance=config.max_keys_per_instance)
        self._speculation = Speculation()
        self.sequence_gaps = 0

    # --- asking ---

    def __iter__(self) -> Iterator[Instance]:
        """By model and name."""
        return iter(self._table)

    def model(self, name: str) -> ModelState | None:
        return self._models.get(name)

    def of_model(self, model: str) -> Sequence[Instance]:
        """Sorted by name."""
        return self._table.of_model(model)

    def prefix_tokens(self, request: PlaceRequest, now: float) -> Mapping[InstanceId, int]:
        """How many leading tokens of the prompt each of the model's instances holds, or will once its queue is done."""
        same_blocks = [
            each.instance_id for each in self._table.of_model(request.model) if each.block_size == request.block_size
        ]
        held = self._index.match(request.block_keys, same_blocks)
        soon = self._speculation.match(request.block_keys, now)
        return {i: max(blocks, soon.get(i, 0)) * request.block_size for i, blocks in held.items()}

    def held_blocks(self, instance_id: InstanceId) -> int:
        return self._index.held(instance_id)

    @property
    def index_keys(self) -> int:
        """Different block keys that anyone holds."""
        return len(self._index)

    @property
    def dropped_keys(self) -> int:
        """Keys that were told and not kept, for want of room."""
        return self._index.dropped_keys

    # --- expecting blocks ---

    def expect(self, request: PlaceRequest, instance_id: InstanceId, until_s: float) -> None:
        """The prompt's blocks will be on that instance soon."""
        self._speculation.add(request.request_id, instance_id, request.block_keys, until_s)

    def computed(self, request_id: RequestId, now: float) -> None:
        """The prompt's prefill is over; events will tell what is held."""
        self._speculation.settle(request_id, now + self._config.speculative_ttl_s)

    def not_computed(self, request_id: RequestId) -> None:
        """The prompt's prefill will not happen there."""
        self._speculation.forget(request_id)

    # --- what workers tell ---

    def worker_report(self, report: WorkerReport, now: float) -> WorkerAck:
        """Applies one message of a worker's stream. A gap in the sequence asks for a snapshot."""
        instance = self._known(report)
        if instance is None:
            return WorkerAck(report.sequence, want_snapshot=False)
        in_order = instance.sequence is not None and report.sequence == instance.sequence + 1
        if report.snapshot:
            self._index.replace(instance.instance_id, report.stored)
            instance.needs_snapshot = False
        else:
            if not in_order and not instance.needs_snapshot:
                instance.needs_snapshot = True
                self.sequence_gaps += 1
            self._index.store(instance.instance_id, report.stored)
            self._index.remove(instance.instance_id, report.removed)
        instance.sequence = report.sequence
        instance.take_report(report, now)
        self._learn(instance, report, now)
        return WorkerAck(report.sequence, want_snapshot=instance.needs_snapshot)

    def _known(self, report: WorkerReport) -> Instance | None:
        """The instance that speaks; None when that life has ended or there is no room for it."""
        instance = self._table.get(report.instance_id)
        if instance is not None or self._table.is_retired(report.instance_id):
            return instance
        return self._add(Instance(report.name, report.instance_id, report.model, roles=tuple(report.roles)))

    def _learn(self, instance: Instance, report: WorkerReport, now: float) -> None:
        estimators = self._models[instance.model].estimators
        for prefill in report.prefill_samples:
            estimators.observe_prefill(instance.instance_id, prefill, now)
        for decode in report.decode_samples:
            estimators.observe_decode(instance.instance_id, decode, now)
        for load in report.load_samples:
            estimators.observe_load(load, now)

    # --- who is there ---

    def instance_up(self, told: Instance) -> None:
        """The registry names a worker (again, with changes). A new life under a name ends the old one."""
        instance = self._table.get(told.instance_id)
        if instance is not None and instance.model != told.model:
            self._remove(instance, retire=False)
            instance = None
        if instance is None:
            instance = self._add(told)
        if instance is None:
            return
        instance.registered = True
        instance.roles = told.roles
        instance.http_url = told.http_url or instance.http_url
        instance.block_size = told.block_size or instance.block_size
        instance.kv_capacity_tokens = told.kv_capacity_tokens or instance.kv_capacity_tokens

    def instance_down(self, instance_id: InstanceId, now: float) -> None:
        """The registry has lost a worker. One whose stream is open is a suspect until it speaks again."""
        instance = self._table.get(instance_id)
        if instance is None:
            return
        instance.registered = False
        if not instance.attached:
            self._remove(instance, retire=True)
        elif instance.suspect_since_s is None:
            instance.suspect_since_s = now

    def stream_broken(self, instance_id: InstanceId, now: float) -> None:
        """A worker's stream ended: a suspect from now on, gone when the registry agrees or the grace is over."""
        instance = self._table.get(instance_id)
        if instance is None or not instance.attached:
            return
        instance.attached = False
        instance.sequence, instance.needs_snapshot = None, True
        instance.suspect_since_s = now

    def tick(self, now: float) -> None:
        """Ends speculation and suspects whose time is over; who fell silent becomes a suspect."""
        self._speculation.expire(now)
        for instance in list(self._table):
            if instance.is_silent(now - self._config.report_stale_s) and instance.suspect_since_s is None:
                instance.suspect_since_s = now
            since_s = instance.suspect_since_s
            if since_s is None or now - since_s < self._config.suspect_grace_s:
                continue
            if instance.registered:  # keeps its lease: a last resort, but what it holds is unknown by now
                self._index.drop(instance.instance_id)
                self._speculation.drop(instance.instance_id)
            else:
                self._remove(instance, retire=False)

    def _add(self, instance: Instance) -> Instance | None:
        if instance.model not in self._models:
            self._make_room_for_model()
            self._models[instance.model] = ModelState(
                ModelEstimators(
                    expected_output_tokens=self._config.expected_output_tokens,
                    coverage=self._config.estimate_coverage,
                )
            )
        try:
            replaced = self._table.add(instance)
        except OverflowError:
            return None
        for old in replaced:
            self._forget(old)
        return instance

    def _make_room_for_model(self) -> None:
        """The longest known model without an instance gives way; what is still served is never forgotten."""
        if len(self._models) < self._config.max_models:
            return
        for name in self._models:
            if not self._table.of_model(name) and not self._in_use(name):
                del self._models[name]
                return

    def _remove(self, instance: Instance, *, retire: bool) -> None:
        self._table.remove(instance.instance_id, retire=retire)
        self._forget(instance)

    def _forget(self, instance: Instance) -> None:
        self._index.drop(instance.instance_id)
        self._speculation.drop(instance.instance_id)
        self._models[instance.model].estimators.drop_instance(instance.instance_id)
