"""Starting threads where the system may have none left.

Knows: daemon threads, and that a refused one is Overloaded, like any other bound that is reached. Does not know: what they do.

A rule for all locks here: application threads are interrupted (KeyboardInterrupt). `with` on a Condition runs Python code between
taking the lock and the block, where an interrupt would leave it locked for ever; so the Condition's lock is entered instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from mooncake.common.errors import Overloaded


def start(name: str, body: Callable[[], None]) -> threading.Thread:
    """A running daemon thread. Raises Overloaded when the system refuses one (ulimit -u, a cgroup's pids.max)."""
    thread = threading.Thread(target=body, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise Overloaded(f"cannot start thread {name}: {error}; raise ulimit -u or the cgroup's pids.max") from error
    return thread
