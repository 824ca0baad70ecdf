"""Block keys: names of KVCache blocks that are equal exactly if everything the KV depends on is equal.

`key_0 = H(root)`, `key_i = sha256(key_{i-1} || tokens_i as little-endian u32)[:16]` (DESIGN.md §4). The root covers model,
KV dtype, layout fingerprint, block size, LoRA and `cache_salt`. There is no seed: the same bytes in every process and language.
Only full blocks have keys, so a prompt of `n` tokens has `n // block_size` of them.
A *store block* of k engine blocks is named by the key of its last engine block (a key names the whole prefix).
Paper: §3.1 (prefix hashing of blocks), Figure 3.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from mooncake.common.ids import BlockKey

KEY_BYTES = 16
TOKEN_BYTES = 4


def root_key(*, model: str, fingerprint: str, block_size: int, lora: str = "", cache_salt: str = "") -> BlockKey:
    """Key before the first block.

    `fingerprint` is the worker's layout fingerprint (`mooncake.vllm.kv_layout`), which already covers KV dtype and model weights.
    Fields are length-prefixed, so that no two roots collide by concatenation.
    """
    digest = hashlib.sha256(b"mooncake-block-key-v1")
    for field in (model, fingerprint, str(block_size), lora, cache_salt):
        raw = field.encode()
        digest.update(struct.pack("<I", len(raw)))
        digest.update(raw)
    return BlockKey(digest.digest()[:KEY_BYTES])


def tokens_to_bytes(token_ids: Any) -> bytes:
    """Token ids (any integer sequence or array) as little-endian u32 bytes.

    Raises OverflowError (numpy) for ids outside of u32.
    """
    import numpy as np

    return np.asarray(token_ids, dtype="<u4").tobytes()


def next_key(parent: bytes, block_tokens: bytes) -> BlockKey:
    """Key of the block that holds `block_tokens` (little-endian u32 bytes) after `parent`."""
    return BlockKey(hashlib.sha256(parent + block_tokens).digest()[:KEY_BYTES])


def iter_keys(root: bytes, token_bytes: bytes | memoryview, block_size: int) -> Iterator[BlockKey]:
    """Keys of the full blocks of a prompt, in order. `token_bytes` as of `tokens_to_bytes`."""
    step = block_size * TOKEN_BYTES
    parent: bytes = root
    for start in range(0, len(token_bytes) - step + 1, step):
        parent = next_key(parent, bytes(token_bytes[start : start + step]))
        yield BlockKey(parent)


def block_keys(root: bytes, token_ids: Any, block_size: int) -> list[BlockKey]:
    """Keys of the full blocks of `token_ids`: `len(token_ids) // block_size` keys of 16 bytes."""
    return list(iter_keys(root, tokens_to_bytes(token_ids), block_size))


def store_keys(keys: Sequence[BlockKey], blocks_per_object: int) -> list[BlockKey]:
    """Keys of the full store blocks of a prompt, given its engine block keys."""
    return list(keys[blocks_per_object - 1 :: blocks_per_object])


def pack_keys(keys: Sequence[bytes]) -> bytes:
    """Keys as one byte string, 16 bytes each: the wire form."""
    return b"".join(keys)


def unpack_keys(raw: bytes) -> list[BlockKey]:
    """Inverse of `pack_keys`. Raises ValueError when the length is not a multiple of 16."""
    if len(raw) % KEY_BYTES:
        raise ValueError(f"packed block keys: {len(raw)} bytes is not a multiple of {KEY_BYTES}")
    return [BlockKey(raw[i : i + KEY_BYTES]) for i in range(0, len(raw), KEY_BYTES)]


def prompt_digest(token_ids: Any) -> bytes:
    """32 bytes that two legs compare before any KV is trusted: sha256 over the token ids as little-endian u32."""
    return hashlib.sha256(tokens_to_bytes(token_ids)).digest()
