"""pyverbs: finding it, and everything that depends on its version or that it leaves out.

Knows: where Debian puts the package, enum modules of old and new releases, which GID to use, where the kernel's event
descriptors are. Does not know: what is done with them. Nothing is imported before `load`. Descriptors that
pyverbs does not tell are found through /proc/self/fd.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeVar

from mooncake.common.errors import TransferError

T = TypeVar("T")

_DEBIAN = "/usr/lib/python3/dist-packages"
INSTALL = "apt-get install python3-pyverbs ibverbs-providers rdma-core (Debian's is for its own Python version)"
_opening = threading.Lock()


class Api(NamedTuple):
    """The classes that we use, and the enums `e`."""

    Context: Any
    CompChannel: Any
    CQ: Any
    PD: Any
    MR: Any
    DmaBufMR: Any
    """None before rdma-core 34."""
    QP: Any
    QPAttr: Any
    QPCap: Any
    QPInitAttr: Any
    SGE: Any
    SendWR: Any
    AHAttr: Any
    GID: Any
    GlobalRoute: Any
    e: Any
    Error: type[Exception]
    device_names: Callable[[], list[str]]


@cache
def load() -> Api:
    """Raises ImportError when pyverbs is not there, or not for this Python."""
    _find()
    module = {
        name: importlib.import_module(f"pyverbs.{name}")
        for name in ("addr", "cq", "device", "mr", "pd", "qp", "wr", "pyverbs_error")
    }
    try:
        enums = importlib.import_module("pyverbs.libibverbs_enums")
    except ImportError:
        enums = importlib.import_module("pyverbs.enums")  # rdma-core before 50

    def device_names() -> list[str]:
        try:
            return [device.name.decode() for device in module["device"].get_device_list()]
        except module["pyverbs_error"].PyverbsError:
            return []  # that is how it says "no device"

    # On kernels before 5.12, memory must be kept from forks, or a write after one goes where the NIC does not look.
    with contextlib.suppress(ImportError, module["pyverbs_error"].PyverbsError):
        importlib.import_module("pyverbs.fork").fork_init()

    homes = {"Context": "device", "CompChannel": "cq", "CQ": "cq", "PD": "pd", "MR": "mr", "SGE": "wr", "SendWR": "wr"}
    homes |= dict.fromkeys(("QP", "QPAttr", "QPCap", "QPInitAttr"), "qp")
    homes |= dict.fromkeys(("AHAttr", "GID", "GlobalRoute"), "addr")
    classes = {name: getattr(module[home], name) for name, home in homes.items()}
    classes["DmaBufMR"] = getattr(module["mr"], "DmaBufMR", None)
    return Api(**classes, e=enums, Error=module["pyverbs_error"].PyverbsError, device_names=device_names)


def _find() -> None:
    """Make `import pyverbs` work where Debian's folder is not on the path (a venv, a Python of one's own), without putting
    all the other packages in there before ours."""
    if "pyverbs" in sys.modules or importlib.util.find_spec("pyverbs") is not None:
        return
    spec = importlib.machinery.PathFinder.find_spec("pyverbs", [_DEBIAN])
    if spec is None or spec.loader is None:
        raise ImportError("no package pyverbs")
    module = importlib.util.module_from_spec(spec)
    sys.modules["pyverbs"] = module
    spec.loader.exec_module(module)


def unavailable() -> str:
    """Why there is no RDMA here, and the fix; "" when there is."""
    try:
        names = load().device_names()
    except ImportError as error:
        return f"pyverbs cannot be imported ({error}): {INSTALL}"
    if not names:
        return "no RDMA device (see `rdma link`; soft-RoCE: modprobe rdma_rxe; rdma link add rxe0 type rxe netdev eth0)"
    return ""


# --- GIDs -----------------------------------------------------------------------------------------------------------


class Gid(NamedTuple):
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody wants here
    text: str
    """Eight groups of four digits, the only form that pyverbs reads."""


def full_form(text: str) -> str:
    """Eight groups of four digits, of a GID in eight groups."""
    return ":".join(group.rjust(4, "0") for group in text.split(":"))


def choose_gid(context: Any, port: int, link_layer: int) -> Gid:
    """The GID that routes: RoCE v2 of an IPv4 address, else of a global IPv6 one, else link-local; on InfiniBand the port's
    first. By type and address, never by index: indices move as addresses come and go. Raises TransferError."""
    e = load().e
    table = context.query_gid_table(max(1, context.query_port(port).gid_tbl_len))
    wanted = e.IBV_GID_TYPE_IB if link_layer == e.IBV_LINK_LAYER_INFINIBAND else e.IBV_GID_TYPE_ROCE_V2
    found = [
        Gid(entry.gid_index, full_form(entry.gid_str()))
        for entry in table
        if entry.port_num == port and entry.gid_type == wanted
    ]
    if not found:
        raise TransferError("the port has no RoCE v2 address: give its network interface an IP address")
    return min(found, key=lambda gid: (_kind(gid.text), gid.index))


def _kind(gid: str) -> int:
    if gid.startswith("0000:0000:0000:0000:0000:ffff:"):
        return 0
    return 2 if gid.startswith("fe80:") else 1


# --- descriptors ----------------------------------------------------------------------------------------------------


def opened(make: Callable[[], T]) -> tuple[T, int]:
    """(what `make` made, the event descriptor that came with it). Raises TransferError when there is none."""
    with _opening:
        before = _descriptors()
        made = make()
        new = {fd: what for fd, what in _descriptors().items() if before.get(fd) != what}
    for mark in ("infinibandevent", "eventfd", "pipe:"):  # the kernel's first; a provider without a kernel has its own
        for fd, what in sorted(new.items()):
            if mark in what:
                return made, fd
    raise TransferError("the RDMA library opened no event descriptor")


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the listing's own, or closed by another thread
    return found
