"""The paper's request traces (JSON lines: timestamp in ms, input_length, output_length, hash_ids of 512-token blocks).

A hash id names a block and its whole prefix, as our block keys do; the last, partial block of a prompt has no key.
Knows: the file format. Does not know: who replays it. Paper §4 and the artifact's traces.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec

from mooncake.common.block_key import KEY_BYTES
from mooncake.common.ids import BlockKey

TRACE_BLOCK_TOKENS = 512


class TraceRequest(msgspec.Struct, frozen=True):
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    block_keys: Sequence[BlockKey]


def load_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests (None: all), in order of arrival."""
    with path.open() as lines:
        return [_parse(line) for line in itertools.islice(lines, limit)]


class _Row(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


_decode = msgspec.json.Decoder(_Row).decode


def _parse(line: str) -> TraceRequest:
    row = _decode(line)
    full = row.hash_ids[: row.input_length // TRACE_BLOCK_TOKENS]
    keys = [BlockKey(i.to_bytes(KEY_BYTES, "big")) for i in full]
    return TraceRequest(row.timestamp / 1e3, row.input_length, max(1, row.output_length), keys)
