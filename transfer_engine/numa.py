"""On which NUMA node memory lies, asked of the kernel page by page (paper 3.2.2: a path is chosen by where the memory is).

Knows: move_pages(2) in its asking form. Does not know: NICs, regions.
"""

from __future__ import annotations

import ctypes
import mmap
import platform

_MOVE_PAGES = {"x86_64": 279, "aarch64": 239}.get(platform.machine())
_SAMPLE = 64
"""Pages that are asked for, evenly over the range: enough to see memory that is interleaved."""


def node_of(address: int, length: int) -> int | None:
    """The one node of a range of this process; None when it is spread over several, not touched yet, or cannot be told."""
    if _MOVE_PAGES is None or length <= 0:
        return None
    first, last = address // mmap.PAGESIZE, (address + length - 1) // mmap.PAGESIZE
    count = min(_SAMPLE, last - first + 1)
    numbers = [first + (last - first) * at // max(1, count - 1) for at in range(count)]
    pages = (ctypes.c_void_p * count)(*(number * mmap.PAGESIZE for number in numbers))
    found = (ctypes.c_int * count)()
    asked = ctypes.CDLL(None).syscall(_MOVE_PAGES, 0, ctypes.c_ulong(count), pages, None, found, 0)
    nodes = {node for node in found if node >= 0}
    return nodes.pop() if asked == 0 and len(nodes) == 1 else None
