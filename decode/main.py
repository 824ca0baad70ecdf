"""Start-up of a decoding worker: a worker host whose vLLM continues what others prefilled (paper §3, decoding pool).

Knows: the role's name. Does not know: anything else (mooncake.vllm.host).
"""

from __future__ import annotations

from mooncake.common.config import ClusterConfig
from mooncake.vllm.host import run_worker
from mooncake.vllm.host_config import WorkerConfig


async def run(cluster: ClusterConfig, config: WorkerConfig, *, name: str = "decode-0", port: int | None = None) -> None:
    """Runs until SIGTERM. `config.roles` may add the other role. Raises MooncakeError when it cannot start or fails."""
    await run_worker(cluster, config, "decode", name=name, port=port)
