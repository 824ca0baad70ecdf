"""What the relay changes in an engine's answer, and nothing else: server-sent events are cut at their blank lines and `usage` is corrected.

`usage.prompt_tokens_details.cached_tokens` must be the *prefill* side's number wherever usage occurs, present even when 0: the decoding
engine would report the whole prompt as cached, since its KVCache was written by somebody else. `kv_transfer_params` of an engine are ours
and never reach a client. Pure: knows bytes and JSON; does not know legs, sockets or who computed the number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, TypeGuard

import msgspec

EVENT_END = re.compile(rb"\r\n\r\n|\n\n")
# Only a key of the JSON itself can match: inside of a JSON string the closing quote is escaped.
_NEEDS_REWRITING = re.compile(rb'"(?:usage|kv_transfer_params|ec_transfer_params)"\s*:')
_OURS = ("kv_transfer_params", "ec_transfer_params")
DONE = b"data: [DONE]\n\n"


class EventSplitter:
    """Cuts a byte stream into server-sent events; each keeps its own blank line, so that joined they are the stream again."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._scanned = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that `chunk` completes."""
        self._buffer += chunk
        events: list[bytes] = []
        start = 0
        # A separator may straddle two chunks: go back by its length less one.
        for match in EVENT_END.finditer(self._buffer, max(0, self._scanned - 3)):
            events.append(bytes(self._buffer[start : match.end()]))
            start = match.end()
        del self._buffer[:start]
        self._scanned = len(self._buffer)
        return events

    @property
    def pending_bytes(self) -> int:
        """Bytes of the event that is not complete yet."""
        return len(self._buffer)


@dataclass
class UsageSeen:
    """The last usage that went by."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    known: bool = False


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def correct(answer: dict[str, Any], cached_tokens: int | None, seen: UsageSeen) -> None:
    """Corrects one decoded answer or chunk in place. `cached_tokens` None keeps the engine's own number (0 if it has none)."""
    for field in _OURS:
        if answer.get(field) is not None:
            answer[field] = None
    usage = answer.get("usage")
    if not is_object(usage):
        return
    details = usage.get("prompt_tokens_details")
    details = details if is_object(details) else {}
    if cached_tokens is not None:
        details["cached_tokens"] = cached_tokens
    elif details.get("cached_tokens") is None:
        details["cached_tokens"] = 0
    usage["prompt_tokens_details"] = details
    seen.prompt_tokens = _count(usage.get("prompt_tokens"), seen.prompt_tokens)
    seen.completion_tokens = _count(usage.get("completion_tokens"), seen.completion_tokens)
    seen.known = True


def _count(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) else otherwise


def data_of(event: bytes) -> bytes | None:
    """The data of an event that is a single `data:` line, as all engines send them; None for anything else."""
    line = event.rstrip(b"\r\n")
    if not line.startswith(b"data:") or b"\n" in line:
        return None
    return line[5:].strip()


def rewrite_event(event: bytes, cached_tokens: int | None, seen: UsageSeen) -> bytes:
    """The event with its usage corrected; the very same bytes when there is nothing to correct."""
    if not _NEEDS_REWRITING.search(event):
        return event
    data = data_of(event)
    if data is None or not data.startswith(b"{"):
        return event
    try:
        chunk = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return event
    correct(chunk, cached_tokens, seen)
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def rewrite_body(body: bytes, cached_tokens: int | None, seen: UsageSeen) -> bytes:
    """A whole JSON answer with its usage corrected. Raises msgspec.DecodeError when it is not JSON."""
    answer = msgspec.json.decode(body)
    if not is_object(answer):
        return body
    correct(answer, cached_tokens, seen)
    return msgspec.json.encode(answer)


def error_of(event: bytes) -> dict[str, Any] | None:
    """The OpenAI error object of an event like `data: {"error": {…}}`, else None."""
    data = data_of(event)
    if data is None or b'"error"' not in data:
        return None
    try:
        chunk = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return None
    error = chunk.get("error") if is_object(chunk) else None
    return error if is_object(error) else None
