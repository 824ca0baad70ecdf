"""KV events: from what vLLM says it stored and removed to the block keys that this worker holds.

vLLM's block hashes stay opaque (DESIGN.md §4 "Block key"): each is mapped to our chained key, made from the event's
token ids and its parent's key. Pure: no I/O, no clock. Source of the shapes: vllm/distributed/kv_events.py (0.32: a
batch is an array, events are maps; older ones send positional arrays), vllm/v1/core/block_pool.py (`extra_keys`).
Knows: one worker's blocks. Does not know: sockets (kv_event_socket.py), the Conductor. Paper: §3.1, §6.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from mooncake.common.block_key import TOKEN_BYTES, next_key, root_key, tokens_to_bytes
from mooncake.common.ids import BlockKey

EngineHash: TypeAlias = int | bytes
STEP_BLOCKS = 256
_WHOLE_PREFIX_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
_STORED_FIELDS = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"),
    *("group_idx", "kv_cache_spec_kind"),
)
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")
_FIELDS = {"BlockStored": _STORED_FIELDS, "BlockRemoved": _REMOVED_FIELDS, "AllBlocksCleared": ()}
_decode = msgspec.msgpack.Decoder().decode


class BadEvent(ValueError):
    """Bytes that are no batch of KV events."""


def decode_batch(payload: bytes) -> list[tuple[str, Mapping[str, Any]]]:
    """Events of a batch as (tag, fields), in order, of either encoding; unknown fields are kept. Raises BadEvent."""
    try:
        batch = _decode(payload)
        events = batch["events"] if isinstance(batch, dict) else batch[1]
        return [_named(event) for event in events]
    except (msgspec.DecodeError, KeyError, IndexError, TypeError) as error:
        raise BadEvent(f"not a batch of KV events: {error!r}") from error


def _named(event: Any) -> tuple[str, Mapping[str, Any]]:
    if isinstance(event, dict):
        return str(event["type"]), event
    tag = str(event[0])
    return tag, dict(zip(_FIELDS.get(tag, ()), event[1:], strict=False))


class _Held:
    """One engine hash: its key (None: one that token ids cannot name), and how many blocks carry it."""

    __slots__ = ("copies", "key")

    def __init__(self, key: BlockKey | None) -> None:
        self.key = key
        self.copies = 0


class HeldBlocks:
    """What one engine holds in its own prefix cache.

    `apply` is a generator, so that a caller can breathe between steps of `STEP_BLOCKS` blocks. The counters tell what
    could not be used. At most `capacity_blocks` copies are believed (0: no bound): lost removals then age out.
    """

    def __init__(self, *, model: str, fingerprint: str, block_size: int, capacity_blocks: int = 0) -> None:
        self.unknown_parents = 0
        self.unknown_removals = 0
        self.ignored_events = 0
        self.overflows = 0
        self.stored_blocks = 0
        self._model = model
        self._fingerprint = fingerprint
        self._block_size = block_size
        self._capacity_blocks = capacity_blocks
        self._copies = 0
        self._by_hash: dict[EngineHash, _Held] = {}
        self._hashes_of_key: dict[BlockKey, int] = {}
        self._added: dict[BlockKey, None] = {}
        self._removed: dict[BlockKey, None] = {}
        self._partial_groups: set[int] = set()

    def __len__(self) -> int:
        """Different keys held."""
        return len(self._hashes_of_key)

    def snapshot(self) -> list[BlockKey]:
        """Every key held, and an empty delta from here on."""
        self._added.clear()
        self._removed.clear()
        return list(self._hashes_of_key)

    def take_delta(self) -> tuple[list[BlockKey], list[BlockKey]]:
        """Keys gained and keys lost since the last `take_delta` or `snapshot`; no key is in both."""
        delta = list(self._added), list(self._removed)
        self._added.clear()
        self._removed.clear()
        return delta

    @property
    def has_delta(self) -> bool:
        return bool(self._added or self._removed)

    def apply(self, tag: str, fields: Mapping[str, Any]) -> Iterator[None]:
        """Applies one event, yielding now and then. Malformed or foreign events are counted, not raised."""
        try:
            match tag:
                case "AllBlocksCleared":
                    self.clear()
                case "BlockStored" if self._counts(fields):
                    yield from self._store(fields)
                case "BlockRemoved" if self._counts(fields):
                    yield from self._remove(fields["block_hashes"])
                case _:
                    self.ignored_events += 1
        except (KeyError, TypeError, ValueError, OverflowError):
            self.ignored_events += 1

    def clear(self) -> None:
        """The engine holds nothing."""
        for key in list(self._hashes_of_key):
            self._lose(key)
        self._by_hash.clear()
        self._hashes_of_key.clear()
        self._copies = 0

    # --- which events count ---

    def _counts(self, fields: Mapping[str, Any]) -> bool:
        """Only blocks in the engine's own memory, of layers that need the whole prefix."""
        group = fields.get("group_idx") or 0
        if fields.get("kv_cache_spec_kind") not in _WHOLE_PREFIX_KINDS:
            self._partial_groups.add(group)
        return fields.get("medium") in (None, "GPU") and group not in self._partial_groups

    # --- stored ---

    def _store(self, fields: Mapping[str, Any]) -> Iterator[None]:
        hashes: Sequence[EngineHash] = fields["block_hashes"]
        if fields["block_size"] != self._block_size or len(fields["token_ids"]) != len(hashes) * self._block_size:
            self.ignored_events += 1  # a partial block, or blocks with holes between them
            return
        extra_keys = fields.get("extra_keys") or [None] * len(hashes)
        parent = self._parent_key(fields, extra_keys[0] if extra_keys else None)
        if parent is _UNKNOWN:
            self.unknown_parents += 1
            return
        tokens = tokens_to_bytes(fields["token_ids"])
        step = self._block_size * TOKEN_BYTES
        for i, engine_hash in enumerate(hashes):
            if _beyond_tokens(extra_keys[i]):
                parent = None
            parent = next_key(parent, tokens[i * step : (i + 1) * step]) if parent is not None else None
            self._hold(engine_hash, parent)
            if i % STEP_BLOCKS == STEP_BLOCKS - 1:
                yield
        self.stored_blocks += len(hashes)
        self._bound()

    def _parent_key(self, fields: Mapping[str, Any], first_extra: Sequence[Any] | None) -> BlockKey | None:
        """Key before the event's first block; None when no key can name it, `_UNKNOWN` when the parent is not known."""
        parent_hash = fields.get("parent_block_hash")
        if parent_hash is not None:
            held = self._by_hash.get(parent_hash)
            return _UNKNOWN if held is None else held.key
        lora = fields.get("lora_name") or ""
        # In order: LoRA name (when there is a LoRA), multi-modal pairs, cache_salt, digests of prompt embeddings.
        texts = [extra for extra in first_extra or () if isinstance(extra, str)]
        salts = texts[1:] if lora and texts[:1] == [lora] else texts
        return root_key(
            model=self._model,
            fingerprint=self._fingerprint,
            block_size=self._block_size,
            lora=lora,
            cache_salt=salts[-1] if salts else "",
        )

    def _hold(self, engine_hash: EngineHash, key: BlockKey | None) -> None:
        held = self._by_hash.get(engine_hash)
        if held is None:
            held = self._by_hash[engine_hash] = _Held(key)
            if key is not None:
                self._gain(key)
        held.copies += 1
        self._copies += 1

    def _gain(self, key: BlockKey) -> None:
        count = self._hashes_of_key.get(key, 0)
        self._hashes_of_key[key] = count + 1
        if count == 0:
            if key in self._removed:
                del self._removed[key]
            else:
                self._added[key] = None

    # --- removed ---

    def _remove(self, hashes: Sequence[EngineHash]) -> Iterator[None]:
        for i, engine_hash in enumerate(hashes):
            held = self._by_hash.get(engine_hash)
            if held is None:
                self.unknown_removals += 1
                continue
            held.copies -= 1
            self._copies -= 1
            if held.copies == 0:
                self._forget(engine_hash)
            if i % STEP_BLOCKS == STEP_BLOCKS - 1:
                yield

    def _forget(self, engine_hash: EngineHash) -> None:
        held = self._by_hash.pop(engine_hash)
        if held.key is None:
            return
        self._hashes_of_key[held.key] -= 1
        if self._hashes_of_key[held.key] == 0:
            del self._hashes_of_key[held.key]
            self._lose(held.key)

    def _lose(self, key: BlockKey) -> None:
        if key in self._added:
            del self._added[key]
        else:
            self._removed[key] = None

    def _bound(self) -> None:
        """More copies than the engine has blocks: removals were lost, or blocks were told twice
        (`kv_cache_report_mode=full`). Believe one copy each, and the latest ones.
        """
        if not self._capacity_blocks or self._copies <= self._capacity_blocks:
            return
        self.overflows += 1
        for held in self._by_hash.values():
            held.copies = 1
        for engine_hash in list(self._by_hash)[: max(0, len(self._by_hash) - self._capacity_blocks)]:
            self._forget(engine_hash)
        self._copies = len(self._by_hash)


_UNKNOWN = BlockKey(b"unknown parent")


def _beyond_tokens(extra: Sequence[Any] | None) -> bool:
    """Whether a block depends on more than tokens, LoRA and salt: images, or prompt embeddings."""
    return any(not isinstance(part, str) for part in extra or ())
