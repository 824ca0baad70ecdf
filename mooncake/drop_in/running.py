"""An initialized engine: the parts behind one `TransferEngine` of the drop-in API, and how they are put together.

Knows: start-up with its fall-backs (a port that is taken, an address that is not ours, RDMA that is not there), received
notifications, the way down. Does not know: the API's methods.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import NamedTuple

import msgspec

from mooncake.common.errors import ConfigError, MooncakeError
from mooncake.common.net import format_address
from mooncake.drop_in import settings
from mooncake.drop_in.buffers import Buffers
from mooncake.drop_in.names import Addresses, Names, names_for
from mooncake.drop_in.peers import Peers
from mooncake.drop_in.results import complain, log
from transfer_engine import EngineConfig, TransferEngine

MAX_NOTES = 65536
"""Received and not asked for."""


class TransferNotify:
    """A message that arrives with a transfer, or alone."""

    __slots__ = ("msg", "name")

    def __init__(self, *args: str, **kwargs: str) -> None:
        given = dict(zip(("name", "msg"), args, strict=False)) | kwargs
        if (
            len(args) + len(kwargs) not in (0, 2)
            or len(given) != len(args) + len(kwargs)
            or set(given) - {"name", "msg"}
        ):
            raise TypeError("TransferNotify() takes nothing, or name and msg")
        self.name, self.msg = given.get("name", ""), given.get("msg", "")
        if not isinstance(self.name, str) or not isinstance(self.msg, str):
            raise TypeError("TransferNotify: name and msg must be str")

    def __repr__(self) -> str:
        return f"TransferNotify(name={self.name!r}, msg={self.msg!r})"


class Note(NamedTuple):
    """What travels."""

    name: str
    msg: str


class Notes:
    """Received notifications until somebody asks; the oldest are dropped (and that is said) when nobody does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._notes: deque[Note] = deque(maxlen=MAX_NOTES)

    def receive(self, instance_id: str, address: str, payload: bytes) -> None:
        try:
            note = msgspec.msgpack.decode(payload, type=Note)
        except msgspec.MsgspecError:
            return complain("get_notifies", ValueError(f"a notification from {address} is not one of this API"))
        with self._lock:
            full = len(self._notes) == MAX_NOTES
            self._notes.append(note)
        if full:
            complain("get_notifies", ValueError(f"more than {MAX_NOTES} notifications wait: the oldest is dropped"))

    def take(self) -> list[TransferNotify]:
        with self._lock:
            notes = list(self._notes)
            self._notes.clear()
        return [TransferNotify(*note) for note in notes]


class Running:
    """Raises ConfigError, ValueError, OSError and what the metadata server's client raises."""

    def __init__(self, hostname: str, metadata_server: str, protocol: str, device_name: str) -> None:
        there = settings.place(hostname)
        self.engine = _start(there, settings.ways(protocol), settings.nics(device_name), wanted=protocol)
        try:
            self.names: Names = names_for(metadata_server, self.engine.send_probe)
            self.name = self.address if isinstance(self.names, Addresses) else hostname.strip()
            self.names.publish(self.name, self.address, self.engine.instance_id)
        except BaseException:
            self.engine.close()
            raise
        self.notes = Notes()
        self.engine.on_notify(self.notes.receive)
        self.peers = Peers(self.engine, self.names)
        self.buffers = Buffers(self.engine)

    @property
    def address(self) -> str:
        return self.engine.address

    @property
    def port(self) -> int:
        return settings.split(self.engine.address)[1]

    def close(self) -> None:
        """At most about 6 s: 3 for the engine, 3 for a metadata server that does not answer."""
        try:
            self.names.close()
        except (MooncakeError, OSError) as error:
            complain("close", error)
        self.engine.close()


def _start(there: settings.Place, ways: tuple[str, ...], nics: tuple[str, ...], wanted: str) -> TransferEngine:
    token = os.environ.get("MOONCAKE_CLUSTER_TOKEN", "")
    config = EngineConfig(
        host=there.bind, port=there.port, advertise_host=there.advertise, cluster_token=token.encode(), transports=ways,
        nics=nics if "rdma" in ways else (), max_peers=1024,
    )  # fmt: skip
    engine = _bound(config, there)
    used = engine.identity.transports  # the engine leaves out what this machine does not have
    if wanted.strip() and "rdma" in ways and "rdma" not in used:
        log.warning("%s: no RDMA here (see `mooncake topology`): using %s", engine.address, ", ".join(used))
    if not token and settings.is_reachable_from_outside(there.bind):
        log.warning(
            "%s: no MOONCAKE_CLUSTER_TOKEN is set, so whoever reaches this port may read and write registered memory; "
            "set the same one for all engines",
            engine.address,
        )
    log.info("transfer engine at %s, transports %s", engine.address, ", ".join(used))
    return engine


def _bound(config: EngineConfig, there: settings.Place) -> TransferEngine:
    """On the address and port that were asked for, or as near as this host can."""
    try:
        return TransferEngine(config)
    except OSError as error:
        problem = error
    for bind, port in (
        (there.bind, 0),
        (settings.everywhere(there).bind, there.port),
        (settings.everywhere(there).bind, 0),
    ):
        try:
            engine = TransferEngine(msgspec.structs.replace(config, host=bind, port=port))
        except OSError:
            continue
        asked = format_address(there.bind, there.port)
        log.warning("cannot listen on %s (%s): listening on %s, port %s", asked, problem, bind, engine.address)
        return engine
    raise ConfigError(f"cannot listen on {format_address(there.bind, there.port)}: {problem}") from problem
