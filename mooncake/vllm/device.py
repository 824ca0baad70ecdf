"""When KV that was "computed" is really in memory: at once on a CPU, after the stream's present work on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _at_once() -> None:
    return


def computed_fence(kv: Any) -> Callable[[], None]:
    """A function that blocks until what was launched so far on the current stream of `kv`'s device is done."""
    if not getattr(kv, "is_cuda", False):
        return _at_once
    import torch

    event = torch.cuda.Event()
    event.record()
    return event.synchronize
