"""Fuzzing of the port: random bytes and mutations of every valid message, before and after a good handshake, control and data.

The engine stays alive, its memory outside the attacked range untouched, descriptors and resident memory bounded. 10 s; MOONCAKE_FUZZ_S
sets another time, MOONCAKE_FUZZ_SEED a seed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import socket
import struct
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from mooncake.common.errors import MooncakeError
from tests.transfer_engine.conftest import TOKEN
from transfer_engine import EngineConfig, Opcode, TransferEngine, TransferRequest, TransferTimeout, handshake, protocol
from transfer_engine.handshake import Hello, Identity, Welcome
from transfer_engine.segment import parse_address

MIB = 1 << 20
_PREFIX = struct.Struct("<4sH")


class Target:
    """Four megabytes in a row: unregistered, attacked, registered for ourselves only, unregistered."""

    def __init__(self) -> None:
        self.engine = TransferEngine(
            EngineConfig(cluster_token=TOKEN, transports=("tcp",), connect_timeout_s=0.5, stall_timeout_s=0.5)
        )
        self.engine.on_notify(lambda *_: None)
        self.memory = np.frombuffer(mmap.mmap(-1, 4 * MIB), np.uint8)
        self.memory[:] = 9
        self.at = self.memory.ctypes.data + MIB
        self.engine.register_local_memory(self.at, MIB)
        self.engine.register_local_memory(self.at + MIB, MIB, remote_access=False)

    def intact(self) -> bool:
        return bool((self.memory[:MIB] == 9).all() and (self.memory[2 * MIB :] == 9).all())

    def serves(self) -> None:
        """An honest peer gets through, both ways; on a busy machine perhaps not at once."""
        for _ in range(5):
            with contextlib.suppress(TransferTimeout):
                return self._serve()
        self._serve()

    def _serve(self) -> None:
        with TransferEngine(EngineConfig(cluster_token=TOKEN, transports=("tcp",))) as friend:
            mine = np.full(MIB, 5, np.uint8)
            segment, at = friend.open_segment(self.engine.address), friend.register_buffer(mine)
            friend.transfer_sync([TransferRequest(Opcode.WRITE, at, segment, self.at, MIB)], 10.0)
            mine[:] = 0
            friend.transfer_sync([TransferRequest(Opcode.READ, at, segment, self.at, MIB)], 10.0)
            assert (mine == 5).all()


class Attacker:
    def __init__(self, target: Target, chance: random.Random) -> None:
        self.target, self.chance = target, chance
        self.address = parse_address(target.engine.address)

    def identity(self) -> Identity:
        """Somebody new each time, from another host."""
        return msgspec.structs.replace(
            self.target.engine.identity, instance_id=uuid.uuid4().hex, host_key="elsewhere", address="127.0.0.1:1"
        )

    def attack(self) -> str:
        kind = self.chance.choice([self.raw, self.hello, self.proof, self.control, self.data])
        try:
            with contextlib.closing(kind()) as sock:
                if self.chance.random() < 0.5:
                    sock.settimeout(0.01)
                    with contextlib.suppress(OSError):
                        sock.recv(1 << 16)
                if self.chance.random() < 0.3:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except (OSError, MooncakeError):
            return kind.__name__ + ": hung up"
        return kind.__name__

    def _connect(self) -> socket.socket:
        sock = socket.create_connection(self.address, timeout=3.0)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    # --- before the handshake is over -----------------------------------------------------------------------------------

    def raw(self) -> socket.socket:
        sock, chance = self._connect(), self.chance
        start = chance.choice(
            [b"", b"MCT1", _PREFIX.pack(b"MCT1", chance.randrange(65536)), b"\x16\x03\x01", b"GET / HTTP/1.1\r\n"]
        )
        sock.sendall(start + chance.randbytes(chance.randrange(3000)))
        return sock

    def _hello(self, stream: bool) -> bytes:
        return msgspec.msgpack.encode(Hello(self.identity(), "", uuid.uuid4().hex if stream else "", os.urandom(32)))

    def hello(self) -> socket.socket:
        sock, body = self._connect(), self.mutate(self._hello(self.chance.random() < 0.5))
        length = len(body) if self.chance.random() < 0.7 else self.chance.randrange(65536)
        sock.sendall(_PREFIX.pack(b"MCT1", length & 0xFFFF) + body)
        return sock

    def proof(self) -> socket.socket:
        """A good Hello, and then no good proof: random, empty, the target's own, or one for another token."""
        sock, body = self._connect(), self._hello(True)
        sock.sendall(_PREFIX.pack(b"MCT1", len(body)) + body)
        length = _PREFIX.unpack(sock.recv(_PREFIX.size, socket.MSG_WAITALL))[1]
        answer = sock.recv(length, socket.MSG_WAITALL)
        welcome = msgspec.msgpack.decode(answer, type=Welcome)
        forged = handshake._mac(b"another token", b"initiator", body, answer)
        proof = self.chance.choice([os.urandom(32), b"", welcome.mac, forged, os.urandom(4096)])
        sock.sendall(_PREFIX.pack(b"MCT1", len(proof)) + proof)
        sock.sendall(self._write(self.target.at, 100, b"\0" * 100))  # as if it had been let in
        return sock

    # --- after a good handshake -----------------------------------------------------------------------------------------

    def _inside(self, stream_id: str, identity: Identity | None = None) -> socket.socket:
        sock, _ = handshake.dial(
            self.address, identity or self.identity(), TOKEN, want="", stream_id=stream_id,
            deadline=time.monotonic() + 3,
        )  # fmt: skip
        sock.settimeout(3.0)
        return sock

    def control(self) -> socket.socket:
        me, chance = self.identity(), self.chance
        sock, stream_id = self._inside("", me), uuid.uuid4().hex
        if chance.random() < 0.3:
            self._inside(
                stream_id, me
            )  # left to the garbage collector: may be closed before, while or after it is asked about
        for _ in range(chance.randrange(1, 6)):
            messages: list[protocol.Request] = [
                protocol.Ping(), protocol.GetRegions(), protocol.Notify(chance.randbytes(200)),
                protocol.CancelGroup(chance.randrange(1 << 64), chance.choice([0.0, -1.0, 1e300, float("nan")])),
                protocol.Revoke(self.target.at, MIB, chance.randrange(1 << 63), 1e9), protocol.Revoke(0, 0, 0, float("nan")),
                protocol.StreamClose(stream_id, chance.choice([float("inf"), float("nan"), -1.0])), protocol.Goodbye(),
            ]  # fmt: skip
            kind = chance.choice([protocol.REQUEST, protocol.REQUEST, protocol.REPLY])
            body = protocol.encode_control(kind, chance.randrange(1 << 64), chance.choice(messages))
            sock.sendall(self.mutate(body) if chance.random() < 0.8 else body)
        return sock

    def _write(self, address: int, length: int, payload: bytes) -> bytes:
        return self._frame(protocol.WRITE, [(address, length)], length) + payload

    @staticmethod
    def _frame(kind: int, table: list[tuple[int, int]], total: int) -> bytes:
        head = protocol.FrameHeader(kind, 0, len(table), 1, 0, total).encode()
        return head + b"".join(struct.pack("<QQ", address & (2**64 - 1), length) for address, length in table)

    def data(self) -> socket.socket:
        sock, chance, at = self._inside(uuid.uuid4().hex), self.chance, self.target.at
        for _ in range(chance.randrange(1, 5)):
            where = chance.choice(
                [
                    at,
                    at - 1,
                    at - MIB,
                    at + MIB - 50,
                    at + MIB,
                    at + 2 * MIB,
                    0,
                    4096,
                    2**64 - 60,
                    chance.randrange(2**64),
                ]
            )
            sizes = [
                chance.choice([1, 100, 4096, MIB, MIB + 1, 2**32, 2**63, 2**64 - 1])
                for _ in range(chance.randrange(1, 4))
            ]
            table = [(where + 7 * i, size) for i, size in enumerate(sizes)]
            total = chance.choice([sum(sizes), sum(sizes) % 2**64, 100, 0, protocol.MAX_FRAME_BYTES]) & (2**64 - 1)
            frame = self._frame(chance.choice([protocol.WRITE, protocol.READ]), table, total)
            if chance.random() < 0.4:
                head = len(frame) if chance.random() < 0.5 else protocol.HEADER_BYTES
                frame = self.mutate(frame[:head]) + frame[head:]
            sock.sendall(frame + b"\1" * min(total, chance.choice([0, 10, 4096, 70_000])))
        return sock

    def mutate(self, data: bytes) -> bytes:
        """A few bytes changed, cut, doubled or added."""
        chance, out = self.chance, bytearray(data)
        for _ in range(chance.randrange(1, 5)):
            at = chance.randrange(len(out) + 1)
            match chance.randrange(5):
                case 0 if at < len(out):
                    out[at] = chance.randrange(256)
                case 1 if at < len(out):
                    out[at] ^= 1 << chance.randrange(8)
                case 2:
                    del out[at:]
                case 3:
                    out[at:at] = chance.randbytes(chance.randrange(20))
                case _:
                    out[at : at + 4] = chance.choice(
                        [b"\xff\xff\xff\xff", b"\0\0\0\0", b"\xdd\xff\xff\xff", b"\xc6\xff\xff\xff"]
                    )
        return bytes(out)


