"""Two vLLM servers with vLLM's own MooncakeConnector, and a request through both."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import httpx

from mooncake.common.net import free_port
from tests.vllm.engines import Engine, complete


class InTreePair:
    """A producer and a consumer; what `mooncake.engine` is, `environ` decides by PYTHONPATH."""

    def __init__(self, directory: Path, name: str = "in-tree", **options: Any) -> None:
        self.bootstrap = f"http://127.0.0.1:{(port := free_port())}"
        self.times = directory / f"{name}-transfers.jsonl"
        environ = options.pop("environ", {}) | {
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port), "MOONCAKE_TRANSFER_TIMES": str(self.times),
        }  # fmt: skip
        self.prefill, self.decode = (
            Engine(
                directory, f"{name}-{role}", connector=None, environ=environ, **options,
                transfer={
                    "kv_connector": "InTreeConnector", "kv_connector_module_path": "benchmarks.in_tree_connectors",
                    "kv_role": f"kv_{role}", "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
                },
            )
            for role in ("producer", "consumer")
        )  # fmt: skip

    def start(self) -> None:
        self.prefill.start()
        self.decode.start()

    def wait_healthy(self) -> None:
        self.prefill.wait_healthy()
        self.decode.wait_healthy()

    def stop(self) -> None:
        self.decode.stop()
        self.prefill.stop()

    def engine_id(self) -> str:
        """Of the producer, from its bootstrap server."""
        return str(httpx.get(self.bootstrap + "/query", timeout=10).json()["0"]["engine_id"])

    def legs(self, engine_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """`kv_transfer_params` of the two requests."""
        transfer_id = f"xfer-{uuid.uuid4().hex}"
        produce = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        consume = {
            "do_remote_decode": False, "do_remote_prefill": True, "transfer_id": transfer_id,
            "remote_bootstrap_addr": self.bootstrap, "remote_engine_id": engine_id,
        }  # fmt: skip
        return {"kv_transfer_params": produce}, {"kv_transfer_params": consume}

    async def complete(
        self, client: httpx.AsyncClient, engine_id: str, prompt: list[int], max_tokens: int
    ) -> dict[str, Any]:
        """Both requests at once; the decoding one's answer."""
        produce, consume = self.legs(engine_id)
        first = asyncio.create_task(complete(client, self.prefill, prompt, 1, **produce))
        second = await complete(client, self.decode, prompt, max_tokens, **consume)
        await first
        return second
