"""Cutting and correcting of streams, at every possible cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.gateway.usage import EventSplitter, UsageSeen, error_of, rewrite_body, rewrite_event

STREAM = (
    'data: {"choices":[{"text":"你好🦀 \\"usage\\": {x}"}]}\n\n'
    'data: {"choices":[{"text":"a"}],"usage":{"prompt_tokens":5,"completion_tokens":1}}\n\n'
    ": ping\r\n\r\n"
    'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4,"other":1}}}\n\n'
    "data: [DONE]\n\n"
).encode()


def relay(pieces: list[bytes], cached: int | None) -> bytes:
    splitter, seen = EventSplitter(), UsageSeen()
    events = [event for piece in pieces for event in splitter.feed(piece)]
    assert splitter.pending_bytes == 0
    return b"".join(rewrite_event(event, cached, seen) for event in events)


def expected(cached: int) -> bytes:
    return relay([STREAM], cached)


@pytest.mark.parametrize("at", range(len(STREAM) + 1))
def test_cut_at_every_byte(at: int) -> None:
    assert relay([STREAM[:at], STREAM[at:]], 3) == expected(3)


def test_one_byte_at_a_time() -> None:
    assert relay([STREAM[i : i + 1] for i in range(len(STREAM))], 3) == expected(3)


@given(
    st.lists(st.text(max_size=20), max_size=8),
    st.lists(st.integers(0, 400), max_size=12),
    st.sampled_from(["\n\n", "\r\n\r\n"]),
)
def test_what_needs_no_correction_is_the_same_bytes(texts: list[str], cuts: list[int], end: str) -> None:
    raw = "".join(
        "data: " + json.dumps({"choices": [{"text": t}]}, ensure_ascii=len(t) % 2 == 0) + end for t in texts
    ).encode("utf-8", "surrogatepass")
    places = sorted({0, len(raw), *(min(c, len(raw)) for c in cuts)})
    pieces = [raw[a:b] for a, b in itertools.pairwise(places)]
    splitter = EventSplitter()
    events = [e for p in pieces for e in splitter.feed(p)]
    assert len(events) == len(texts)
    assert b"".join(rewrite_event(e, 7, UsageSeen()) for e in events) == raw


def test_corrections() -> None:
    events = [
        json.loads(e.removeprefix("data: "))
        for e in expected(3).decode().replace(": ping\r\n\r\n", "").split("\n\n")[:3]
    ]
    assert events[0] == {"choices": [{"text": '你好🦀 "usage": {x}'}]}
    assert events[1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert events[2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3, "other": 1}
    assert STREAM.split(b"\n\n")[0] in expected(3)


@pytest.mark.parametrize(
    ("usage", "cached", "details"),
    [
        ({"prompt_tokens": 1}, None, {"cached_tokens": 0}),
        ({"prompt_tokens": 1, "prompt_tokens_details": None}, 0, {"cached_tokens": 0}),
        ({"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 9}}, None, {"cached_tokens": 9}),
        ({"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 9}}, 4, {"cached_tokens": 4}),
    ],
)
def test_whole_answers(usage: dict[str, Any], cached: int | None, details: dict[str, int]) -> None:
    seen = UsageSeen()
    body = json.dumps({"usage": usage | {"completion_tokens": 3}, "kv_transfer_params": {"a": 1}, "x": 1.5e-7}).encode()
    answer = json.loads(rewrite_body(body, cached, seen))
    assert answer["usage"]["prompt_tokens_details"] == details
    assert answer["kv_transfer_params"] is None and answer["x"] == 1.5e-7
    assert (seen.prompt_tokens, seen.completion_tokens, seen.known) == (1, 3, True)


def test_error_events() -> None:
    assert error_of(b'data: {"error": {"message": "m", "code": 400}}\n\n') == {"message": "m", "code": 400}
    assert error_of(b'data: {"choices": [{"text": "\\"error\\""}]}\n\n') is None
    assert error_of(b"data: [DONE]\n\n") is None
    assert error_of(b": comment\n\n") is None
