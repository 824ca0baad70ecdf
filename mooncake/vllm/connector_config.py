"""`kv_connector_extra_config` of MooncakeConnector, as one validated struct (docs/protocol.md §7).

Knows: field names and bounds. Does not know: who uses them.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from mooncake.common.errors import ConfigError

MAX_SAVE_S = 30.0
Positive = Annotated[float, msgspec.Meta(gt=0)]


class StoreConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How this engine uses the store pool. Times in seconds."""

    masters: list[str] = []
    """Empty: those that the worker host tells (StoreMasters on the host link)."""
    local_segment: str = ""
    block_tokens: Annotated[int, msgspec.Meta(ge=1)] = 256
    lookup_deadline_s: Positive = 0.25
    load_deadline_s: Positive = 5.0
    save_deadline_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_SAVE_S)] = 5.0
    """Of one batch; also what a preemption may have to wait for."""
    min_load_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """No look-up when at most so many tokens could be gained; 0: one store block."""
    max_pending_saves: Annotated[int, msgspec.Meta(ge=1)] = 1024
    """Store blocks that wait to be saved; more are dropped."""


class ConnectorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that the two halves of one engine are told."""

    host_link: str = ""
    name: str = "worker"
    instance_id: str = ""
    transfer: dict[str, Any] = {}
    store: StoreConfig | None = None
    store_nics: list[str] = []
    """NICs of store traffic, which then has a transfer engine of its own; empty: it shares the streams' engine."""
    fingerprint_salt: str = ""
    served_model: str = ""
    roles: list[str] = []
    cluster_token: str = ""
    reserve_every_s: Positive = 1.0
    """A waiting consumer repeats its Reserve so often; that is also how it notices a dead producer."""
    load_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.8
    """Share of a request's deadline that a load may take; the rest is for recomputing."""
    default_deadline_s: Positive = 120.0
    """For legs that bring no deadline."""


def parse(raw: dict[str, Any]) -> ConnectorConfig:
    """Raises ConfigError naming the wrong key."""
    try:
        return msgspec.convert(raw, ConnectorConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"kv_connector_extra_config: {error}") from error
