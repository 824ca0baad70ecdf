"""API keys of clients. Knows keys as digests and compares in constant time; does not know HTTP beyond one header."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from mooncake.common.errors import Unauthorized

OPEN_PATHS = frozenset(("/health", "/live", "/ready", "/metrics"))
"""For probes and scrapers, which carry no key; they tell nothing of any request."""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class ApiKeys:
    """No keys: everybody may in."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys if key]

    def check(self, path: str, authorization: str | None) -> None:
        """Raises Unauthorized."""
        if not self._digests or path in OPEN_PATHS:
            return
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not given:
            raise Unauthorized(
                "You didn't provide an API key: send it as `Authorization: Bearer <key>`.", error_code="missing_api_key"
            )
        known = False
        for digest in self._digests:
            known |= hmac.compare_digest(digest, _digest(given.strip()))
        if not known:
            raise Unauthorized("Incorrect API key provided.", error_code="invalid_api_key")
