"""What both legs share: how a leg can end badly, and the HTTP client that reaches workers.

Knows: the errors, limits and credentials. Does not know: what either leg sends.
"""

from __future__ import annotations

import aiohttp

from mooncake.common.auth import bearer, derive_key
from mooncake.gateway.directory import Worker

ANSWER_LIMIT_BYTES = 256 << 20
"""A whole answer, or one event of a stream, is never larger (n = 128 with logprobs stays far below)."""
# uvicorn closes idle connections after 5 s by default; a connection reused at that very moment would be a failed leg.
KEEPALIVE_S = 2.0


class LegFailed(Exception):
    """The instance failed the request (died, refused, stalled): another one may serve it."""

    def __init__(self, leg: str, worker: Worker, reason: str, *, counts: bool = True) -> None:
        super().__init__(f"{leg} on {worker.name}: {reason}")
        self.leg = leg
        self.worker = worker
        self.reason = reason
        self.counts = counts
        """Whether it speaks against the instance. A 500 may be the request's own doing: such requests must not open breakers."""


class EngineRejected(Exception):
    """The engine says that the request is wrong (4xx): its answer goes to the client unchanged."""

    def __init__(self, status: int, body: bytes, retry_after: str = "") -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.body = body
        self.retry_after = retry_after


def is_client_error(status: int) -> bool:
    """401, 403 and 404 of a worker are about us and the worker, not about the client's request."""
    return 400 <= status < 500 and status not in (401, 403, 404, 405, 408)


def make_session(connect_timeout_s: float) -> aiohttp.ClientSession:
    """No limit on connections: each request in flight holds up to two. Deadlines are each call's own business."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ttl_dns_cache=30),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
        auto_decompress=False,
        read_bufsize=1 << 18,
        trust_env=False,
    )


def host_headers(cluster_token: str) -> dict[str, str]:
    """For the worker host."""
    return bearer(cluster_token)


def engine_headers(cluster_token: str) -> dict[str, str]:
    """For vLLM itself."""
    return bearer(derive_key(cluster_token, "engine"))


async def read_limited(response: aiohttp.ClientResponse, limit: int = ANSWER_LIMIT_BYTES) -> bytes:
    """The whole body. Raises ValueError when it is larger than `limit`."""
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > limit:
            raise ValueError(f"answer larger than {limit} bytes")
        parts.append(part)
    return b"".join(parts)
