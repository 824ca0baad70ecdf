"""Settings of a gateway. Knows names, defaults and bounds; does not know who uses them."""

from __future__ import annotations

from typing import Annotated

import msgspec


def _help(text: str, *, gt: float | None = None, ge: float | None = None, le: float | None = None) -> msgspec.Meta:
    return msgspec.Meta(description=text, gt=gt, le=le) if ge is None else msgspec.Meta(description=text, ge=ge, le=le)


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Section `[gateway]` of the configuration file."""

    api_keys: Annotated[
        list[str],
        _help(
            "keys that clients may send as `Authorization: Bearer`; none: no authentication. Prefer MOONCAKE_GATEWAY_API_KEYS"
        ),
    ] = []
    max_body_bytes: Annotated[int, _help("largest request body; more is answered 413", ge=1024, le=1 << 30)] = 8 << 20
    max_concurrent_requests: Annotated[
        int, _help("requests in flight at this gateway; more are answered 429", ge=1)
    ] = 4096
    request_deadline_s: Annotated[float, _help("a request, its stream included, ends after so long", gt=0)] = 600.0
    stream_idle_timeout_s: Annotated[
        float, _help("an engine that sends nothing for so long in the middle of a stream has failed", gt=0)
    ] = 60.0
    max_retries: Annotated[
        int, _help("how often a request is placed again after a leg failed before its first byte", ge=0, le=10)
    ] = 2
    place_timeout_s: Annotated[
        float, _help("how long the Conductor may take to place a request before the gateway places it itself", gt=0)
    ] = 1.0
    connect_timeout_s: Annotated[float, _help("how long connecting to a worker may take", gt=0)] = 2.0
    allow_pinning: Annotated[
        bool,
        _help(
            "let requests choose instances with the headers x-mooncake-prefill-instance and x-mooncake-decode-instance"
        ),
    ] = True
    trust_request_chat_template: Annotated[
        bool,
        _help(
            "render chat templates that requests bring along (set it exactly if the workers' vLLM has this option too)"
        ),
    ] = False
    tokenizer_processes: Annotated[int, _help("processes that render and tokenize", ge=1, le=64)] = 2
    tokenizer_queue: Annotated[
        int, _help("requests that may wait for a tokenizer process; more are answered 429", ge=1)
    ] = 1024
    tokenizer_timeout_s: Annotated[
        float, _help("rendering and tokenizing one prompt may take so long; the process is replaced after it", gt=0)
    ] = 20.0
    circuit_failures: Annotated[int, _help("failures in a row after which an instance is avoided", ge=1)] = 3
    circuit_open_s: Annotated[float, _help("how long an instance is avoided before it is tried again", gt=0)] = 10.0
    trace_requests: Annotated[int, _help("how many requests /debug/trace remembers", ge=1, le=1_000_000)] = 4096
    graceful_shutdown_s: Annotated[float, _help("how long requests in flight may take to end after SIGTERM", ge=0)] = (
        30.0
    )
