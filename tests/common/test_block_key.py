"""Block keys: fixed vectors (other languages compute the same), and properties of prefixes."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.common.block_key import (
    block_keys,
    iter_keys,
    next_key,
    pack_keys,
    prompt_digest,
    root_key,
    store_keys,
    tokens_to_bytes,
    unpack_keys,
)

ROOT = root_key(model="tiny", fingerprint="f0", block_size=4)
VECTOR_CODE = (
    "from mooncake.common.block_key import *\n"
    "r = root_key(model='tiny', fingerprint='f0', block_size=4, lora='l', cache_salt='s')\n"
    "print(r.hex(), pack_keys(block_keys(r, range(11), 4)).hex())"
)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=70)


def test_fixed_vectors() -> None:
    """Written down once; a change here changes the name of every stored block."""
    assert ROOT.hex() == "0746e8d8f5b10bcb52406d38860a17fc"
    assert [k.hex() for k in block_keys(ROOT, [1, 2, 3, 4, 5, 6, 7, 8, 9], 4)] == [
        "2987625d36eeee5165d29f9cb848c6ad",
        "bdfafa02557ba46b2306b03448cc8f94",
    ]
    assert prompt_digest([1, 2, 3]).hex() == hashlib.sha256(struct.pack("<3I", 1, 2, 3)).hexdigest()


def test_key_is_the_documented_formula() -> None:
    expected = hashlib.sha256(ROOT + struct.pack("<4I", 5, 6, 7, 2**32 - 1)).digest()[:16]
    assert block_keys(ROOT, [5, 6, 7, 2**32 - 1], 4) == [expected]


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_same_bytes_in_every_process(seed: str) -> None:
    here: list[str] = []
    scope: dict[str, object] = {"print": lambda *parts: here.extend(map(str, parts))}
    exec(VECTOR_CODE, scope)
    there = subprocess.run(
        [sys.executable, "-c", VECTOR_CODE],
        env=os.environ | {"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert there.stdout.split() == here


@given(tokens, st.integers(1, 9))
def test_only_full_blocks_have_keys(ids: list[int], block_size: int) -> None:
    assert len(block_keys(ROOT, ids, block_size)) == len(ids) // block_size


@given(tokens, tokens, st.integers(1, 9))
def test_keys_are_equal_exactly_for_equal_prefixes(one: list[int], two: list[int], block_size: int) -> None:
    for i, (a, b) in enumerate(zip(block_keys(ROOT, one, block_size), block_keys(ROOT, two, block_size), strict=False)):
        end = (i + 1) * block_size
        assert (a == b) == (one[:end] == two[:end])


@given(tokens, st.integers(1, 9))
def test_incremental_equals_whole(ids: list[int], block_size: int) -> None:
    key, found = ROOT, []
    for start in range(0, len(ids) - block_size + 1, block_size):
        key = next_key(key, tokens_to_bytes(ids[start : start + block_size]))
        found.append(key)
    assert found == block_keys(ROOT, ids, block_size)
    assert found == list(iter_keys(ROOT, memoryview(tokens_to_bytes(ids)), block_size))


@given(st.lists(st.binary(min_size=16, max_size=16)), st.integers(1, 8))
def test_packing_and_store_keys(keys: list[bytes], per_object: int) -> None:
    assert unpack_keys(pack_keys(keys)) == keys
    named = store_keys(keys, per_object)  # type: ignore[arg-type]
    assert named == [keys[i] for i in range(len(keys)) if (i + 1) % per_object == 0]


def test_every_part_of_the_root_counts() -> None:
    base = {"model": "m", "fingerprint": "f", "block_size": 4, "lora": "", "cache_salt": ""}
    changed = [base | {k: v} for k, v in (("model", "n"), ("fingerprint", "g"), ("block_size", 8))]
    changed += [base | {"lora": "x"}, base | {"cache_salt": "x"}, base | {"model": "mf", "fingerprint": ""}]
    assert len({root_key(**b) for b in (base, *changed)}) == 7  # type: ignore[arg-type]


def test_wrong_sizes_are_errors() -> None:
    with pytest.raises(ValueError):
        unpack_keys(b"x" * 17)
    with pytest.raises(OverflowError):
        tokens_to_bytes([-1])
