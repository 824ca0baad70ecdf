"""Tokens of the cluster: one secret, and keys derived from it by purpose, so that no two planes share a key.

Does not know: where the secret comes from (config.py) or which header a surface uses beyond `Authorization: Bearer`.
"""

from __future__ import annotations

import hashlib
import hmac


def derive_key(cluster_token: str, purpose: str) -> str:
    """HMAC-SHA256 of `purpose` under the cluster token, as 64 hex digits; "" for an empty token (security is off)."""
    if not cluster_token:
        return ""
    return hmac.new(cluster_token.encode(), b"mooncake:" + purpose.encode(), hashlib.sha256).hexdigest()


def bearer(token: str) -> dict[str, str]:
    """HTTP headers that carry the token; empty when there is none."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def check_bearer(header: str | None, expected: str) -> bool:
    """True when `header` is `Bearer <expected>`, compared in constant time; always true when `expected` is empty."""
    if not expected:
        return True
    scheme, _, token = (header or "").partition(" ")
    if scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(token.strip().encode(), expected.encode())
