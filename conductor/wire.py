"""conductor.proto <-> the core's structs. Does not know: what they mean, or gRPC's calls."""

from __future__ import annotations

from collections.abc import Iterable

from conductor import messages as m
from conductor.core import Conductor
from conductor.instances import Instance
from mooncake.common.block_key import unpack_keys
from mooncake.common.ids import InstanceId, InstanceName, RequestId
from mooncake.common.proto import conductor_pb2 as pb

_KNOWN_KINDS = frozenset(int(kind) for kind in m.EventKind)


def place_request(request: pb.PlaceRequest) -> m.PlaceRequest:
    """Without `pool_prefix_tokens`, which only the store can tell. Raises ValueError for what cannot be a request."""
    if not request.request_id or request.prompt_tokens == 0:
        raise ValueError("request_id and prompt_tokens are needed")
    keys = unpack_keys(request.block_keys)
    if len(keys) * request.block_size > request.prompt_tokens or (keys and not request.block_size):
        raise ValueError(f"{len(keys)} block keys of {request.block_size} tokens for {request.prompt_tokens} tokens")
    return m.PlaceRequest(
        request_id=RequestId(request.request_id),
        model=request.model,
        prompt_tokens=request.prompt_tokens,
        block_keys=keys,
        block_size=request.block_size,
        max_output_tokens=request.max_output_tokens,
        ttft_slo_s=max(0.0, request.ttft_slo_s),
        tbt_slo_s=max(0.0, request.tbt_slo_s),
        elapsed_s=max(0.0, request.elapsed_s),
        exclude=tuple(request.exclude_instances),
        pin_prefill=request.pin_prefill,
        pin_decode=request.pin_decode,
        single_worker=request.single_worker,
    )


def place_response(result: m.PlaceResult) -> pb.PlaceResponse:
    if isinstance(result, m.Rejection):
        return pb.PlaceResponse(
            rejection=pb.Rejection(
                status=result.status,
                reason=result.reason,
                message=result.message,
                retry_after_s=result.retry_after_s,
                estimate=_estimate(result.estimate),
            )
        )
    return pb.PlaceResponse(
        placement=pb.Placement(
            prefill=None if result.prefill is None else _chosen(result.prefill),
            decode=_chosen(result.decode),
            prefix_tokens=result.prefix_tokens,
            pool_prefix_tokens=result.pool_prefix_tokens,
            estimate=_estimate(result.estimate),
            degraded=result.degraded,
        )
    )


def request_events(request: pb.ReportRequest) -> Iterable[m.RequestEvent]:
    """Kinds that this version does not know are left out."""
    for event in request.events:
        if event.kind in _KNOWN_KINDS:
            yield m.RequestEvent(
                request_id=RequestId(event.request_id),
                kind=m.EventKind(event.kind),
                instance_id=event.instance_id,
                at_s=event.at_s,
                output_tokens=event.output_tokens,
                cached_tokens=event.cached_tokens,
            )


def worker_report(report: pb.WorkerReport) -> m.WorkerReport:
    """Raises ValueError for malformed keys or a worker without a name, an instance id or a model."""
    if not (report.name and report.instance_id and report.model):
        raise ValueError("name, instance_id and model are needed")
    return m.WorkerReport(
        name=InstanceName(report.name),
        instance_id=InstanceId(report.instance_id),
        model=report.model,
        roles=tuple(report.roles),
        sequence=report.sequence,
        block_size=report.block_size,
        snapshot=report.snapshot,
        stored=unpack_keys(report.stored),
        removed=unpack_keys(report.removed),
        running=report.running,
        waiting=report.waiting,
        kv_usage=report.kv_usage,
        kv_capacity_tokens=report.kv_capacity_tokens,
        prefill_samples=[
            m.PrefillSample(s.prompt_tokens, s.cached_tokens, s.compute_s) for s in report.prefill_samples
        ],
        decode_samples=[m.DecodeSample(s.batch, s.kv_tokens, s.tbt_s) for s in report.decode_samples],
        load_samples=[m.LoadSample(s.tokens, s.load_s) for s in report.load_samples],
        draining=report.draining,
        http_url=report.http_url,
    )


def worker_ack(ack: m.WorkerAck) -> pb.WorkerAck:
    return pb.WorkerAck(sequence=ack.sequence, want_snapshot=ack.want_snapshot)


def status(core: Conductor, now: float, *, leader: bool) -> pb.StatusResponse:
    return pb.StatusResponse(
        instances=[_instance_status(core, each, now) for each in core.fleet],
        placements_in_flight=core.in_flight,
        placed_total=core.totals.placed,
        rejected_total=sum(core.totals.rejected.values()),
        leader=leader,
    )


def _instance_status(core: Conductor, each: Instance, now: float) -> pb.InstanceStatus:
    return pb.InstanceStatus(
        name=each.name,
        instance_id=each.instance_id,
        model=each.model,
        roles=each.roles,
        running=each.running,
        waiting=each.waiting,
        kv_usage=each.kv_usage,
        held_blocks=core.fleet.held_blocks(each.instance_id),
        queue_s=core.queue_s(each, now),
        report_age_s=-1.0 if each.last_report_s is None else now - each.last_report_s,
        draining=each.draining,
        attached=each.attached,
        suspect=each.suspect_since_s is not None,
        events_seen=each.events_seen,
        http_url=each.http_url,
    )


def _chosen(chosen: m.Chosen) -> pb.Instance:
    return pb.Instance(name=chosen.name, instance_id=chosen.instance_id, http_url=chosen.http_url)


def _estimate(estimate: m.Estimate) -> pb.Estimate:
    return pb.Estimate(
        transfer_s=estimate.transfer_s,
        queue_s=estimate.queue_s,
        prefill_s=estimate.prefill_s,
        ttft_s=estimate.ttft_s,
        ttft_error_s=estimate.ttft_error_s,
        tbt_s=estimate.tbt_s,
        tbt_error_s=estimate.tbt_error_s,
    )
