"""From errors to the integers that callers of the drop-in API expect, and to one log line each.

Knows: the codes, and that the same complaint is not logged for every call of a busy engine. Does not know: what failed.
The codes are those of the open-source engine's error.h, as far as its Python API returns them.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from mooncake.common.errors import (
    AuthenticationFailed,
    MooncakeError,
    NotRegistered,
    PeerUnavailable,
    RegionOverlap,
    TransferTimeout,
)

INVALID = -1
NOT_REGISTERED = -3
OVERLAP = -7
BAD_NAME = -101
UNREACHABLE = -102

FAILURES = (MooncakeError, ValueError, OSError)
"""What a call may meet at run time; anything else is a bug, and is raised."""

_AGAIN_S = 60.0
_MOST_KEPT = 1024
log = logging.getLogger("mooncake.engine")


class Complaints:
    """Warns of the same thing once a minute, with the number of times it was not said."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said: dict[str, tuple[float, int]] = {}

    def say(self, key: str, message: str) -> None:
        now = time.monotonic()
        with self._lock:
            until, hidden = self._said.get(key, (0.0, 0))
            if now < until:
                self._said[key] = (until, hidden + 1)
                return
            if len(self._said) >= _MOST_KEPT:
                self._said.clear()
            self._said[key] = (now + _AGAIN_S, 0)
        log.warning("%s%s", message, f" ({hidden} more like this)" if hidden else "")


complaints = Complaints()
S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


def failing_with(result: R) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Decorator: a runtime failure of the method is logged and becomes `result`; TypeError stays."""

    def decorate(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(method)
        def wrapped(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(self, *args, **kwargs)
            except FAILURES as error:
                complain(method.__name__, error)
                return result

        return wrapped

    return decorate


_FIXES: tuple[tuple[type[MooncakeError], str], ...] = (
    (NotRegistered, "register_memory() must cover it, on the side that owns it, before the transfer"),
    (AuthenticationFailed, "set the same MOONCAKE_CLUSTER_TOKEN for all engines"),
    (PeerUnavailable, "is the peer's engine running there?"),
    (TransferTimeout, "is the peer frozen or cut off? MC_TRANSFER_TIMEOUT (seconds) gives slow networks more time"),
)


def complain(where: str, error: BaseException) -> None:
    """Log a failure with its fix."""
    text = str(error) or type(error).__name__
    fix = next((f"; {fix}" for kind, fix in _FIXES if isinstance(error, kind)), "")
    complaints.say(f"{where}/{type(error).__name__}/{text[:60]}", f"{where}: {text}{fix}")


def code_of(error: BaseException) -> int:
    """Result code of a failed registration."""
    if isinstance(error, RegionOverlap):
        return OVERLAP
    return NOT_REGISTERED if isinstance(error, NotRegistered) else INVALID
