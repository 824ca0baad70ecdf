"""Start-up of a prefill worker: a worker host whose vLLM computes prompts (paper §3, prefill pool).

Knows: the role's name. Does not know: anything else (mooncake.vllm.host).
"""

from __future__ import annotations

from mooncake.common.config import ClusterConfig
from mooncake.vllm.host import run_worker
from mooncake.vllm.host_config import WorkerConfig


async def run(
    cluster: ClusterConfig, config: WorkerConfig, *, name: str = "prefill-0", port: int | None = None
) -> None:
    """Runs until SIGTERM. `config.roles` may add the other role. Raises MooncakeError when it cannot start or fails."""
    await run_worker(cluster, config, "prefill", name=name, port=port)