def _rss_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) << 10


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_fuzzed_bytes_and_mutated_messages_on_the_port() -> None:
    seconds = float(os.environ.get("MOONCAKE_FUZZ_S", "10"))
    seed = int(os.environ.get("MOONCAKE_FUZZ_SEED", "0")) or random.randrange(1, 1 << 30)
    print(f"MOONCAKE_FUZZ_SEED={seed}")
    chance = random.Random(seed)
    target = Target()
    attacker = Attacker(target, chance)
    try:
        for _ in range(100):
            attacker.attack()
        target.serves()
        assert _until(lambda: target.engine.stats()["open_connections"] == 0, 5.0)
        descriptors, rss, threads = len(os.listdir("/proc/self/fd")), _rss_bytes(), threading.active_count()
        done: Counter[str] = Counter()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(100):
                done[attacker.attack()] += 1
            assert target.intact()
        print(sum(done.values()), dict(done), target.engine.stats())
        target.serves()
        assert _until(lambda: target.engine.stats()["open_connections"] == 0, 5.0)
        assert _until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors + 2, 3.0)
        assert _until(lambda: threading.active_count() <= threads + 2, 3.0)
        assert _rss_bytes() <= rss + (48 << 20)
        assert target.intact()
        assert min(
            target.engine.stats()[name]
            for name in ("protocol_violations", "authentication_failures", "failed_handshakes")
        )
    finally:
        target.engine.close()
