"""MooncakeConnector in the scheduler process: dispatches requests to the producer, the consumer and the store's planner.

Runs on the engine's thread. Knows: which part a request belongs to, and when the engine may rest. Does not know: bytes.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, cast

import msgspec

from decode.consumer import ConsumerScheduler
from mooncake.common.errors import ConfigError
from mooncake.vllm.connector_config import ConnectorConfig
from mooncake.vllm.counters import CounterSet
from mooncake.vllm.host_link import SchedulerHello
from mooncake.vllm.leg import Leg, parse_leg
from mooncake.vllm.link_client import HostLinkClient
from mooncake.vllm.request_keys import KeySpace, RequestKeys, has_keys
from mooncake.vllm.step_plan import StepPlan, WorkerIdentity
from mooncake.vllm.waker import Waker
from prefill.prefix_loading import PrefixLoader
from prefill.producer import ProducerScheduler, scheduled_requests
from prefill.store_writing import StoreWriter
from store.client import StoreClient
from transfer_engine.engine import TransferEngine

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
        self._space: KeySpace | None = None
        self._loader: PrefixLoader | None = None
        self._writer: StoreWriter | None = None
        self._lookup: StoreClient | None = None
        self._block_size = block_size
        self._held: list[str] = []
        self._link.send(SchedulerHello(block_size=block_size, max_model_len=vllm_config.model_config.max_model_len))

    def meet_worker(self, identity: WorkerIdentity) -> None:
        """The worker half has registered its memory: now its blocks have names, and the store can be used."""
        if (config := self._config.store) is None:
            return
        if config.block_tokens % self._block_size:
            raise ConfigError(
                f"store.block_tokens {config.block_tokens} is not a multiple of the block size {self._block_size}"
            )
        # Looking up moves no bytes, so no transfer engine is needed.
        engine = cast(TransferEngine, None)
        name = f"{self._config.name}-scheduler"
        masters = config.masters or self._link.store_masters
        self._lookup = StoreClient(engine, masters, token=self._config.cluster_token, name=name)
        self._space = KeySpace(
            model=self._config.served_model,
            fingerprint=identity.fingerprint,
            block_size=self._block_size,
            block_tokens=config.block_tokens,
        )
        self._loader = PrefixLoader(self._space, config, self._lookup.prefix_len, self.counters, self._waker.wake)
        self._writer = StoreWriter(self._space)

    # --- a request's life ---

    def on_new_request(self, request: Request) -> None:
        leg = self._leg(request)
        self._use_store(request, leg)
        if leg is None or request.prompt_token_ids is None:
            return
        deadline_s = leg.deadline_s or self._config.default_deadline_s
        if leg.leg == "prefill":
            self._producer.add(request, leg, time.monotonic() + deadline_s)
        else:
            self._consumer.add(request, leg, time.monotonic() + deadline_s * self._config.load_share)

    def _use_store(self, request: Request, leg: Leg | None) -> None:
        if self._space is None or self._loader is None or self._writer is None or not has_keys(request):
            return
        keys = RequestKeys(self._space, request)
        self._writer.add(request, keys)
        if leg is None or leg.leg == "prefill":
            self._loader.add(request, keys)

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
        if self._loader is None:
            return 0, False
        found = self._loader.matched(request.request_id, computed_tokens)
        return found, bool(found)

    def allocated(self, request: Request, block_ids: list[int], external_tokens: int) -> None:
        if self._consumer.owns(request.request_id):
            self._consumer.allocated(request.request_id, block_ids, external_tokens)
        elif self._loader is not None:
            self._loader.allocated(request.request_id, block_ids, external_tokens)

    def finished(self, request: Request) -> bool:
        """True: the blocks stay until the worker half reports the request as sent."""
        from vllm.v1.request import RequestStatus

        req_id = request.request_id
        loading = self._consumer.loading(req_id)
        aborted = request.status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)
        hold = self._producer.finished(req_id, aborted=aborted)
        self._consumer.finished(req_id)
        if self._loader is not None and self._writer is not None:
            loading |= self._loader.loading(req_id)
            self._loader.finished(req_id)
            hold |= self._writer.finished(req_id)
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
        if self._loader is not None and self._writer is not None:
            for req_id in plan.preempted:
                self._loader.preempted(req_id)
            self._loader.plan(plan)
            self._writer.plan(scheduled, plan)
        plan.held, self._held = self._held, []
        if not output.total_num_scheduled_tokens and not output.finished_req_ids and plan.empty():
            self._waker.wait()
        return plan

    def on_output(self, output: Any) -> None:
        """After every step: what the worker half reported."""
        for req_id in output.finished_recving or ():
            self._consumer.received(req_id)
            if self._loader is not None:
                self._loader.received(req_id)

    def pending(self) -> bool:
        """The worker half has to be told something: the engine must make one more step."""
        loads = self._loader is not None and self._loader.pending()
        return bool(self._held) or loads or self._producer.pending() or self._consumer.pending()

    def close(self) -> None:
        self._waker.close()
        if self._loader is not None and self._lookup is not None:
            self._loader.close()
            self._lookup.close()
        self._link.close()
