"""Starts vLLM's API server; on a CPU it forks the engine's processes instead of spawning them.

Nearly all of a CPU engine's start are imports, made one after the other by three processes; forked, they are made once
(docs/decisions/0001: 17 s instead of 43 s). Right only while nothing before the fork has used OpenMP or CUDA, hence: CPU only, and only
with `VLLM_CPU_OMP_THREADS_BIND=nobind`. Does not know: options; it takes vLLM's own command line.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy

IMPORT_BEFORE_FORK = (
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
)
USERS_OF_CONTEXT = (
    "vllm.utils.system_utils",
    "vllm.v1.engine.utils",
    "vllm.v1.engine.coordinator",
    "vllm.v1.executor.multiproc_executor",
)


def prefer_fork() -> None:
    """Imports what the engine's processes need and makes vLLM fork them."""
    context = multiprocessing.get_context("fork")
    for name in USERS_OF_CONTEXT:
        importlib.import_module(name).get_mp_context = lambda: context  # type: ignore[attr-defined]
    for name in IMPORT_BEFORE_FORK:
        importlib.import_module(name)


def main() -> None:
    """Runs `python -m vllm.entrypoints.openai.api_server` with this process' arguments."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind":
        prefer_fork()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__main__":
    main()
