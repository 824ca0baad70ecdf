"""Drop-in for the open-source `mooncake.engine`: an engine written for that one runs on this one unchanged (docs/drop_in.md).

from mooncake.engine import TransferEngine

engine = TransferEngine()
engine.initialize("10.0.0.7", "P2PHANDSHAKE", "tcp", "")        # 0, peers name us "10.0.0.7:<get_rpc_port()>"
engine.register_memory(address, length)                         # 0
engine.batch_transfer_sync_write("10.0.0.8:41234", [address], [peer_address], [length])   # 0
"""

from mooncake.drop_in.engine import TransferEngine
from mooncake.drop_in.running import TransferNotify
from mooncake.drop_in.transfer_calls import TransferOpcode

SUPPORT_CUDA = False
SUPPORT_EFA = False
SUPPORT_HIP = False
SUPPORT_INTRA_NVLINK = False
SUPPORT_MNNVL = False
SUPPORT_MUSA = False
"""Builds of the open-source engine; callers use them to choose methods that only those have."""

Read, Write = TransferOpcode.Read, TransferOpcode.Write

__all__ = [
    "SUPPORT_CUDA",
    "SUPPORT_EFA",
    "SUPPORT_HIP",
    "SUPPORT_INTRA_NVLINK",
    "SUPPORT_MNNVL",
    "SUPPORT_MUSA",
    "Read",
    "TransferEngine",
    "TransferNotify",
    "TransferOpcode",
    "Write",
]
