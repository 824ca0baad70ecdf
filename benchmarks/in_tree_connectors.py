"""vLLM's own Mooncake connectors, made to run on a CPU: name this module as `kv_connector_module_path`.

They refuse a CPU only by three calls that mean nothing there. Imports nothing of ours: it also runs beside the open-source
wheel, whose package has our package's name. With MOONCAKE_TRANSFER_TIMES=FILE every push of the producer is noted there, one
JSON line each: seconds, bytes, pieces. Used by benchmarks/connector.py and tests/drop_in.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import connector as store_connector
from vllm.platforms import current_platform


class _NoEvent:
    """A CPU has no stream to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    wait = synchronize = record

    def query(self) -> bool:
        return True


if current_platform.is_cpu():
    torch.accelerator.current_device_index = lambda: 0
    type(current_platform).set_device = classmethod(lambda cls, device: None)
    torch.cuda.Event = _NoEvent


class InTreeConnector(mooncake_connector.MooncakeConnector):
    """Prefill pushes to decoding."""


class InTreeStoreConnector(store_connector.MooncakeStoreConnector):
    """Every server puts its blocks into the store and gets what others put there."""


def _note_transfers(path: str) -> None:
    worker = mooncake_connector.MooncakeConnectorWorker
    send = worker._send_blocks

    def timed(self: Any, session: str, sources: list[int], targets: list[int], lengths: list[int]) -> int:
        began = time.perf_counter()
        result: int = send(self, session, sources, targets, lengths)
        seconds = time.perf_counter() - began
        line = json.dumps({"seconds": seconds, "bytes": sum(lengths), "pieces": len(lengths), "result": result})
        with open(path, "a") as file:
            file.write(line + "\n")
        return result

    worker._send_blocks = timed


if path := os.environ.get("MOONCAKE_TRANSFER_TIMES"):
    _note_transfers(path)
