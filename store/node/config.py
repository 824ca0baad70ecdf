"""Options of `mooncake store-node`."""

from __future__ import annotations

from typing import Annotated

import msgspec


def _help(text: str, *, ge: float | None = None, le: float | None = None) -> msgspec.Meta:
    return msgspec.Meta(description=text, ge=ge, le=le)


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in bytes, times in seconds."""

    segment_bytes: Annotated[int, _help("DRAM that this node gives to the pool", ge=1 << 16)] = 1 << 30
    transfer_port: Annotated[int, _help("port of the transfer engine; 0: a free one", ge=0, le=65535)] = 0
    transports: Annotated[list[str], _help("ways the transfer engine may use, in order of preference")] = msgspec.field(
        default_factory=lambda: ["local", "shm", "rdma", "tcp"]
    )
    transfer_nics: Annotated[list[str], _help("NICs of the transfer engine; empty: all")] = msgspec.field(
        default_factory=list
    )
    transfer_topology: Annotated[
        str, _help("JSON file that overrides which NICs are near which memory (docs/transfer_engine.md); empty: none")
    ] = ""
    transfer_tls_cert: Annotated[
        str,
        _help(
            "PEM certificate (with chain) of the transfer engine: with key and CA, KVCache moves by mutual TLS 1.3; empty: no TLS"
        ),
    ] = ""
    transfer_tls_key: Annotated[str, _help("private key of --transfer-tls-cert, PEM, not encrypted")] = ""
    transfer_tls_ca: Annotated[
        str, _help("PEM certificates of the authorities whose members may connect: the cluster's own, nobody else's")
    ] = ""
    heartbeat_s: Annotated[
        float, _help("time between heartbeats; well below the masters' segment_fresh_s", ge=0.05, le=60)
    ] = 1.0
    master_timeout_s: Annotated[float, _help("longest answer of the master to a heartbeat", ge=0.1, le=60)] = 3.0
    report_part_objects: Annotated[int, _help("objects in one message of a report", ge=1, le=100_000)] = 10_000
    put_grace_s: Annotated[
        float, _help("a silent writer is forgotten so long after its lease; as the masters' put_grace_s", ge=0, le=600)
    ] = 5.0
    max_open_puts: Annotated[int, _help("unfinished writes at a time; more are refused", ge=1)] = 65536
    fence_timeout_s: Annotated[float, _help("longest wait for an older writer to be proven gone", ge=0.05, le=60)] = 1.0
