"""The consumer in the scheduler process: reserves blocks of a decoding leg for KV that another worker sends.

Each request asks once: what comes back to the queue (load failed, preempted) is computed here. Knows: when vLLM allocates and
ends. Does not know: messages, bytes. Paper §3 step 3-4.
"""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mooncake.vllm.leg import Leg, leg_digest
from mooncake.vllm.step_plan import StepPlan, StreamCancel, StreamLoad

if TYPE_CHECKING:
    from vllm.v1.request import Request

_log = logging.getLogger(__name__)


class _Stage(enum.Enum):
    QUEUED = "queued"
    LOADING = "loading"
    DONE = "done"
    """Loaded, failed, or it never will be."""


@dataclass
class _Decode:
    leg: Leg
    digest: bytes
    prompt_tokens: int
    deadline: float
    stage: _Stage = _Stage.QUEUED


class ConsumerScheduler:
    """Called by the engine's thread only."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._decodes: dict[str, _Decode] = {}
        self._loads: list[StreamLoad] = []
        self._cancels: list[StreamCancel] = []
        self._aborted: list[str] = []

    def add(self, request: Request, leg: Leg, deadline: float) -> None:
        """A decoding leg is queued."""
        self._decodes[request.request_id] = _Decode(leg, leg_digest(request), request.num_prompt_tokens, deadline)

    def owns(self, req_id: str) -> bool:
        """It is a decoding leg."""
        return req_id in self._decodes

    def loading(self, req_id: str) -> bool:
        """vLLM holds the request's blocks until the worker half reports its load."""
        decode = self._decodes.get(req_id)
        return decode is not None and decode.stage is _Stage.LOADING

    def pending(self) -> bool:
        """There is something to tell the worker half."""
        return bool(self._loads or self._cancels or self._aborted)

    def matched(self, req_id: str, computed_tokens: int) -> int:
        """Tokens that the producer will send beyond those in the local prefix cache."""
        decode = self._decodes[req_id]
        if decode.stage is not _Stage.QUEUED:
            return 0
        if not decode.leg.peer_address or (decode.leg.digest and decode.leg.digest != decode.digest.hex()):
            _log.warning("transfer %s: the prompt here is another one, or nobody sends it", decode.leg.transfer_id)
            return 0
        return decode.prompt_tokens - computed_tokens

    def allocated(self, req_id: str, block_ids: list[int], external_tokens: int) -> None:
        """vLLM has allocated the request's blocks."""
        decode = self._decodes[req_id]
        if decode.stage is not _Stage.QUEUED:
            return
        if external_tokens <= 0:  # vLLM computes it all (prompt logprobs), or it must
            decode.stage = _Stage.DONE
            self._cancel(req_id, decode)
            return
        decode.stage = _Stage.LOADING
        first = (decode.prompt_tokens - external_tokens) // self._block_size
        blocks = -(-decode.prompt_tokens // self._block_size)
        leg = decode.leg
        self._loads.append(
            StreamLoad(
                req_id=req_id,
                transfer_id=leg.transfer_id,
                peer_address=leg.peer_address,
                peer_instance_id=leg.peer_instance_id,
                digest=decode.digest,
                prompt_tokens=decode.prompt_tokens,
                first_block=first,
                block_ids=block_ids[first:blocks],
                deadline=decode.deadline,
            )
        )

    def received(self, req_id: str) -> None:
        """The worker half has reported the load."""
        if (decode := self._decodes.get(req_id)) is not None:
            decode.stage = _Stage.DONE

    def finished(self, req_id: str) -> None:
        """The engine is done with the request (its client may have gone at any stage)."""
        decode = self._decodes.pop(req_id, None)
        if decode is None:
            return
        if decode.stage is _Stage.LOADING:
            self._aborted.append(req_id)
        elif decode.stage is _Stage.QUEUED:
            self._cancel(req_id, decode)

    def plan(self, plan: StepPlan) -> None:
        """Adds what the worker half has to know."""
        plan.loads, self._loads = self._loads, []
        plan.cancels, self._cancels = self._cancels, []
        plan.aborted_loads.extend(self._aborted)
        self._aborted = []

    def _cancel(self, req_id: str, decode: _Decode) -> None:
        leg = decode.leg
        self._cancels.append(StreamCancel(req_id, leg.transfer_id, leg.peer_address, leg.peer_instance_id))
