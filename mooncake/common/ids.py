"""Identifiers that cross module boundaries, as distinct types, and how new ones are made."""

from __future__ import annotations

import uuid
from typing import NewType

RequestId = NewType("RequestId", str)
"""Minted by the gateway, one a client request; a client's own X-Request-Id is only echoed."""

TransferId = NewType("TransferId", str)
"""Minted by the gateway, one a try: binds a prefill leg and a decoding leg (`kv_transfer_params.transfer_id`)."""

InstanceName = NewType("InstanceName", str)
"""Stable name of a role's process, e.g. `prefill-0`; a restart keeps it."""

InstanceId = NewType("InstanceId", str)
"""Life of one process: a restart under the same name has a new one (the paper's engines call it an epoch)."""

BlockKey = NewType("BlockKey", bytes)
"""16 bytes; names a block and its whole prefix (see block_key.py)."""


def new_id(prefix: str) -> str:
    """`prefix-` and 32 hex digits of a random UUID."""
    return f"{prefix}-{uuid.uuid4().hex}"
