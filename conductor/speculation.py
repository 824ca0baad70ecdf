"""Blocks that an instance will hold soon: those of prompts that were just sent there.

Without this, a burst of siblings (same system prompt, same document) spreads over all instances before the first KV
event comes back. An entry lives until its prefill should be over plus a little; then the events must speak for
themselves. A key names its whole prefix (ids.py), so two prompts share exactly the keys up to the last equal position:
a binary search finds it, and adding an entry costs nothing per block.
Knows: keys, instance ids, deadlines. Does not know: what is really held (prefix_index.py), or why a request ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mooncake.common.ids import BlockKey, InstanceId, RequestId


@dataclass(slots=True)
class _Entry:
    instance_id: InstanceId
    keys: Sequence[BlockKey]
    until_s: float


class Speculation:
    """Bounded by `max_keys` in all and `max_siblings` with one first key; the oldest give way."""

    def __init__(self, *, max_keys: int = 1_000_000, max_siblings: int = 256) -> None:
        self._max_keys = max_keys
        self._max_siblings = max_siblings
        self._entries: dict[RequestId, _Entry] = {}
        self._siblings: dict[BlockKey, dict[RequestId, _Entry]] = {}
        self._keys = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request_id: RequestId, instance_id: InstanceId, keys: Sequence[BlockKey], until_s: float) -> None:
        """`instance_id` should hold all of `keys` once this request's prefill is over."""
        self.forget(request_id)
        if not keys or len(keys) > self._max_keys:
            return
        while self._keys + len(keys) > self._max_keys:
            self.forget(next(iter(self._entries)))
        siblings = self._siblings.setdefault(keys[0], {})
        if len(siblings) >= self._max_siblings:
            self.forget(next(iter(siblings)))
            siblings = self._siblings.setdefault(keys[0], {})
        entry = _Entry(instance_id, keys, until_s)
        self._entries[request_id] = siblings[request_id] = entry
        self._keys += len(keys)

    def settle(self, request_id: RequestId, until_s: float) -> None:
        """The prefill is over: the entry only has to last until its events arrive."""
        entry = self._entries.get(request_id)
        if entry is not None:
            entry.until_s = until_s

    def forget(self, request_id: RequestId) -> None:
        """The prompt will not be computed there (or the entry is too old)."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        self._keys -= len(entry.keys)
        siblings = self._siblings[entry.keys[0]]
        del siblings[request_id]
        if not siblings:
            del self._siblings[entry.keys[0]]

    def drop(self, instance_id: InstanceId) -> None:
        """Forgets what was expected of an instance that is gone."""
        for request_id in [r for r, e in self._entries.items() if e.instance_id == instance_id]:
            self.forget(request_id)

    def expire(self, now: float) -> None:
        for request_id in [r for r, e in self._entries.items() if e.until_s <= now]:
            self.forget(request_id)

    def match(self, keys: Sequence[BlockKey], now: float) -> dict[InstanceId, int]:
        """Instance -> how many leading `keys` it should hold soon; instances without any are absent."""
        best: dict[InstanceId, int] = {}
        for entry in self._siblings.get(keys[0], {}).values() if keys else ():
            known = best.get(entry.instance_id, 0)
            if entry.until_s > now and known < min(len(keys), len(entry.keys)) and entry.keys[known] == keys[known]:
                best[entry.instance_id] = _common_prefix(entry.keys, keys, known + 1)
        return best


def _common_prefix(a: Sequence[BlockKey], b: Sequence[BlockKey], low: int) -> int:
    """Length of the common prefix of two key chains, of which the first `low` keys are known to be equal."""
    high = min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
