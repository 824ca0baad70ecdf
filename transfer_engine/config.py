"""Every number and switch of an engine, with its bound.

Knows: defaults, limits and how to reject nonsense. Does not know: what the parts do with them.
"""

from __future__ import annotations

import os

import msgspec

from mooncake.common.errors import ConfigError

MAX_IOV = 1024
"""Linux' UIO_MAXIOV: pieces per system call, hence per slice."""

MAX_NOTIFY_BYTES = 64 * 1024


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Immutable settings of one `TransferEngine`. Times in seconds, sizes in bytes. Raises ConfigError."""

    host: str = "127.0.0.1"
    """Address to bind; IPv6 without brackets."""
    port: int = 0
    """0: the kernel picks one; `TransferEngine.address` tells."""
    advertise_host: str = ""
    """Host part of `address` when it is not the bound one (needed behind a wildcard bind)."""
    name: str = ""
    """Label for logs and thread names; no meaning."""
    cluster_token: bytes = b""
    """Shared secret of the handshake. Both sides must hold the same one."""
    tls_cert: str = ""
    """File with this engine's certificate (PEM, chain included), for server and client use. With it, `tls_key` and `tls_ca`,
    every connection is mutual TLS 1.3, and peers without are refused. Empty: no TLS. shm and rdma payload is never encrypted."""
    tls_key: str = ""
    """File with its private key (PEM, not encrypted)."""
    tls_ca: str = ""
    """File with the certificates (PEM) of the authorities whose members may connect: the cluster's own, nobody else's."""
    transports: tuple[str, ...] = ("local", "shm", "rdma", "tcp")
    """Allowed ways, in order of preference; a single one forces it. Also limits what peers may use towards us. One that this
    machine cannot offer (rdma without a NIC) is left out, unless it is the only one."""
    nics: tuple[str, ...] = ()
    """NICs that this engine may use (device names); empty: all. Disjoint sets keep two engines' traffic apart."""
    topology_file: str = ""
    """JSON file that overrides what sysfs says of near and far NICs (docs/transfer_engine.md, Topology); empty: none."""
    shm_mapping: bool = True
    """shm may map a peer's shared buffers; off: cross-memory attach only (tests, debugging)."""
    allow_ptracer: bool = False
    """Let every process of this user attach to us where Yama's ptrace_scope is 1 (PR_SET_PTRACER_ANY), so that
    cross-memory attach works there."""

    streams_per_peer: int = msgspec.field(default_factory=lambda: max(1, min(4, len(os.sched_getaffinity(0)) // 2)))
    """Parallel TCP data connections (and threads) per peer; default: one for two cores, 1 to 4. A stream keeps a core busy at
    either end: on two cores, two of them only take turns."""
    copy_threads: int = 2
    """Threads that run local and shm copies."""
    slice_bytes: int = 8 << 20
    """Largest slice: the unit of scheduling, of a TCP frame, and of cancelling."""
    slice_min_bytes: int = 1 << 20
    """A job is not cut into slices smaller than this."""
    staging_buffers: int = 8
    """Pinned host buffers of `slice_bytes` in each direction, for GPU memory that no NIC reaches; none is made without such memory."""
    cuda_driver: str = "libcuda.so.1"
    """Library with the CUDA driver API: a name that the loader finds, or a path. Loaded only when GPU memory is registered."""
    socket_buffer_bytes: int = 0
    """SO_SNDBUF and SO_RCVBUF of data connections; 0: 1 MiB to a peer on this host (fits the processor's cache), 4 MiB to others."""

    max_peers: int = 256
    """Open outgoing sessions."""
    max_connections: int = 1024
    """Accepted connections."""
    max_batches: int = 4096
    max_batch_requests: int = 1 << 20
    max_regions: int = 65536
    max_fences: int = 65536
    notify_queue: int = 4096
    """Undelivered notifications; a full queue refuses the sender's notification."""

    connect_timeout_s: float = 2.0
    """One dial with its handshake."""
    idle_timeout_s: float = 60.0
    """A data connection without work is closed after this; the next transfer dials again."""
    stall_timeout_s: float = 2.0
    """A peer that moves no byte for this long while we wait for it is down, whatever the batch's deadline."""
    peer_rest_s: float = 0.5
    """A down peer is not dialled again for this long; transfers to it fail at once."""
    max_deadline_s: float = 600.0
    """Upper bound of any `deadline_s`."""
    fence_ttl_s: float = 900.0
    """How long a cancelled group is remembered; above `max_deadline_s`, so nothing submitted before can outlive it."""
    close_timeout_s: float = 2.5
    max_retries: int = 2
    """Resubmissions of one slice after a lost connection."""

    rdma_slice_bytes: int = 1 << 20
    """Largest slice of the rdma transport: what one completion stands for, and what a failed path costs."""
    rdma_slice_min_bytes: int = 16 << 10
    """A job is not cut into smaller slices to use more NICs."""
    rdma_window_bytes: int = 4 << 20
    """Bytes posted per queue pair; what is more waits where an urgent job can overtake it."""
    rdma_queue_depth: int = 256
    """Work requests per queue pair."""
    rdma_completions: int = 8192
    """Work requests posted per NIC, hence entries of its completion queue."""
    rdma_max_endpoints: int = 256
    """Queue pairs opened to peers (idle ones make room, by SIEVE); four times as many are accepted from them."""
    rdma_retry_count: int = 3
    """Resends by the NIC after a lost packet; not 7, which some kernels take for "for ever"."""
    rdma_timeout: int = 14
    """How long the NIC waits for an acknowledgement: 4.096 us * 2 to this power, so 67 ms."""
    rdma_stall_timeout_s: float = 3.0
    """A queue pair on which nothing completes for so long is given up, whatever its NIC says."""
    rdma_rest_s: float = 0.5
    """First rest of a path between two NICs that failed; doubles with each failure in a row."""
    rdma_rest_max_s: float = 30.0
    """Longest rest of a path."""
    rdma_traffic_class: int = 0
    """Traffic class (DSCP in the upper six bits) of RoCE packets, for networks that keep RDMA in a queue of its own."""

    def __post_init__(self) -> None:
        known = {
            "port": (0, 65535),
            "streams_per_peer": (1, 64),
            "copy_threads": (1, 64),
            "slice_bytes": (4096, 1 << 30),
            "staging_buffers": (1, 1024),
            "rdma_slice_bytes": (4096, 1 << 30),
            "rdma_slice_min_bytes": (4096, 1 << 30),
            "rdma_window_bytes": (4096, 1 << 32),
            "rdma_queue_depth": (64, 16384),
            "rdma_completions": (256, 1 << 20),
            "rdma_max_endpoints": (1, 65536),
            "rdma_retry_count": (1, 6),
            "rdma_timeout": (8, 20),
            "rdma_stall_timeout_s": (0.1, 60.0),
            "rdma_rest_s": (0.01, 60.0),
            "rdma_rest_max_s": (0.01, 3600.0),
            "rdma_traffic_class": (0, 255),
        }
        for field, (low, high) in known.items():
            if not low <= getattr(self, field) <= high:
                raise ConfigError(f"transfer engine: {field} must be {low} to {high}, not {getattr(self, field)}")
        for field in (
            "slice_min_bytes",
            "max_peers",
            "max_connections",
            "max_batches",
            "max_batch_requests",
            "max_regions",
            "max_fences",
            "notify_queue",
            "connect_timeout_s",
            "idle_timeout_s",
            "stall_timeout_s",
            "max_deadline_s",
            "close_timeout_s",
        ):
            if getattr(self, field) <= 0:
                raise ConfigError(f"transfer engine: {field} must be positive, not {getattr(self, field)}")
        if self.fence_ttl_s < self.max_deadline_s:
            raise ConfigError("transfer engine: fence_ttl_s must not be below max_deadline_s")
        if len({bool(self.tls_cert), bool(self.tls_key), bool(self.tls_ca)}) > 1:
            raise ConfigError("transfer engine: tls_cert, tls_key and tls_ca go together: set all three or none")
        if not self.transports:
            raise ConfigError("transfer engine: transports must name at least one of local, shm, rdma, tcp")
