"""What several Conductor tests build: keys, requests, reports, and a cluster that has been told about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conductor.config import ConductorConfig
from conductor.core import Conductor
from conductor.messages import (
    DecodeSample,
    EventKind,
    Placement,
    PlaceRequest,
    PlaceResult,
    PrefillSample,
    Rejection,
    RequestEvent,
    WorkerReport,
)
from mooncake.common.ids import BlockKey, InstanceId, InstanceName, RequestId

MODEL = "m"
BLOCK = 100


def keys(count: int, salt: int = 0) -> list[BlockKey]:
    """A chain of keys; two salts share nothing."""
    return [BlockKey(salt.to_bytes(8, "big") + i.to_bytes(8, "big")) for i in range(count)]


def request(request_id: str, prompt_tokens: int = 1000, **fields: Any) -> PlaceRequest:
    if "block_keys" not in fields:
        fields["block_keys"] = keys(prompt_tokens // BLOCK, salt=hash_of(request_id))
    return PlaceRequest(
        request_id=RequestId(request_id),
        model=fields.pop("model", MODEL),
        prompt_tokens=prompt_tokens,
        block_size=fields.pop("block_size", BLOCK),
        **fields,
    )


def hash_of(text: str) -> int:
    return 1000 + sum(ord(c) * 31**i for i, c in enumerate(text)) % 10**6


def report(name: str, sequence: int, *roles: str, **fields: Any) -> WorkerReport:
    return WorkerReport(
        name=InstanceName(name),
        instance_id=InstanceId(fields.pop("instance_id", life(name))),
        model=fields.pop("model", MODEL),
        roles=roles,
        sequence=sequence,
        snapshot=fields.pop("snapshot", sequence == 0),
        block_size=BLOCK,
        **fields,
    )


def life(name: str) -> InstanceId:
    return InstanceId(f"{name}-life-1")


def event(request_id: str, kind: EventKind, **fields: Any) -> RequestEvent:
    return RequestEvent(request_id=RequestId(request_id), kind=kind, **fields)


def cluster(*names: str, config: ConductorConfig | None = None, model: str = MODEL) -> Conductor:
    """Workers by name: p… prefill, d… decode, m… mixed; registered and attached at time 0."""
    core = Conductor(config or ConductorConfig())
    for name in names:
        add_worker(core, name, model=model)
    return core


def add_worker(core: Conductor, name: str, *, model: str = MODEL) -> None:
    roles = {"p": ("prefill",), "d": ("decode",), "m": ("prefill", "decode")}[name[0]]
    url = f"http://{name}"
    core.instance_up(InstanceName(name), life(name), model, roles=roles, http_url=url, block_size=BLOCK)
    core.worker_report(report(name, 0, *roles, model=model), 0.0)


def teach(core: Conductor, name: str, *, token_s: float = 1e-3, step_s: float = 0.01, sequence_s: float = 0.01) -> None:
    """The worker has measured: `token_s` a prompt token, `step_s` for one sequence and `sequence_s` for each more."""
    instance = core.fleet.of_model(MODEL)
    worker = next(each for each in instance if each.name == name)
    core.worker_report(
        report(
            name,
            (worker.sequence or 0) + 1,
            *worker.roles,
            prefill_samples=[PrefillSample(n, 0, n * token_s) for n in (500, 1000, 2000, 4000) * 10],
            decode_samples=[DecodeSample(b, b * 1000.0, step_s + sequence_s * (b - 1)) for b in (1, 2, 4, 8) * 10],
        ),
        0.0,
    )


def placed(result: PlaceResult) -> Placement:
    assert isinstance(result, Placement), result
    return result


def rejected(result: PlaceResult) -> Rejection:
    assert isinstance(result, Rejection), result
    return result


def prefill_names(results: Sequence[PlaceResult]) -> list[str]:
    return [p.prefill.name if (p := placed(result)).prefill is not None else "" for result in results]


def nothing_charged(core: Conductor) -> bool:
    return core.in_flight == 0 and all(
        len(each.queue) == 0 and not any(each.queue.total) and each.load.sequences == 0 and each.load.kv_tokens == 0
        for each in core.fleet
    )
