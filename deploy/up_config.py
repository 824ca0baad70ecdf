"""Options of `mooncake up`. Knows names, defaults and help; not what they become (plan.py)."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec


def _help(text: str, **bounds: Any) -> msgspec.Meta:
    return msgspec.Meta(description=text, **bounds)


class UpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Section `[up]` of the configuration file."""

    model: Annotated[str, _help("tiny, gemma, or a Hugging Face model directory")] = "tiny"
    served_model_name: Annotated[str, _help("what clients call the model; empty: as --model")] = ""
    prefill: Annotated[int, _help("prefill instances", ge=1, le=64)] = 1
    decode: Annotated[int, _help("decoding instances", ge=1, le=64)] = 1
    store_nodes: Annotated[int, _help("store nodes; 0: no KVCache pool", ge=0, le=64)] = 1
    store_bytes: Annotated[int, _help("DRAM of each store node", ge=1 << 20)] = 256 << 20
    port: Annotated[int, _help("the endpoint's port; 0: a free one", ge=0, le=65535)] = 0
    host: Annotated[str, _help("address that the gateway binds; all else stays on loopback")] = "127.0.0.1"
    transports: Annotated[
        list[str], _help("ways KVCache may move, in order of preference; empty: the roles' default")
    ] = msgspec.field(default_factory=list)
    dtype: Annotated[str, _help("data type of the weights and the KVCache, as vLLM's --dtype; empty: the model's")] = ""
    kv_cache_bytes: Annotated[int, _help("KVCache of each worker; 0: 256MiB on a CPU, vLLM's own on a GPU", ge=0)] = 0
    max_model_len: Annotated[int, _help("longest prompt and answer together; 0: the model's", ge=0)] = 0
    block_size: Annotated[int, _help("tokens of an engine block; 0: the worker's default", ge=0)] = 0
    tool_call_parser: Annotated[str, _help("vLLM's --tool-call-parser; empty: no tool calls")] = "hermes"
    enforce_eager: Annotated[
        bool | None, _help("no torch.compile: quick to start, slower to run; unset: on a CPU only")
    ] = None
    run_dir: Annotated[str, _help("where logs and state go; empty: .run here, or a temporary folder")] = ""
    start_timeout_s: Annotated[float, _help("a role must be ready within", gt=0)] = 600.0
    log_level: Annotated[str, _help("log level of the roles")] = "info"
