"""The workers the Conductor knows: what they are, how fresh that knowledge is, and what has been charged to them.

A worker is known by registry record, by an attached stream, or both. Either alone keeps it: etcd may be down, a stream
may break. A restart under the same name is a new life (another instance id) and ends the old one, whose late words are
ignored.
Knows: identity, roles, freshness, reported load. Does not know: blocks (prefix_index.py), policy (placement.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from conductor.charges import DecodeLoad, PrefillQueue
from conductor.messages import Chosen, WorkerReport
from mooncake.common.ids import InstanceId, InstanceName

_RETIRED_KEPT = 4096


@dataclass(slots=True, eq=False)
class Instance:
    """One life of one worker."""

    name: InstanceName
    instance_id: InstanceId
    model: str
    roles: tuple[str, ...] = ()
    http_url: str = ""
    block_size: int = 0
    kv_capacity_tokens: int = 0
    kv_usage: float = 0.0
    running: int = 0
    waiting: int = 0
    draining: bool = False

    registered: bool = False
    attached: bool = False
    suspect_since_s: float | None = None
    sequence: int | None = None
    needs_snapshot: bool = True
    last_report_s: float | None = None
    events_seen: int = 0
    prefills_seen: int = 0

    queue: PrefillQueue = field(default_factory=PrefillQueue)
    load: DecodeLoad = field(default_factory=DecodeLoad)
    foreign: int = 0
    """Sequences that the worker reported beyond what we sent it: of before a fail-over, or of another router."""
    foreign_waiting: int = 0
    """Of those, the ones that had not begun."""

    @property
    def chosen(self) -> Chosen:
        return Chosen(self.name, self.instance_id, self.http_url)

    @property
    def sequences(self) -> int:
        """What decodes here or is on its way, plus what we did not send."""
        return self.load.sequences + self.foreign

    def is_called(self, name_or_id: str) -> bool:
        return name_or_id in (self.name, self.instance_id)

    def is_silent(self, since_s: float) -> bool:
        """Whether its stream is open but has said nothing since then."""
        return self.attached and self.last_report_s is not None and self.last_report_s < since_s

    def take_report(self, report: WorkerReport, now: float) -> None:
        """Everything of a report that is the worker's present state."""
        self.roles = tuple(report.roles) or self.roles
        self.http_url = report.http_url or self.http_url
        self.block_size = report.block_size or self.block_size
        self.kv_capacity_tokens = report.kv_capacity_tokens or self.kv_capacity_tokens
        self.kv_usage = report.kv_usage
        self.running, self.waiting = report.running, report.waiting
        self.draining = report.draining
        self.attached, self.suspect_since_s = True, None
        self.last_report_s = now
        self.events_seen += len(report.stored) + len(report.removed)
        self.prefills_seen += len(report.prefill_samples)
        ours = self.load.sequences + len(self.queue)
        self.foreign = max(0, report.running + report.waiting - ours)
        self.foreign_waiting = max(0, report.waiting - ours)


class InstanceTable:
    """All lives that are believed to be going on. Iterated in order of name, so that no choice depends on history."""

    def __init__(self, *, max_instances: int) -> None:
        self._max_instances = max_instances
        self._by_id: dict[InstanceId, Instance] = {}
        self._by_model: dict[str, list[Instance]] = {}
        self._retired: dict[InstanceId, None] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Instance]:
        return iter(sorted(self._by_id.values(), key=lambda each: (each.model, each.name)))

    def get(self, instance_id: InstanceId) -> Instance | None:
        return self._by_id.get(instance_id)

    def of_model(self, model: str) -> Sequence[Instance]:
        """Sorted by name."""
        return self._by_model.get(model, ())

    def is_retired(self, instance_id: InstanceId) -> bool:
        """Whether that life has ended: replaced under its name, or gone."""
        return instance_id in self._retired

    def add(self, instance: Instance) -> list[Instance]:
        """Adds a life; returns the ones that it ends (same name), which the caller must forget elsewhere too.

        Raises OverflowError when the table is full.
        """
        replaced = [old for old in self._by_id.values() if old.name == instance.name]
        if len(self._by_id) - len(replaced) >= self._max_instances:
            raise OverflowError(f"more than max_instances={self._max_instances} workers")
        for old in replaced:
            self.remove(old.instance_id, retire=True)
        self._by_id[instance.instance_id] = instance
        siblings = self._by_model.setdefault(instance.model, [])
        siblings.append(instance)
        siblings.sort(key=lambda each: each.name)
        return replaced

    def remove(self, instance_id: InstanceId, *, retire: bool) -> Instance | None:
        """Ends a life. `retire`: for good, so that late words of it are ignored."""
        instance = self._by_id.pop(instance_id, None)
        if instance is None:
            return None
        siblings = self._by_model[instance.model]
        siblings.remove(instance)
        if not siblings:
            del self._by_model[instance.model]
        if retire:
            self._retired[instance_id] = None
            if len(self._retired) > _RETIRED_KEPT:
                del self._retired[next(iter(self._retired))]
        return instance


def eligible(
    instances: Iterable[Instance], role: str, *, exclude: Sequence[str], pin: str, tokens: int
) -> list[Instance]:
    """Those that may get a request of `tokens`: in the role, not excluded, not draining, large enough, the pinned one.

    Suspects only when nobody else is left.
    """
    found = [
        each
        for each in instances
        if role in each.roles
        and not each.draining
        and each.instance_id not in exclude
        and (not pin or each.is_called(pin))
        and (not each.kv_capacity_tokens or each.kv_capacity_tokens >= tokens)
    ]
    return [each for each in found if each.suspect_since_s is None] or found
