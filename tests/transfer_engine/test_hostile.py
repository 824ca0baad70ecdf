"""Bytes that no honest peer sends, on the port and after a good handshake: typed ends, engine alive, memory untouched."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import time
import uuid

import msgspec
import numpy as np
import pytest

from mooncake.common.errors import ProtocolViolation
from tests.transfer_engine.conftest import TOKEN
from transfer_engine import EngineConfig, Opcode, TransferEngine, TransferRequest, handshake, protocol
from transfer_engine.segment import parse_address


@pytest.fixture
def victim(engine: TransferEngine) -> tuple[TransferEngine, np.ndarray, int]:
    memory = np.full(1 << 20, 9, np.uint8)
    return engine, memory, engine.register_buffer(memory)


def _alive(victim: tuple[TransferEngine, np.ndarray, int]) -> None:
    engine, memory, at = victim
    assert (memory == 9).all()
    with TransferEngine(EngineConfig(cluster_token=TOKEN, transports=("tcp",))) as friend:
        mine = np.zeros(1 << 20, np.uint8)
        to = friend.register_buffer(mine)
        friend.transfer_sync([TransferRequest(Opcode.READ, to, friend.open_segment(engine.address), at, 1 << 20)], 5.0)
        assert (mine == 9).all()


def _connect(engine: TransferEngine, *, stream: bool) -> socket.socket:
    identity = msgspec.structs.replace(engine.identity, instance_id=uuid.uuid4().hex, address="127.0.0.1:1")
    sock, _ = handshake.dial(
        parse_address(engine.address), identity, TOKEN, want="", stream_id=uuid.uuid4().hex if stream else "",
        deadline=time.monotonic() + 2,
    )  # fmt: skip
    sock.settimeout(3.0)
    return sock


def _ends(sock: socket.socket) -> bool:
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def test_fuzzed_bytes_on_the_port(victim: tuple[TransferEngine, np.ndarray, int]) -> None:
    engine = victim[0]
    seed = int(os.environ.get("FUZZ_SEED", "0")) or random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    until = time.monotonic() + float(os.environ.get("FUZZ_S", "2"))
    prefixes = [b"", b"MCT1", struct.pack("<4sH", b"MCT1", 200), struct.pack("<4sH", b"MCT1", 65535)]
    while time.monotonic() < until:
        with socket.create_connection(parse_address(engine.address), timeout=2.0) as sock:
            try:
                sock.sendall(chance.choice(prefixes) + chance.randbytes(chance.randrange(1, 3000)))
                if chance.random() < 0.3:
                    sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass
    _alive(victim)


@pytest.mark.parametrize("stream", [False, True])
def test_fuzzed_bytes_after_the_handshake(victim: tuple[TransferEngine, np.ndarray, int], stream: bool) -> None:
    engine, _, at = victim
    chance = random.Random(5)
    for turn in range(40):
        with _connect(engine, stream=stream) as sock:
            start = b""
            if stream and turn % 2:
                start = protocol.FrameHeader(protocol.WRITE, 0, 2, 1, 0, 100).encode() + struct.pack(
                    "<QQQQ", at, 50, at, 49
                )
            elif turn % 2:
                start = protocol.CONTROL.pack(300, chance.randrange(2), 1)
            with contextlib.suppress(OSError):  # the engine may have hung up in the middle
                sock.sendall(start + chance.randbytes(400))
                sock.shutdown(socket.SHUT_WR)
            assert _ends(sock)
    _alive(victim)


def _frame(kind: int, table: list[tuple[int, int]], total: int, payload: bytes = b"") -> bytes:
    head = protocol.FrameHeader(kind, 0, len(table), 1, 0, total).encode()
    return head + b"".join(struct.pack("<QQ", *row) for row in table) + payload


def test_forged_addresses_are_refused_and_the_stream_stays(victim: tuple[TransferEngine, np.ndarray, int]) -> None:
    engine, _, at = victim
    with _connect(engine, stream=True) as sock:
        for address, length in ((4096, 100), (at - 1, 100), (at + (1 << 20) - 99, 100), ((1 << 64) - 50, 100)):
            sock.sendall(_frame(protocol.WRITE, [(address, length)], length, b"\0" * length))
            answer = protocol.decode_header(sock.recv(protocol.HEADER_BYTES, socket.MSG_WAITALL))
            assert answer.kind == protocol.ACK and answer.status == 1
            sock.sendall(_frame(protocol.READ, [(at, 8), (address, length)], length + 8))
            answer = protocol.decode_header(sock.recv(protocol.HEADER_BYTES, socket.MSG_WAITALL))
            assert answer.kind == protocol.DATA and answer.status == 1 and answer.total == 0
    _alive(victim)


@pytest.mark.parametrize(
    "frame",
    [
        _frame(protocol.WRITE, [(4096, 10)], 11),
        _frame(protocol.WRITE, [(4096, 0)], 1),
        _frame(protocol.WRITE, [(4096, (1 << 64) - 1), (4096, 2)], 1),
        _frame(protocol.READ, [(4096, 1)] * 1025, 1025),
        _frame(protocol.READ, [], 1),
        _frame(protocol.WRITE, [(4096, 1)], protocol.MAX_FRAME_BYTES + 1),
        _frame(protocol.ACK, [], 0),
        _frame(9, [(4096, 1)], 1),
        b"GET / HTTP/1.1\r\nHost: x\r\nUser-Agent: a browser\r\n\r\n",
    ],
)
def test_malformed_frames_end_the_connection(victim: tuple[TransferEngine, np.ndarray, int], frame: bytes) -> None:
    with _connect(victim[0], stream=True) as sock:
        sock.sendall(frame)
        assert _ends(sock)
    assert victim[0].stats()["protocol_violations"] == 1
    _alive(victim)


def test_a_truncated_frame_changes_nothing_else(victim: tuple[TransferEngine, np.ndarray, int]) -> None:
    engine, memory, at = victim
    with _connect(engine, stream=True) as sock:
        sock.sendall(_frame(protocol.WRITE, [(at, 1000)], 1000, b"\1" * 10))
    engine.unregister_local_memory(at)  # returns: the cut frame lets go of the region
    assert not (memory[10:] != 9).any()


def test_a_silent_dialler_is_dropped() -> None:
    with TransferEngine(EngineConfig(connect_timeout_s=0.2)) as engine:
        with socket.create_connection(parse_address(engine.address), timeout=3.0) as sock:
            assert _ends(sock)
        assert engine.stats()["open_connections"] == 0


def test_connections_are_bounded() -> None:
    with TransferEngine(EngineConfig(cluster_token=TOKEN, max_connections=3)) as engine:
        kept = [_connect(engine, stream=False) for _ in range(3)]
        with pytest.raises(Exception, match="refused"):
            _connect(engine, stream=False)
        for sock in kept:
            sock.close()


def test_decoding_is_total() -> None:
    chance = random.Random(1)
    for _ in range(2000):
        raw = chance.randbytes(protocol.HEADER_BYTES)
        for data in (raw, struct.pack("<I", protocol.DATA_MAGIC) + raw[4:]):
            with contextlib.suppress(ProtocolViolation):
                protocol.decode_header(data)
        for decode in (protocol.decode_request, protocol.decode_reply):
            with contextlib.suppress(ProtocolViolation):
                decode(chance.randbytes(chance.randrange(40)))
