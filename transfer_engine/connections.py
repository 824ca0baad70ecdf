"""Sessions with peers: opening, sharing, bounding, finding them again; and the links of both directions.

Knows: which links exist and whose they are. Does not know: what is asked over them (control), how bytes move.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from mooncake.common.errors import MooncakeError, Overloaded, PeerUnavailable
from transfer_engine import handshake, sockets, tls
from transfer_engine.config import EngineConfig
from transfer_engine.control import Control
from transfer_engine.handshake import Hello, Identity
from transfer_engine.link import Link
from transfer_engine.protocol import Ping
from transfer_engine.segment import Directory, PeerRecord, Session, parse_address


class Connections:
    def __init__(self, config: EngineConfig, identity: Identity, peers: Directory) -> None:
        self._config = config
        self._identity = identity
        self._peers = peers
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        self.control: Control

    def sessions(self) -> list[Session]:
        with self._lock:
            return list(self._sessions.values())

    def get(self, instance_id: str) -> Session | None:
        return self._sessions.get(instance_id)

    def open(self, address: str, instance_id: str, deadline: float) -> Session:
        """The session with whoever answers at `address`, verified by a round trip. Counts one more handle on it."""
        for session in self.sessions():
            if (
                session.address == address
                and instance_id in ("", session.instance_id)
                and self._answers(session, deadline)
            ):
                return self._count(session)
        link, record = self._dial(address, instance_id, deadline)
        with self._lock:
            known = self._sessions.get(record.identity.instance_id)
            if known is None:
                self._make_room()
                known = Session(record, address, self._config, self._redial)
                self._sessions[known.instance_id] = known
        if known.link is None or not known.link.alive:
            known.link = link
        elif known.link is not link:
            link.close()
        return self._count(known)

    def _count(self, session: Session) -> Session:
        with self._lock:
            self._sessions[session.instance_id] = session
            session.handles += 1
        return session

    def _answers(self, session: Session, deadline: float) -> bool:
        link = session.link
        if link is None or not link.alive:
            return False
        try:
            link.request(Ping(), min(deadline, time.monotonic() + 1.0))
        except MooncakeError:
            return False
        return True

    def _make_room(self) -> None:
        if len(self._sessions) < self._config.max_peers:
            return
        for instance_id, session in self._sessions.items():
            if session.handles == 0:
                del self._sessions[instance_id]
                if session.link is not None:
                    session.link.close()
                return
        raise Overloaded(f"sessions with {self._config.max_peers} peers are open")

    def release(self, session: Session) -> bool:
        """One handle less. True when it was the last: the session is idle and may be closed."""
        with self._lock:
            session.handles -= 1
            return session.handles == 0

    def _redial(self, session: Session, deadline: float) -> Link:
        return self._dial(session.address, session.instance_id, deadline)[0]

    def _dial(self, address: str, instance_id: str, deadline: float) -> tuple[Link, PeerRecord]:
        sock, identity = handshake.dial(
            parse_address(address),
            self._identity,
            self._config.cluster_token,
            want=instance_id,
            stream_id="",
            deadline=deadline,
            security=tls.of(self._config),
        )
        try:
            record = self._peers.meet(identity)
            link = self._link(sock, record, f"te-link-{address}")
        except MooncakeError:
            sockets.close(sock)
            raise
        except OSError as error:
            sockets.close(sock)
            raise PeerUnavailable(f"{address}: {error}") from error
        link.start()
        return link, record

    def serve(self, sock: socket.socket, hello: Hello) -> None:
        """An accepted control connection; returns when it has ended."""
        record = self._peers.meet(hello.identity)
        if record.said_goodbye:
            raise PeerUnavailable("that instance has said goodbye")
        self._link(sock, record, f"te-link-from-{hello.identity.address}").run()

    def _link(self, sock: socket.socket, record: PeerRecord, name: str) -> Link:
        link = Link(sock, self.control.handle, self._closed, name)
        link.context = record
        record.links.add(link)
        return link

    def _closed(self, link: Link) -> None:
        record = link.context
        assert isinstance(record, PeerRecord)
        session = self.get(record.identity.instance_id)
        if session is not None and session.link is link:
            session.void_regions()
        served = list(record.streams.items())  # before the look at the links: one that comes now has none among them
        record.links.discard(link)
        record.tidy()
        for stream_id, stream in served:
            # The peer gives up what it opened over a link with that link; and with the last one nobody could tell us any more
            # to end what passes our fences.
            if stream.one_sided and (stream_id in link.opened or not record.links):
                stream.stop(0.0)

    def link_to(self, record: PeerRecord, deadline: float) -> Link:
        """Any live link with that instance, dialled if need be."""
        for link in list(record.links):
            if link.alive:
                return link
        session = self.get(record.identity.instance_id)
        if session is not None:
            return session.ensure_link(deadline)
        within = min(deadline, time.monotonic() + self._config.connect_timeout_s)
        return self._dial(record.identity.address, record.identity.instance_id, within)[0]

    def meet(self, address: str, instance_id: str, deadline: float) -> PeerRecord:
        """Dial an address only to learn who is there."""
        return self._dial(address, instance_id, deadline)[1]

    def probe(self, address: str, deadline: float) -> bool:
        """Whether an engine with our token answers there."""
        for session in self.sessions():
            if session.address == address and self._answers(session, deadline):
                return True
        with contextlib.suppress(MooncakeError, ValueError):
            sock, _ = handshake.dial(
                parse_address(address),
                self._identity,
                self._config.cluster_token,
                want="",
                stream_id="",
                deadline=deadline,
                security=tls.of(self._config),
            )
            sockets.close(sock)
            return True
        return False

    def links(self) -> list[Link]:
        return [link for record in self._peers.all() for link in list(record.links)]
