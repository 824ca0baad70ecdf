"""The same calls on whichever `mooncake.engine` is imported; prints what they return as JSON. Nothing of ours is imported."""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable
from typing import Any

import mooncake.engine
from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode

MIB = 1 << 20
W, R = TransferOpcode.Write, TransferOpcode.Read
RESULTS: dict[str, Any] = {}


def case(name: str, call: Callable[[], Any]) -> Any:
    try:
        result = call()
    except TypeError:
        result = "TypeError"
    RESULTS[name] = result
    return result


def engine() -> TransferEngine:
    made = TransferEngine()
    case("initialize", lambda: made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""))
    return made


def buffer() -> tuple[Any, int]:
    memory = ctypes.create_string_buffer(MIB)
    return memory, ctypes.addressof(memory)


def until_over(a: TransferEngine, ident: int) -> int:
    while (state := a.transfer_check_status(ident)) == 0:
        time.sleep(0.001)
    return state


def registration(a: TransferEngine, at: int) -> None:
    case("register", lambda: a.register_memory(at, MIB))
    case("register again", lambda: a.register_memory(at, MIB))
    case("register overlapping", lambda: a.register_memory(at + 4096, MIB // 2))
    case("unregister", lambda: a.unregister_memory(at))
    case("unregister again", lambda: a.unregister_memory(at))
    case("unregister unknown batch", lambda: a.batch_unregister_memory([at]))
    case("register nothing", lambda: a.register_memory(at, 0))
    case("register null", lambda: a.register_memory(0, 10))
    case("register batch", lambda: a.batch_register_memory([at, at + 4096], [4096, 4096]))
    case("register unequal batch", lambda: a.batch_register_memory([at + 9000, at + 10000], [10]))
    case("unregister batch", lambda: a.batch_unregister_memory([at, at + 4096]))
    case("register overlapping batch", lambda: a.batch_register_memory([at, at + 2048], [4096, 4096]))
    case("nothing is left of it", lambda: [a.unregister_memory(at), a.unregister_memory(at + 2048)])
    case("empty batches", lambda: [a.batch_register_memory([], []), a.batch_unregister_memory([])])


def transfers(a: TransferEngine, b: TransferEngine, at: int, there: int, peer: str) -> None:
    case("write", lambda: a.transfer_sync_write(peer, at, there, MIB))
    case("arrived", lambda: ctypes.string_at(there, 3).decode())
    case("write nothing", lambda: a.transfer_sync_write(peer, at, there, 0))
    case("read", lambda: a.transfer_sync_read(peer, at, there, 100))
    case("opcode", lambda: [a.transfer_sync(peer, at, there, 10, W), a.transfer_sync(peer, at, there, 10, R)])
    case("hint", lambda: a.transfer_sync_write(peer, at, there, 10, "anything"))
    case("batch", lambda: a.batch_transfer_sync_write(peer, [at, at + 10], [there, there + 20], [10, 10]))
    case("batch of tuples", lambda: a.batch_transfer_sync_read(peer, (at,), (there,), (10,)))
    case("batch of ranges", lambda: a.batch_transfer_sync_read(peer, range(at, at + 1), [there], [10]))
    case("batch of sets", lambda: a.batch_transfer_sync_read(peer, {at}, [there], [10]))
    case("batch of none", lambda: a.batch_transfer_sync_read(peer, None, [there], [10]))
    case("unequal batch", lambda: a.batch_transfer_sync_write(peer, [at], [there], [1, 2]))
    case("empty batch", lambda: a.batch_transfer_sync_write(peer, [], [], []))
    case("beyond the region", lambda: a.transfer_sync_write(peer, at, there + MIB - 50, 100))
    case("beyond the region, batch", lambda: a.batch_transfer_sync_write(peer, [at], [there + MIB], [100]))
    case("over 4 GiB", lambda: a.transfer_sync_write(peer, at, there, (1 << 32) + 10))
    case("local unregistered", lambda: a.transfer_sync_write(peer, there, there, 10))
    case("note", lambda: a.transfer_sync(peer, at, there, 10, W, TransferNotify("n", "m")))
    case("batch note", lambda: a.batch_transfer_sync(peer, [at], [there], [10], W, notify=TransferNotify("o", "p")))
    time.sleep(0.2)
    case("notes", lambda: [[n.name, n.msg] for n in b.get_notifies()])
    case("no more notes", lambda: b.get_notifies())


def later(a: TransferEngine, at: int, there: int, peer: str) -> None:
    ident = a.batch_transfer_async_write(peer, [at, at + 50], [there, there + 50], [10, 10])
    case("async id", lambda: ident != 0)
    case("async wait", lambda: a.get_batch_transfer_status([ident]))
    ids = [a.batch_transfer_async_read(peer, [at], [there], [10]) for _ in range(3)]
    case("async wait for three", lambda: a.get_batch_transfer_status(ids))
    case("async wait for none", lambda: a.get_batch_transfer_status([]))
    case("async unequal", lambda: a.batch_transfer_async(peer, [at], [there], [], W))
    one = a.transfer_submit_write(peer, at, there, 1000)
    case("submit id", lambda: one != 0)
    case("submit end", lambda: until_over(a, one))
    bad = a.transfer_submit_write(peer, at, there + MIB, 1000)
    case("submit failing", lambda: bad == 0 or until_over(a, bad) == -1)


def peers(a: TransferEngine, at: int, there: int, peer: str) -> None:
    case("dead peer", lambda: a.transfer_sync_write("127.0.0.1:1", at, there, 10))
    case("dead peer, batch", lambda: a.batch_transfer_sync_read("127.0.0.1:1", [at], [there], [10]))
    case("dead peer, async", lambda: a.batch_transfer_async_write("127.0.0.1:1", [at], [there], [10]))
    case("dead peer, submit", lambda: a.transfer_submit_write("127.0.0.1:1", at, there, 10))
    case("name without port", lambda: a.transfer_sync_write("nonsense", at, there, 10))
    case("probe", lambda: a.send_probe(peer))
    case("probe the dead", lambda: a.send_probe("127.0.0.1:1"))
    case("probe nonsense", lambda: a.send_probe("nonsense"))
    case("first buffer", lambda: a.get_first_buffer_address(peer) == there)
    case("first buffer of the dead", lambda: a.get_first_buffer_address("127.0.0.1:1"))
    case("warm up", lambda: a.warmup_efa_segment(peer))
    case("topology", lambda: "cpu:0" in json.loads(a.get_local_topology()))
    case("topology of a NIC", lambda: "cpu:0" in json.loads(a.get_local_topology("none_0")))


def managed(a: TransferEngine) -> None:
    at = a.allocate_managed_buffer(1000)
    case("managed", lambda: at != 0)
    case("managed write", lambda: a.write_bytes_to_buffer(at, b"ab\0cd", 5))
    case("managed read", lambda: list(a.read_bytes_from_buffer(at, 5)))
    case("managed write str", lambda: a.write_bytes_to_buffer(at, "xyz", 2))
    case("managed read again", lambda: list(a.read_bytes_from_buffer(at, 5)))
    case("managed free", lambda: a.free_managed_buffer(at, 1000))
    case("managed, far too much", lambda: a.allocate_managed_buffer(1 << 40))


def wrong(a: TransferEngine, at: int, there: int, peer: str) -> None:
    case("few arguments", lambda: a.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp"))
    case("text for a number", lambda: a.register_memory("1", 1))
    case("a float", lambda: a.register_memory(1.5, 1))
    case("a negative address", lambda: a.register_memory(-1, 1))
    case("a negative length", lambda: a.transfer_sync_write(peer, at, there, -1))
    case("more than 64 bits", lambda: a.transfer_sync_write(peer, 1 << 64, there, 1))
    case("a number for a name", lambda: a.transfer_sync_write(5, at, there, 1))
    case("bytes for a name", lambda: a.transfer_sync_write(peer.encode(), at, there, 1))
    case("no hint", lambda: a.transfer_sync_write(peer, at, there, 1, None))
    case("a number for an opcode", lambda: a.transfer_sync(peer, at, there, 1, 1))
    case("an unknown keyword", lambda: a.register_memory(buffer_addr=at, capacity=1, colour=1))
    case("a note of one part", lambda: TransferNotify("n"))
    case("true for a length", lambda: a.transfer_sync_write(peer, at, there, True))


def module() -> None:
    case("opcodes", lambda: [int(R), int(W), W.name, TransferEngine.TransferOpcode is TransferOpcode, R == 0])
    case("flags", lambda: {n: getattr(mooncake.engine, n) for n in dir(mooncake.engine) if n.startswith("SUPPORT_")})
    case("probe before initialize", lambda: TransferEngine().send_probe("127.0.0.1:1"))
    case("engine before initialize", lambda: TransferEngine().get_engine() is None)


def main() -> None:
    a, b = engine(), engine()
    (memory, at), (_target, there) = buffer(), buffer()
    memory.raw = b"xyz" + b"-" * (MIB - 3)
    peer = f"127.0.0.1:{b.get_rpc_port()}"
    registration(a, at)
    a.register_memory(at, MIB)
    b.register_memory(there, MIB)
    transfers(a, b, at, there, peer)
    later(a, at, there, peer)
    peers(a, at, there, peer)
    managed(a)
    wrong(a, at, there, peer)
    module()
    case("initialize again", lambda: a.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""))
    methods = sorted(name for name in dir(TransferEngine) if not name.startswith("_"))
    print(json.dumps({"results": RESULTS, "methods": methods}))


if __name__ == "__main__":
    main()
