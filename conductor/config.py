"""Settings of the Conductor: section `[conductor]` of the file, variables `MOONCAKE_CONDUCTOR_*`, or options."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class ConductorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Policy, bounds, and where the store is. Times in seconds."""

    ttft_slo_s: Annotated[
        float, Meta(description="reject (429) when the estimated time to first token exceeds this; 0: never", ge=0)
    ] = 60.0
    tbt_slo_s: Annotated[
        float, Meta(description="reject (429) when the estimated time between tokens exceeds this; 0: never", ge=0)
    ] = 1.0
    reject_infeasible: Annotated[
        bool,
        Meta(
            description="also reject what misses a default SLO on an idle instance; "
            "off: it is served while nothing else waits there, because coming back later would not help"
        ),
    ] = False
    kvcache_balancing_threshold: Annotated[
        float,
        Meta(description="load a prefix from the pool when the best match is this many times an instance's own", ge=1),
    ] = 1.3
    skip_prefill_tokens: Annotated[
        int,
        Meta(description="a mixed decoding instance serves alone when it has to compute at most so many tokens", ge=0),
    ] = 64
    expected_output_tokens: Annotated[float, Meta(description="mean length of an answer until it is learned", gt=0)] = (
        256.0
    )
    estimate_coverage: Annotated[
        float, Meta(description="share of first tokens that must fall within their estimate's error bar", gt=0, lt=1)
    ] = 0.95

    charge_ttl_s: Annotated[
        float, Meta(description="a placed request of which nothing is heard any more is forgotten after this", gt=0)
    ] = 900.0
    suspect_grace_s: Annotated[
        float, Meta(description="a worker whose stream broke counts as gone after this", gt=0)
    ] = 15.0
    report_stale_s: Annotated[
        float, Meta(description="a worker whose open stream says nothing for so long is used last", gt=0)
    ] = 10.0
    speculative_ttl_s: Annotated[
        float, Meta(description="how long after its prefill a prompt is believed to be cached without an event", ge=0)
    ] = 2.0

    max_in_flight: Annotated[int, Meta(description="placed and unfinished requests, all models together", ge=1)] = (
        100_000
    )
    max_instances: Annotated[int, Meta(description="workers that are tracked", ge=1)] = 1024
    max_models: Annotated[int, Meta(description="served model names that are tracked", ge=1)] = 64
    max_keys_per_instance: Annotated[int, Meta(description="block keys kept of one worker", ge=1)] = 1_000_000
    max_retry_after_s: Annotated[float, Meta(description="largest Retry-After that is told to a client", gt=0)] = 60.0

    store_masters: Annotated[
        list[str], Meta(description="store masters, host:port; empty: the leader that etcd names")
    ] = msgspec.field(default_factory=list)
    store_block_tokens: Annotated[int, Meta(description="tokens in one object of the store", ge=1)] = 256
    pool_lookup_deadline_s: Annotated[
        float, Meta(description="a placement waits at most so long for the store", gt=0, le=1)
    ] = 0.02
    pool_breaker_failures: Annotated[
        int, Meta(description="after so many failed look-ups in a row the store is not asked for a while", ge=1)
    ] = 5
    pool_breaker_open_s: Annotated[float, Meta(description="... and for so long", gt=0)] = 2.0
