"""TLS on the connections: who is let in, what everybody else is told, and what the wire shows. The contract itself runs as "tcp-tls"."""

from __future__ import annotations

import contextlib
import datetime
import os
import random
import signal
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mooncake.common.config import ClusterConfig, load
from mooncake.common.errors import ConfigError, MooncakeError
from store.node.config import NodeConfig
from store.node.segment import NodeSegment
from tests.transfer_engine.certs import Authority, authority, member
from tests.transfer_engine.conftest import TOKEN
from tests.transfer_engine.peer import Peer
from tests.transfer_engine.relay import Relay
from transfer_engine import (
    AuthenticationFailed,
    EngineConfig,
    Opcode,
    PeerUnavailable,
    TransferCancelled,
    TransferEngine,
    TransferRequest,
    TransferTimeout,
    tls,
)
from transfer_engine.segment import parse_address

MIB = 1 << 20


def _config(files: dict[str, str], **more: object) -> EngineConfig:
    return EngineConfig(**({"cluster_token": TOKEN, "transports": ("tcp",)} | files | more))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with Peer(_config(member("peer"))) as made:
        yield made


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine(_config(member("engine"))) as made:
        yield made


def _moves(engine: TransferEngine, address: str, at: int, count: int = MIB) -> np.ndarray:
    """Read `count` bytes from a peer."""
    local = np.zeros(count, np.uint8)
    to = engine.register_buffer(local)
    engine.transfer_sync([TransferRequest(Opcode.READ, to, engine.open_segment(address), at, count)], 5.0)
    engine.unregister_local_memory(to)
    return local


