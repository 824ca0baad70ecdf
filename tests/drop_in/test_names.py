"""Engines that find one another by name, through a real etcd and a real HTTP metadata server."""

from __future__ import annotations

import threading
import urllib.parse
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mooncake.engine import TransferEngine
from tests.drop_in.conftest import Here
from tests.drop_in.peer import Peer
from tests.etcd import Etcd


class _Metadata(BaseHTTPRequestHandler):
    """The open-source metadata server's surface: one value a key, and a name is not overwritten."""

    store: dict[str, bytes]

    def _key(self) -> str:
        return urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)["key"][0]

    def _answer(self, code: int, body: bytes = b"") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        value = self.store.get(self._key())
        self._answer(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        value = self.rfile.read(int(self.headers["Content-Length"]))
        if "rpc_meta" in self._key() and self.store.get(self._key(), value) != value:
            return self._answer(400, b"Duplicate rpc_meta key not allowed")
        self.store[self._key()] = value
        self._answer(200)

    def do_DELETE(self) -> None:
        self._answer(200 if self.store.pop(self._key(), None) is not None else 404)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def http_server() -> Iterator[str]:
    handler = type("Metadata", (_Metadata,), {"store": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/metadata"
    server.shutdown()
    server.server_close()


@pytest.fixture(params=["http", "etcd"])
def server(request: pytest.FixtureRequest) -> str:
    if request.param == "http":
        return str(request.getfixturevalue("http_server"))
    etcd: Etcd = request.getfixturevalue("etcd")
    return f"etcd://{etcd.endpoints[0]}"


def test_engines_meet_by_name(server: str, make_peer: Callable[..., Peer]) -> None:
    here = Here(length=4096)
    assert here.engine.initialize("127.0.0.1:0", server, "tcp", "") == 0
    assert here.engine.register_memory(here.at, 4096) == 0
    peer = make_peer(host="127.0.0.1", server=server, protocol="tcp")
    base = peer.call("allocate", 4096)
    assert here.engine.transfer_sync_write("127.0.0.1", here.at, base, 4096) == 0
    assert peer.call("read", base, 0, 4096) == here.array.tobytes()
    assert here.engine.send_probe("127.0.0.1") == 0
    assert here.engine.transfer_sync_write("nobody", here.at, base, 4096) == -1

    peer.kill()  # and its next life takes the name over
    again = make_peer(host="127.0.0.1", server=server, protocol="tcp")
    base = again.call("allocate", 4096)
    deadline_tries = 0
    while here.engine.transfer_sync_write("127.0.0.1", here.at, base, 4096) != 0:
        deadline_tries += 1
        assert deadline_tries < 20, "the new address is found soon"
    assert again.call("read", base, 0, 4096) == here.array.tobytes()
    here.engine.close()


def test_two_living_engines_do_not_share_a_name(http_server: str) -> None:
    one, two = TransferEngine(), TransferEngine()
    assert one.initialize("127.0.0.1", http_server, "tcp", "") == 0
    assert two.initialize("127.0.0.1", http_server, "tcp", "") == -1
    assert two.get_rpc_port() == -1
    one.close()  # takes its name back
    assert two.initialize("127.0.0.1", http_server, "tcp", "") == 0
    two.close()


def test_the_kind_may_come_apart(http_server: str, etcd: Etcd) -> None:
    engine = TransferEngine()
    assert engine.initialize_ext("127.0.0.1", http_server, "tcp", "", "http") == 0
    assert engine.initialize_ext("127.0.0.1", etcd.endpoints[0], "tcp", "", "etcd") == 0
    assert engine.initialize_ext("127.0.0.1", "P2PHANDSHAKE", "tcp", "", "P2PHANDSHAKE") == 0
    engine.close()


@pytest.mark.parametrize("server", ["http://127.0.0.1:1/metadata", "etcd://127.0.0.1:1", "redis://127.0.0.1:1", "what"])
def test_a_server_that_is_not_there_is_a_clear_failure(server: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", server, "tcp", "") == -1
    assert any(server.removeprefix("etcd://") in record.getMessage() for record in caplog.records)
    assert engine.get_rpc_port() == -1
