"""Which instance holds which block: block key -> bitmask of instances (paper §3.1 prefix hashing, §6.1
FindBestPrefixMatch).

One walk along a prompt's keys gives the leading match of every instance: a dictionary look-up and an AND a block.
A key is removed for one instance only (another may still hold it); a snapshot replaces; a gone instance leaves nothing.
Knows: keys and instance ids. Does not know: tokens, models (keys of two models never collide, block_key.py), time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import repeat
from operator import and_

from mooncake.common.ids import BlockKey, InstanceId

_CHUNK = 128


class PrefixIndex:
    """Bounded: past `max_keys_per_instance` further keys of an instance are counted in `dropped_keys`, not kept."""

    def __init__(self, *, max_keys_per_instance: int = 1_000_000) -> None:
        self._max_keys_per_instance = max_keys_per_instance
        self._holders: dict[BlockKey, int] = {}
        self._bit: dict[InstanceId, int] = {}
        self._of_bit: dict[int, InstanceId] = {}
        self._held: dict[InstanceId, set[BlockKey]] = {}
        self.dropped_keys = 0

    def __len__(self) -> int:
        """How many different keys are held by anyone."""
        return len(self._holders)

    def held(self, instance_id: InstanceId) -> int:
        """How many keys the instance holds."""
        return len(self._held.get(instance_id, ()))

    def store(self, instance_id: InstanceId, keys: Iterable[BlockKey]) -> None:
        """The instance now holds `keys` as well."""
        bit = self._bit_of(instance_id)
        held = self._held[instance_id]
        for key in keys:
            if key in held:
                continue
            if len(held) >= self._max_keys_per_instance:
                self.dropped_keys += 1
                continue
            held.add(key)
            self._holders[key] = self._holders.get(key, 0) | bit

    def remove(self, instance_id: InstanceId, keys: Iterable[BlockKey]) -> None:
        """The instance no longer holds `keys`; unknown ones are ignored."""
        held = self._held.get(instance_id)
        if held is None:
            return
        bit = self._bit[instance_id]
        for key in keys:
            if key in held:
                held.discard(key)
                self._clear(key, bit)

    def replace(self, instance_id: InstanceId, keys: Iterable[BlockKey]) -> None:
        """The instance holds `keys` and nothing else."""
        wanted = list(keys)
        self.remove(instance_id, self._held.get(instance_id, set()).difference(wanted))
        self.store(instance_id, wanted)

    def drop(self, instance_id: InstanceId) -> None:
        """Forgets the instance."""
        held = self._held.pop(instance_id, None)
        if held is None:
            return
        bit = self._bit.pop(instance_id)
        del self._of_bit[bit]
        for key in held:
            self._clear(key, bit)

    def match(self, keys: Sequence[BlockKey], among: Sequence[InstanceId]) -> dict[InstanceId, int]:
        """For each of `among`, how many leading `keys` it holds. Costs O(keys + instances).

        Runs of keys that everybody left in the race holds are passed a chunk at a time, without a Python step a key.
        """
        lengths = dict.fromkeys(among, 0)
        alive = 0
        for instance_id in among:
            alive |= self._bit.get(instance_id, 0)
        look_up = self._holders.get
        for start in range(0, len(keys), _CHUNK):
            if not alive:
                return lengths
            bits = list(map(look_up, keys[start : start + _CHUNK], repeat(0)))
            if reduce(and_, bits, alive) != alive:
                alive = self._walk(bits, start, alive, lengths)
        self._settle(alive, len(keys), lengths)
        return lengths

    def _walk(self, holders: Sequence[int], start: int, alive: int, lengths: dict[InstanceId, int]) -> int:
        """Who is still alive after one chunk; those who fell out get their length."""
        for depth, bits in enumerate(holders, start):
            still = bits & alive
            if still != alive:
                self._settle(alive ^ still, depth, lengths)
                alive = still
        return alive

    def _settle(self, bits: int, depth: int, lengths: dict[InstanceId, int]) -> None:
        while bits:
            lowest = bits & -bits
            lengths[self._of_bit[lowest]] = depth
            bits ^= lowest

    def _bit_of(self, instance_id: InstanceId) -> int:
        """The instance's bit; a new instance gets the lowest free one."""
        bit = self._bit.get(instance_id)
        if bit is None:
            bit = 1
            while bit in self._of_bit:
                bit <<= 1
            self._bit[instance_id] = bit
            self._of_bit[bit] = instance_id
            self._held[instance_id] = set()
        return bit

    def _clear(self, key: BlockKey, bit: int) -> None:
        left = self._holders[key] & ~bit
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]
