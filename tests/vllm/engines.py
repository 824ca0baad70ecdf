"""Real vLLM servers with a connector and nothing else of the platform, for tests of the connector itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import httpx

from mooncake.common.net import free_port
from mooncake.models import resolve_model

KV_BYTES = 64 << 20


class Engine:
    """One server. `connector`: options of our connector; `transfer`: a whole `--kv-transfer-config` of another one; neither: a
    plain vLLM. `environ` is added to the environment; `entry` is what Python runs."""

    def __init__(
        self, directory: Path, name: str, *, connector: dict[str, Any] | None, arguments: tuple[str, ...] = (),
        kv_bytes: int = KV_BYTES, port: int = 0, transfer: dict[str, Any] | None = None,
        environ: dict[str, str] | None = None, entry: tuple[str, ...] = ("-m", "mooncake.vllm.engine_main"),
    ) -> None:  # fmt: skip
        self.name, self.port = name, port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = directory / f"{name}.log"
        self.connector = connector
        self._transfer, self._environ, self._entry = transfer, environ or {}, entry
        self._argv = self._command(arguments, kv_bytes)
        self.process: subprocess.Popen[bytes] | None = None

    def _command(self, arguments: tuple[str, ...], kv_bytes: int) -> list[str]:
        argv = [
            sys.executable, *self._entry, "--model", str(resolve_model("tiny")),
            "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32",
            "--enforce-eager", "--block-size", "32", "--kv-cache-memory-bytes", str(kv_bytes), "--max-model-len", "8192",
            "--disable-hybrid-kv-cache-manager", "--enable-prompt-tokens-details", *arguments,
        ]  # fmt: skip
        if self.connector is not None:
            transfer = {
                "kv_connector": "MooncakeConnector", "kv_connector_module_path": "mooncake.connector",
                "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"name": self.name, "served_model": "tiny", **self.connector},
            }  # fmt: skip
            argv += ["--kv-transfer-config", json.dumps(transfer)]
        elif self._transfer is not None:
            argv += ["--kv-transfer-config", json.dumps(self._transfer)]
        return argv

    def start(self) -> None:
        env = os.environ | {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_HOST_IP": "127.0.0.1",
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(Path(__file__).parents[2]),
        } | self._environ  # fmt: skip
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(self._argv, env=env, stdout=out, stderr=out, start_new_session=True)

    def wait_healthy(self, timeout_s: float = 600.0) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process is not None
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} ended:\n{self.log.read_text()[-4000:]}")
            try:
                if httpx.get(self.url + "/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.5)
        raise TimeoutError(f"{self.name} is not healthy:\n{self.log.read_text()[-4000:]}")

    def kill(self) -> None:
        """kill -9 of the whole server: its processes are a session of their own."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.kill()

    # --- asking ---

    def metrics(self) -> dict[str, float]:
        """Samples by name and labels, without the labels that are always the same."""
        found: dict[str, float] = {}
        for line in httpx.get(self.url + "/metrics", timeout=30).text.splitlines():
            if line and not line.startswith("#"):
                sample, _, value = line.rpartition(" ")
                found[sample.replace('engine="0",', "").replace('model_name="tiny"', "").replace(",}", "}")] = float(
                    value
                )
        return found

    def tokens_by_source(self, source: str) -> float:
        return self.metrics().get(f'vllm:prompt_tokens_by_source_total{{source="{source}"}}', 0.0) or next(
            (v for k, v in self.metrics().items() if k.startswith("vllm:prompt_tokens_by_source_total") and f'"{source}"' in k), 0.0
        )  # fmt: skip

    def kv_usage(self) -> float:
        return next(v for k, v in self.metrics().items() if k.startswith("vllm:kv_cache_usage_perc"))

    def cpu_seconds(self) -> float:
        """CPU time of all processes of the server so far."""
        assert self.process is not None
        total = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == self.process.pid:  # session
                total += int(fields[11]) + int(fields[12])
        return total / os.sysconf("SC_CLK_TCK")


async def complete(
    client: httpx.AsyncClient, engine: Engine, prompt: list[int], max_tokens: int, **extra: Any
) -> dict[str, Any]:
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **extra,
    }  # fmt: skip
    if body.get("n", 1) > 1:  # vLLM refuses n > 1 at temperature 0
        body |= {"temperature": 1.0, "top_k": 1}
    answer = await client.post(engine.url + "/v1/completions", json=body)
    answer.raise_for_status()
    return answer.json()


def tokens(answer: dict[str, Any]) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


def leg(kind: str, transfer_id: str, **fields: Any) -> dict[str, Any]:
    """`kv_transfer_params` of one leg."""
    return {"kv_transfer_params": {"mooncake": {"leg": kind, "transfer_id": transfer_id, "deadline_s": 60.0, **fields}}}


def new_transfer() -> str:
    return f"xfer-{uuid.uuid4().hex}"


async def pair(
    client: httpx.AsyncClient, prefill: Engine, decode: Engine, peer: dict[str, Any], prompt: list[int],
    max_tokens: int, *, decode_first: bool = True, n: int = 1,
) -> tuple[dict[str, Any], dict[str, Any]]:  # fmt: skip
    """Both legs, as the gateway sends them; `peer` is the prefill worker's transfer engine."""
    transfer_id = new_transfer()
    decoding = leg("decode", transfer_id, fan_out=n, **peer)
    if decode_first:
        second = asyncio.create_task(complete(client, decode, prompt, max_tokens, n=n, **decoding))
        first = await complete(client, prefill, prompt, 1, **leg("prefill", transfer_id, fan_out=n))
        return first, await second
    first = await complete(client, prefill, prompt, 1, **leg("prefill", transfer_id, fan_out=n))
    return first, await complete(client, decode, prompt, max_tokens, n=n, **decoding)
