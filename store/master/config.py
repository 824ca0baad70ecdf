"""Options of `mooncake store-master`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from mooncake.common.errors import ConfigError
from store.master.messages import Settings


def _help(text: str, *, ge: float | None = None, le: float | None = None) -> msgspec.Meta:
    return msgspec.Meta(description=text, ge=ge, le=le)


class MasterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds. Raises ConfigError when two of them contradict each other."""

    segment_fresh_s: Annotated[
        float, _help("a node that was not heard for so long is neither read nor written", ge=0.2, le=600)
    ] = 5.0
    segment_timeout_s: Annotated[
        float, _help("a node that was not heard for so long is forgotten with its objects", ge=0.5, le=3600)
    ] = 30.0
    suspect_s: Annotated[float, _help("a node that a client found dead is skipped at least so long", ge=0, le=600)] = (
        2.0
    )
    max_read_lease_s: Annotated[
        float,
        _help("longest read lease; a new master recycles nothing for this time and segment_fresh_s", ge=0.1, le=600),
    ] = 10.0
    max_put_lease_s: Annotated[float, _help("longest time that a put may stay unfinished", ge=0.1, le=3600)] = 60.0
    put_grace_s: Annotated[float, _help("memory of an unfinished put rests so long after its lease", ge=0, le=600)] = (
        5.0
    )
    max_leases: Annotated[int, _help("read leases out at a time", ge=1)] = 65536
    max_puts: Annotated[int, _help("unfinished puts at a time", ge=1)] = 65536
    max_dropped: Annotated[int, _help("evicted objects that a node has yet to hear of", ge=1)] = 1 << 20

    def __post_init__(self) -> None:
        if self.segment_timeout_s < self.segment_fresh_s:
            raise ConfigError("--segment-timeout-s must not be below --segment-fresh-s")

    def settings(self) -> Settings:
        return Settings(**msgspec.structs.asdict(self))
