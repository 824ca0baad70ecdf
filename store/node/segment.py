"""The memory of one node: a shared buffer of a transfer engine, and the manifest of what lies in it.

Knows: engine and manifest belong to one life of the node. Does not know: gRPC, masters.
"""

from __future__ import annotations

import secrets

from mooncake.common.config import ClusterConfig
from store.node.config import NodeConfig
from store.node.manifest import Manifest, OpenPut
from transfer_engine import EngineConfig, TransferEngine
from transfer_engine.topology import of_engine


class NodeSegment:
    """Allocates the memory (touched pages only) and opens the engine's port. Raises OSError, ConfigError."""

    def __init__(self, cluster: ClusterConfig, config: NodeConfig, name: str) -> None:
        self.name = name
        settings = EngineConfig(
            host=cluster.host,
            port=config.transfer_port,
            name=name,
            cluster_token=cluster.cluster_token.encode(),
            transports=tuple(config.transports),
            nics=tuple(config.transfer_nics),
            topology_file=config.transfer_topology,
            tls_cert=config.transfer_tls_cert,
            tls_key=config.transfer_tls_key,
            tls_ca=config.transfer_tls_ca,
        )
        self.topology = of_engine(settings)
        self.engine = TransferEngine(settings)
        self.buffer = self.engine.allocate_shared(config.segment_bytes, "mooncake-store")
        self.manifest = Manifest(
            self.buffer.address,
            self.buffer.length,
            put_grace_s=config.put_grace_s,
            max_open_puts=config.max_open_puts,
        )
        self._fence_timeout_s = config.fence_timeout_s

    @property
    def instance_id(self) -> str:
        return self.engine.instance_id

    @staticmethod
    def new_mount() -> int:
        """Number of a report: unique, so that nothing that rests on another one is ever taken for it."""
        return secrets.randbits(63) | 1

    def fence(self, put: OpenPut) -> bool:
        """Blocks. True: no byte of that put will be written any more."""
        return self.engine.cancel_incoming(
            put.group, put.writer_address, instance_id=put.writer_instance_id, timeout_s=self._fence_timeout_s
        )

    def close(self) -> None:
        self.engine.close()
