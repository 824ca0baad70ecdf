"""Options of `mooncake bench transfer`, and what they may not be.

Knows: names, bounds, texts. Does not know: what is done with them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from mooncake.common.errors import ConfigError
from transfer_engine.config import EngineConfig
from transfer_engine.segment import parse_address


def _help(text: str, *, ge: float | None = None, le: float | None = None) -> msgspec.Meta:
    return msgspec.Meta(description=text, ge=ge, le=le)


class BenchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the command. Sizes in bytes, times in seconds."""

    role: Annotated[
        Literal["both", "target", "initiator"], _help("what this process is; both: it starts a target of its own")
    ] = "both"
    target: Annotated[str, _help("host:port of the target, for the initiator")] = ""
    op: Annotated[Literal["write", "read", "both"], _help("direction, seen from the initiator")] = "both"
    block_bytes: Annotated[int, _help("size of one block", ge=1, le=1 << 40)] = 128 << 10
    batch: Annotated[int, _help("blocks of one operation, which is one submission", ge=1, le=1 << 20)] = 64
    threads: Annotated[int, _help("threads that submit, each to a range of its own", ge=1, le=1024)] = 1
    ops: Annotated[int, _help("operations in all, per direction; 0: as many as --seconds allows", ge=0)] = 0
    seconds: Annotated[float, _help("time per direction", ge=0.01, le=86400)] = 5.0
    deadline_s: Annotated[float, _help("longest time of one operation", ge=0.001, le=600)] = 60.0
    check: Annotated[bool, _help("prove the content of every operation against a seeded pattern; not timed")] = False
    seed: Annotated[int, _help("of the patterns and of the order of blocks", ge=0)] = 0
    transports: Annotated[list[str], _help("ways that may be used, in order of preference; one forces it")] = (
        msgspec.field(default_factory=lambda: list(EngineConfig().transports))
    )
    nics: Annotated[list[str], _help("NICs that this side may use; empty: all")] = msgspec.field(default_factory=list)
    token_file: Annotated[
        str, _help("file with the cluster token, the same on both sides; else MOONCAKE_CLUSTER_TOKEN, else none")
    ] = ""
    host: Annotated[str, _help("address to bind and to be reached at")] = "127.0.0.1"
    port: Annotated[int, _help("port of the target; 0: a free one", ge=0, le=65535)] = 0
    buffer_bytes: Annotated[
        int, _help("memory that the target offers; 0: 1 GiB, with --role both what is needed", ge=0)
    ] = 0

    def __post_init__(self) -> None:
        if self.role == "initiator" and not self.target:
            raise ConfigError("--role initiator needs --target host:port, which the target prints")
        if self.role != "initiator" and self.target:
            raise ConfigError(f"--target is for --role initiator; this is --role {self.role}")
        if self.target:
            try:
                parse_address(self.target)
            except ValueError as error:
                raise ConfigError(f"--target: {error}") from error
