"""The `mooncake` object of `kv_transfer_params` (docs/protocol.md §3): what a request is to this engine.

Knows: its fields and how a bad one is treated. Does not know: what the legs do.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

import msgspec

from mooncake.common.block_key import prompt_digest

MAX_FAN_OUT = 128


class Leg(msgspec.Struct, frozen=True):
    """One leg of a request. `deadline_s` counts from the moment the engine got the request."""

    leg: Literal["prefill", "decode"]
    transfer_id: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    request_id: Annotated[str, msgspec.Meta(max_length=256)] = ""
    fan_out: Annotated[int, msgspec.Meta(ge=1, le=MAX_FAN_OUT)] = 1
    deadline_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """0: the connector's default."""
    peer_address: Annotated[str, msgspec.Meta(max_length=512)] = ""
    peer_instance_id: Annotated[str, msgspec.Meta(max_length=128)] = ""
    digest: Annotated[str, msgspec.Meta(max_length=128)] = ""
    prompt_tokens: int = 0
    pool_prefix_tokens: int = 0


def parse_leg(params: dict[str, Any] | None) -> Leg | None:
    """None when the request is no leg. Raises msgspec.ValidationError for a malformed one."""
    raw = (params or {}).get("mooncake")
    return None if raw is None else msgspec.convert(raw, Leg, strict=False)


def leg_digest(request: Any) -> bytes:
    """32 bytes that both legs of a request have in common exactly if their prompts mean the same: `prompt_digest` of the token ids,
    mixed with what else the KV depends on when there is any (LoRA, images)."""
    digest = prompt_digest(request.prompt_token_ids)
    extras = [str(feature.identifier) for feature in request.mm_features]
    if request.lora_request is not None:
        extras.append(f"lora:{request.lora_request.lora_name}")
    return hashlib.sha256("\0".join([digest.hex(), *extras]).encode()).digest() if extras else digest
