"""Worker sides of the connector on real transfer engines, with numpy arrays as KV and no vLLM."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from decode.arrival_worker import ArrivalWorker
from mooncake.vllm.connector_config import ConnectorConfig
from mooncake.vllm.kv_layout import describe
from mooncake.vllm.reports import Batch
from mooncake.vllm.step_plan import Chunk, StepPlan, StreamLoad, TransferStart
from mooncake.vllm.stream_protocol import Cancel, Failed, Landed, Reserve, decode
from mooncake.vllm.worker_runtime import WorkerRuntime
from prefill.stream_worker import StreamWorker

LAYERS, BLOCKS, BLOCK_SIZE, BLOCK_BYTES = 3, 16, 4, 256


class Tensor:
    """As much of a torch tensor as kv_layout.py looks at."""

    is_cuda = False
    dtype = "uint8"

    def __init__(self, array: Any) -> None:
        self.array = array
        self.shape = array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(s // self.array.itemsize for s in self.array.strides)

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def element_size(self) -> int:
        return int(self.array.itemsize)

    def __getitem__(self, index: int) -> Tensor:
        return Tensor(self.array[index])


class HalfEngine:
    """One worker process, as far as the connector is concerned."""

    def __init__(self, name: str, *, seed: int = 0, fingerprint: str = "f", **config: Any) -> None:
        self.rt = WorkerRuntime(ConnectorConfig(name=name, **config), f"{name}-{id(self)}", lambda _: None)
        random = np.random.default_rng(seed)
        self.kv = [random.integers(0, 256, (BLOCKS, BLOCK_BYTES), dtype=np.uint8) for _ in range(LAYERS)]
        tensors = {f"layer.{i}": Tensor(array) for i, array in enumerate(self.kv)}
        self.rt.layout = describe(tensors, BLOCKS, BLOCK_SIZE)
        self.rt.fingerprint = fingerprint
        for array in self.kv:
            self.rt.engine.register_local_memory(array.ctypes.data, array.nbytes, owner=array)
        self.producer, self.consumer = StreamWorker(self.rt), ArrivalWorker(self.rt)
        self.rt.engine.on_notify(self._on_message)
        self.seen = Batch()

    def _on_message(self, peer_instance_id: str, peer_address: str, payload: bytes) -> None:
        match decode(payload):
            case Reserve() as message:
                self.producer.reserved(message)
            case Cancel() as message:
                self.producer.cancelled(message)
            case Landed() as message:
                self.consumer.landed(message, peer_instance_id)
            case Failed() as message:
                self.consumer.failed(message, peer_instance_id)

    def reports(self) -> Batch:
        """All so far."""
        batch = self.rt.reports.take()
        self.seen.sent |= batch.sent
        self.seen.received |= batch.received
        self.seen.failed |= batch.failed
        self.seen.bad_blocks |= batch.bad_blocks
        return self.seen

    def compute(self, plan: StepPlan) -> None:
        """One engine step."""
        self.producer.begin_step(plan)
        for layer in range(LAYERS):
            self.producer.layer_computed(layer, None)
        self.producer.end_step(lambda: None)

    def load(self, peer: HalfEngine, transfer_id: str, req_id: str, blocks: list[int], **changes: Any) -> None:
        """A decoding leg whose blocks are allocated."""
        fields: dict[str, Any] = {
            "req_id": req_id, "transfer_id": transfer_id, "peer_address": peer.rt.engine.address,
            "peer_instance_id": peer.rt.engine.instance_id, "digest": b"d", "prompt_tokens": 10, "first_block": 0,
            "block_ids": blocks, "deadline": time.monotonic() + 20,
        }  # fmt: skip
        self.consumer.begin_step(StepPlan(loads=[StreamLoad(**(fields | changes))]))

    def close(self) -> None:
        self.producer.close()
        self.consumer.close()
        self.rt.close()


def chunk(transfer_id: str, blocks: list[int], ready: int, *, last: bool, begins: bool, fan_out: int = 1) -> Chunk:
    start = TransferStart(fan_out, b"d", 10, 0, time.monotonic() + 20, time.time(), "") if begins else None
    return Chunk(f"req-{transfer_id}", transfer_id, blocks, False, ready, last, start)


def until(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.005)
