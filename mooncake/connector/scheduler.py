"""MooncakeConnector in the scheduler process: dispatches requests to the producer, the consumer and the store's planner.

Runs on the engine's thread. Knows: which part a request belongs to, and when the engine may rest. Does not know: bytes.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import msgspec

from decode.consumer import ConsumerScheduler
from mooncake.vllm.connector_config import ConnectorConfig
from mooncake.vllm.counters import CounterSet
from mooncake.vllm.host_link import SchedulerHello
from mooncake.vllm.leg import Leg, parse_leg
from mooncake.vllm.link_client import HostLinkClient
from mooncake.vllm.step_plan import StepPlan, WorkerIdentity
from mooncake.vllm.waker import Waker
from prefill.producer import ProducerScheduler, scheduled_requests

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_log = logging.getLogger(__name__)


class SchedulerHalf:
    """See MooncakeConnector for who calls what."""

    def __init__(self, config: ConnectorConfig, vllm_config: Any, engine_id: str) -> None:
        self._config = config
        block_size = vllm_config.cache_config.block_size
        self.counters = CounterSet()
        self._link = HostLinkClient(config.host_link, f"{config.name}-scheduler", self.counters)
        self._waker = Waker(engine_id)
        self._producer = ProducerScheduler(block_size, self._link.send)
        self._consumer = ConsumerScheduler(block_size)
        self._held: list[str] = []
        self._link.send(SchedulerHello(block_size=block_size, max_model_len=vllm_config.model_config.max_model_len))

    def meet_worker(self, identity: WorkerIdentity) -> None:
        """The worker half has registered its memory."""

    # --- a request's life ---

    def on_new_request(self, request: Request) -> None:
        leg = self._leg(request)
        if leg is None or request.prompt_token_ids is None:
            return
        deadline_s = leg.deadline_s or self._config.default_deadline_s
        if leg.leg == "prefill":
            self._producer.add(request, leg, time.monotonic() + deadline_s)
        else:
            self._consumer.add(request, leg, time.monotonic() + deadline_s * self._config.load_share)

    def _leg(self, request: Request) -> Leg | None:
        try:
            return parse_leg(request.kv_transfer_params)
        except msgspec.ValidationError as error:
            self.counters.add("malformed_legs_total")
            _log.warning("kv_transfer_params of %s ignored: %s", request.request_id, error)
            return None

    def is_decode_leg(self, req_id: str) -> bool:
        return self._consumer.owns(req_id)

    def matched(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        if self._consumer.owns(request.request_id):
            tokens = self._consumer.matched(request.request_id, computed_tokens)
            return tokens, tokens > 0
        return 0, False

    def allocated(self, request: Request, block_ids: list[int], external_tokens: int) -> None:
        if self._consumer.owns(request.request_id):
            self._consumer.allocated(request.request_id, block_ids, external_tokens)

    def finished(self, request: Request) -> bool:
        """True: the blocks stay until the worker half reports the request as sent."""
        from vllm.v1.request import RequestStatus

        req_id = request.request_id
        loading = self._consumer.loading(req_id)
        aborted = request.status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)
        hold = self._producer.finished(req_id, aborted=aborted)
        self._consumer.finished(req_id)
        if loading or not hold:
            return False  # while a load is awaited, vLLM keeps the blocks by itself until that is reported
        self._held.append(req_id)
        return True

    # --- steps ---

    def plan_step(self, output: SchedulerOutput) -> StepPlan:
        plan = StepPlan(preempted=sorted(output.preempted_req_ids or ()))
        scheduled = list(scheduled_requests(output))
        self._producer.plan(output, scheduled, plan)
        self._consumer.plan(plan)
        plan.held, self._held = self._held, []
        if not output.total_num_scheduled_tokens and not output.finished_req_ids and plan.empty():
            self._waker.wait()
        return plan

    def on_output(self, output: Any) -> None:
        """After every step: what the worker half reported."""
        for req_id in output.finished_recving or ():
            self._consumer.received(req_id)

    def pending(self) -> bool:
        """The worker half has to be told something: the engine must make one more step."""
        return bool(self._held) or self._producer.pending() or self._consumer.pending()

    def close(self) -> None:
        self._waker.close()
        self._link.close()
