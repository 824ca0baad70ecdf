"""Block keys of one request in the engine, extended as tokens are generated.

Knows: root, block size, store block size. Does not know: what is stored. Requests whose KV depends on more than token ids, LoRA and
salt (images, embeddings) have no keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake.common.block_key import TOKEN_BYTES, next_key, root_key, tokens_to_bytes
from mooncake.common.ids import BlockKey

if TYPE_CHECKING:
    from vllm.v1.request import Request


class KeySpace:
    """What all requests of an engine share. Raises nothing; `block_tokens` is a multiple of `block_size`."""

    def __init__(self, *, model: str, fingerprint: str, block_size: int, block_tokens: int) -> None:
        self.block_size, self.block_tokens = block_size, block_tokens
        self.blocks_per_object = block_tokens // block_size
        self._model, self._fingerprint = model, fingerprint

    def root(self, request: Request) -> BlockKey:
        """Key before the request's first block."""
        return root_key(
            model=self._model,
            fingerprint=self._fingerprint,
            block_size=self.block_size,
            lora=request.lora_request.lora_name if request.lora_request is not None else "",
            cache_salt=request.cache_salt or "",
        )


def has_keys(request: Request) -> bool:
    """The request's KV is named by its tokens alone."""
    return request.prompt_token_ids is not None and request.prompt_embeds is None and not request.mm_features


class RequestKeys:
    """Store keys of a request: `upto(n)` are those of the full store blocks within its first `n` tokens."""

    def __init__(self, space: KeySpace, request: Request) -> None:
        self._space, self._request = space, request
        self._last: bytes = space.root(request)
        self._tokens = 0
        self._keys: list[BlockKey] = []

    def upto(self, tokens: int) -> list[BlockKey]:
        """Keys of store blocks 0 .. tokens // block_tokens - 1. `tokens` must be known already."""
        wanted = tokens // self._space.block_tokens
        while len(self._keys) < wanted:
            self._keys.append(self._next())
        return self._keys[:wanted]

    def _next(self) -> BlockKey:
        end = self._tokens + self._space.block_tokens
        raw = tokens_to_bytes(self._request.all_token_ids[self._tokens : end])
        step = self._space.block_size * TOKEN_BYTES
        for start in range(0, len(raw), step):
            self._last = next_key(self._last, raw[start : start + step])
        self._tokens = end
        return BlockKey(self._last)