def _until(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + 5
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


def _served(engine: TransferEngine) -> int:
    return engine.register_buffer(np.full(MIB, 7, np.uint8))


# --- who is let in ----------------------------------------------------------------------------------------------------


def _refused(
    one: TransferEngine, other: TransferEngine, text: str, kind: type[MooncakeError] = AuthenticationFailed
) -> None:
    began = time.monotonic()
    with pytest.raises(kind, match=text):
        one.open_segment(other.address)
    assert not one.send_probe(other.address)
    assert time.monotonic() - began < 2.0


def test_only_the_same_authority_is_let_in() -> None:
    stranger = Authority()
    with (
        TransferEngine(_config(member("one"))) as one,
        TransferEngine(_config(stranger.member("stranger"))) as other,
        TransferEngine(_config(stranger.member("gullible", ca=authority().ca))) as gullible,
    ):
        _refused(one, other, "its certificate is refused.*our tls_ca must have signed it")
        _refused(other, one, "its certificate is refused")
        # It trusts us, but we do not trust it: the other side has to tell.
        _refused(gullible, one, "refuses our certificate.*its tls_ca must have signed our tls_cert")
        assert _until(lambda: one.stats()["authentication_failures"] >= 4)
        with TransferEngine(_config(member("friend"))) as friend:
            assert (_moves(friend, one.address, _served(one)) == 7).all()


def test_a_certificate_out_of_date_is_refused_on_both_sides() -> None:
    yesterday = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    with (
        TransferEngine(_config(member("one"))) as one,
        TransferEngine(_config(authority().member("expired", not_after=yesterday))) as old,
    ):
        _refused(one, old, "expired")
        _refused(old, one, "(?i)refuses our certificate.*expired.*in date")


def test_plain_and_tls_engines_tell_each_other_what_to_set() -> None:
    fix = "tls_cert, tls_key and tls_ca"
    with TransferEngine(_config({})) as plain, TransferEngine(_config(member("one"))) as secured:
        _refused(plain, secured, f"takes TLS only: set {fix} here, or leave them out there")
        _refused(secured, plain, f"does not speak TLS.*set {fix} there, or leave them out here")
        for engine in (plain, secured):
            assert _until(lambda: engine.stats()["authentication_failures"] == 2)  # noqa: B023
            assert _until(lambda: engine.stats()["open_connections"] == 0)  # noqa: B023


def test_the_token_counts_inside_tls_too() -> None:
    with (
        TransferEngine(_config(member("one"))) as one,
        TransferEngine(_config(member("other"), cluster_token=b"another")) as other,
    ):
        _refused(one, other, "does not hold our cluster token")


def test_a_member_without_the_token_cannot_stand_in_the_middle(engine: TransferEngine) -> None:
    """It ends TLS on both sides with a good certificate and passes the token's handshake on: the proofs do not fit its sessions."""
    files = authority().member("relay")
    spy = tls.Tls(files["tls_cert"], files["tls_key"], files["tls_ca"])

    def wrap(sock: socket.socket, accepted: bool) -> socket.socket:
        made = spy.wrap(sock, target=accepted)
        tls.shake_hands(made, time.monotonic() + 5)
        made.recv_into = ssl.SSLSocket.recv_into.__get__(made)  # type: ignore[method-assign]  # as a program with blocking sockets
        return made

    with (
        TransferEngine(_config(member("one"))) as one,
        Relay(one.address, watch=True, wrap=wrap) as relay,
        pytest.raises(AuthenticationFailed, match="does not hold our cluster token"),
    ):
        engine.open_segment(relay.address)
    assert b"MCT1" in relay.seen  # it did see the handshake, in the clear


# --- the files --------------------------------------------------------------------------------------------------------


def test_wrong_settings_are_refused_with_the_field(tmp_path: Path) -> None:
    files = member("one")
    with pytest.raises(ConfigError, match="go together"):
        EngineConfig(tls_cert=files["tls_cert"])
    for field in files:
        with pytest.raises(ConfigError, match=f"{field}.*No such file"):
            TransferEngine(_config(files | {field: "/nowhere"}))
    with pytest.raises(ConfigError, match="tls_key"):
        TransferEngine(_config(files | {"tls_key": member("other")["tls_key"]}))
    with pytest.raises(ConfigError, match="tls_ca"):
        TransferEngine(_config(files | {"tls_ca": files["tls_key"]}))
    locked = tmp_path / "locked.key"
    os.system(f"openssl pkcs8 -topk8 -in {files['tls_key']} -out {locked} -passout pass:secret")
    with pytest.raises(ConfigError, match="encrypted"):
        TransferEngine(_config(files | {"tls_key": str(locked)}))


def test_renewed_files_are_used_without_a_restart(tmp_path: Path) -> None:
    mine = {field: tmp_path / field for field in member("one")}

    def install(files: dict[str, str]) -> None:
        for field, path in mine.items():
            path.with_suffix(".new").write_bytes(Path(files[field]).read_bytes())
            path.with_suffix(".new").rename(path)

    stranger = Authority()
    install(stranger.member("early"))
    with (
        TransferEngine(_config({field: str(path) for field, path in mine.items()})) as one,
        TransferEngine(_config(member("other"))) as other,
    ):
        _refused(other, one, "certificate is refused")
        mine["tls_key"].write_text("half a file")
        _refused(other, one, "certificate is refused")  # goes on with what it has
        install(authority().member("late"))
        assert (_moves(other, one.address, _served(one)) == 7).all()
        assert (_moves(one, other.address, _served(other)) == 7).all()


def test_a_store_node_takes_its_files_from_its_options() -> None:
    files = {f"transfer_{field}": path for field, path in member("node").items()}
    options = {"segment_bytes": "1MiB", "transports": "tcp", **files}
    node = NodeSegment(
        ClusterConfig(cluster_token=TOKEN.decode()), load(NodeConfig, "store-node", environ={}, given=options), "node"
    )
    try:
        with TransferEngine(_config(member("writer"))) as writer, TransferEngine(_config({})) as plain:
            assert not _moves(writer, node.engine.address, node.buffer.address).any()
            _refused(plain, node.engine, "takes TLS only")
    finally:
        node.close()


# --- on the wire ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secured", [False, True])
def test_nothing_readable_passes_the_wire(secured: bool) -> None:
    secret = b"a KVCache of somebody's prompt. " * 1024
    with (
        TransferEngine(_config(member("one") if secured else {})) as one,
        TransferEngine(_config(member("other") if secured else {})) as other,
        Relay(one.address, watch=True) as relay,
    ):
        heard: list[bytes] = []
        one.on_notify(lambda _instance, _address, payload: heard.append(payload))
        memory, local = np.zeros(len(secret), np.uint8), np.frombuffer(bytearray(secret), np.uint8)
        base, at = one.register_buffer(memory), other.register_buffer(local)
        segment = other.open_segment(relay.address)
        for opcode in (Opcode.WRITE, Opcode.READ):
            other.transfer_sync([TransferRequest(opcode, at, segment, base, len(secret))], 5.0, notify=secret[:32])
        assert memory.tobytes() == secret and _until(lambda: len(heard) == 2)
    readable = secret[:32] in relay.seen or one.instance_id.encode() in relay.seen
    assert readable is not secured and len(relay.seen) > 2 * len(secret)


def test_a_shut_down_connection_never_hands_out_ciphertext(engine: TransferEngine, peer: Peer) -> None:
    """The standard class forgets its keys at a shutdown and then returns what lies in the kernel's buffer."""
    here, there = socket.socketpair()
    files = [tls.Tls(*(member(name)[field] for field in ("tls_cert", "tls_key", "tls_ca"))) for name in ("a", "b")]
    near, far = files[0].wrap(here, target=True), files[1].wrap(there, target=False)
    hands = threading.Thread(target=tls.shake_hands, args=(near, time.monotonic() + 5))
    hands.start()
    tls.shake_hands(far, time.monotonic() + 5)
    hands.join()
    near.settimeout(0)
    far.settimeout(0)
    far.send(b"0123456789" * 100)
    time.sleep(0.05)
    near.shutdown(socket.SHUT_RDWR)
    buffer = bytearray(4096)
    try:
        got = near.recv_into(buffer)
    except OSError:
        got = 0
    assert bytes(buffer[:got]) == b"0123456789" * (got // 10)
    near.close()
    far.close()


def test_both_directions_of_a_control_connection_at_once(engine: TransferEngine, peer: Peer) -> None:
    """Many threads ask while the reader reads: OpenSSL must not be entered twice."""
    segment = engine.open_segment(peer.address)
    problems: list[BaseException] = []

    def ask() -> None:
        try:
            for size in (1, 60000, 300, 16384) * 20:
                engine.send_notify(segment, bytes(size))
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not problems
    assert len(peer.call("wait_notes", 480, 5.0)) >= 480


def test_a_control_frame_that_was_cut_in_half_ends_the_connection(engine: TransferEngine, peer: Peer) -> None:
    segment = engine.open_segment(peer.address)
    link = engine.connections.links()[0]
    peer.signal(signal.SIGSTOP)
    try:
        for _ in range(200):  # until the kernel's buffers are full
            with contextlib.suppress(TransferTimeout, PeerUnavailable):
                engine.send_notify(segment, bytes(65536), deadline_s=0.02)
            if not link.alive:
                break
        assert not link.alive  # another frame after half of one would have been taken for the rest of it
    finally:
        peer.signal(signal.SIGCONT)
    time.sleep(0.6)  # peer_rest_s
    engine.send_notify(segment, b"on a new one", deadline_s=5.0)


# --- faults, as without TLS -------------------------------------------------------------------------------------------


def _requests(
    engine: TransferEngine, peer: Peer, opcode: Opcode, count: int, size: int = 16 * MIB
) -> list[TransferRequest]:
    at, base = engine.register_buffer(np.ones(size, np.uint8)), peer.call("allocate", size, False)
    segment = engine.open_segment(peer.address, instance_id=peer.instance_id)
    return [TransferRequest(opcode, at, segment, base, size)] * count


@pytest.mark.parametrize("opcode", list(Opcode))
def test_streams_cut_in_the_middle_are_repaired(peer: Peer, opcode: Opcode) -> None:
    with TransferEngine(_config(member("engine"), max_retries=50)) as engine:
        requests = _requests(engine, peer, opcode, 8)
        batch = engine.allocate_batch_id(8)
        engine.submit_transfer(batch, requests, deadline_s=30.0)
        for _ in range(4):
            time.sleep(0.03)
            for stream in list(engine._transports[0]._streams):  # type: ignore[attr-defined]
                stream._sock.shutdown(socket.SHUT_RDWR)
        assert engine.wait(batch, 30.0).ok


@pytest.mark.parametrize("opcode", list(Opcode))
def test_a_frozen_peer_costs_the_deadline(engine: TransferEngine, peer: Peer, opcode: Opcode) -> None:
    requests = _requests(engine, peer, opcode, 1)
    engine.transfer_sync(requests, 10.0)
    peer.signal(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(TransferTimeout):
        engine.transfer_sync(requests, 0.4)
    assert time.monotonic() - began < 1.5
    peer.signal(signal.SIGCONT)
    engine.transfer_sync(requests, 10.0)


def test_the_fence_holds(engine: TransferEngine, peer: Peer) -> None:
    memory = np.zeros(8 * MIB, np.uint8)
    at = engine.register_buffer(memory)
    for group in (11, 12, 13):
        memory[:] = 0
        peer.call("start_writing", engine.address, at, len(memory), group, MIB)
        until = time.monotonic() + 10
        while not memory[-1] and time.monotonic() < until:
            time.sleep(0.0005)
        assert memory[-1] and engine.cancel_incoming(group, peer.address)
        memory[:] = 0
        time.sleep(0.02)
        assert not memory.any()
        assert set(peer.call("end_writing")) == {TransferCancelled.__name__}


def test_close_with_transfers_outstanding_takes_under_three_seconds(peer: Peer) -> None:
    engine = TransferEngine(_config(member("engine")))
    batch = engine.allocate_batch_id(200)
    engine.submit_transfer(batch, _requests(engine, peer, Opcode.WRITE, 200), deadline_s=60.0)
    time.sleep(0.05)
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 3.0 and engine.get_batch_status(batch).state.terminal


# --- hostile bytes ----------------------------------------------------------------------------------------------------


def _client_hello() -> bytes:
    """What a well-behaved client says first."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="x").do_handshake()
    return outgoing.read()


def test_hostile_bytes_on_a_tls_port() -> None:
    seed = int(os.environ.get("FUZZ_SEED", "0")) or random.randrange(1 << 30)
    print(f"FUZZ_SEED={seed}")
    chance = random.Random(seed)
    hello = _client_hello()
    with TransferEngine(_config(member("one"), connect_timeout_s=0.5)) as one:
        memory = np.full(MIB, 9, np.uint8)
        at = one.register_buffer(memory)
        before = len(os.listdir("/proc/self/fd"))
        for turn in range(150):
            mutated = bytearray(hello)
            for _ in range(chance.randrange(1, 8)):
                mutated[chance.randrange(len(mutated))] = chance.randrange(256)
            data = (
                bytes(mutated),
                hello + chance.randbytes(500),
                hello[: chance.randrange(1, len(hello))],
                struct.pack("!BHH", chance.randrange(20, 25), 0x0303, chance.randrange(65536)) + chance.randbytes(300),
                chance.randbytes(chance.randrange(1, 2000)),
                struct.pack("<4sH", b"MCT1", 200) + chance.randbytes(300),
            )[turn % 6]
            with socket.create_connection(parse_address(one.address), timeout=3.0) as sock:
                sock.sendall(data)
                if chance.random() < 0.7:
                    sock.shutdown(socket.SHUT_WR)
        assert _until(lambda: one.stats()["open_connections"] == 0)
        assert _until(lambda: len(os.listdir("/proc/self/fd")) <= before)
        assert (memory == 9).all()
        with TransferEngine(_config(member("friend"))) as friend:
            assert (_moves(friend, one.address, at) == 9).all()
