"""Master, two nodes and clients as processes, over real gRPC, real engines and a real etcd."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mooncake.common.errors import AuthenticationFailed, StoreUnavailable
from store.client import GetItem, PutItem
from tests.etcd import Etcd
from tests.store.cluster import Cluster, User, key, until, value

TOKEN = "store-test-token"
SEGMENT = 4 << 20
KIB = 1024


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory: Path = tmp_path_factory.mktemp("store")
    etcd = Etcd(directory)
    etcd.start()
    cluster = Cluster(etcd.endpoints, directory, token=TOKEN)
    try:
        cluster.start(SEGMENT, "node-0", "node-1")
        yield cluster
    finally:
        cluster.close()
        etcd.close()


@pytest.fixture
def user(cluster: Cluster) -> Iterator[User]:
    user = User(cluster.masters, token=TOKEN, local_segment="node-0")
    until(lambda: len(user.store.status(2.0).segments) == 2)
    user.store.remove_all(2.0, force=True)
    yield user
    user.close()


@pytest.mark.parametrize("transports", [("shm",), ("tcp",)])
def test_what_was_put_comes_back(cluster: Cluster, user: User, transports: tuple[str, ...]) -> None:
    objects = {key(n): value(n, 1000 + n) for n in range(8)}
    assert user.put(objects) == [0] * 8
    assert user.put(objects) == [0] * 8, "was there already"
    other = User(cluster.masters, token=TOKEN, transports=transports)
    for at, (name, expected) in enumerate(objects.items()):
        assert other.get([name], 1000 + at) == [expected]
    assert other.get([key(0), key(99)], 1000) == [value(0, 1000), -704]
    assert other.store.prefix_len([key(0), key(1), key(99), key(2)], 2.0) == 2
    assert other.store.query([key(1), key(99)], 2.0) == [1001, 0]
    assert {r.segment for found in other.store.replicas([*objects], 2.0) for r in found} == {"node-0"}
    other.close()


def test_scatter_and_gather_many_ranges(user: User) -> None:
    """20 objects of 32 ranges of 16 KiB, as a connector sends them."""
    user.close()
    big = User(user.store._env.masters._masters, bytes_=16 << 20, token=TOKEN)  # type: ignore[arg-type]
    objects, ranges, step = 6, 32, 16 * KIB
    source = np.random.default_rng(1).integers(0, 256, objects * ranges * step, np.uint8)
    big.memory[: source.size] = source
    order = np.random.default_rng(2).permutation(objects * ranges)
    addresses = [big.base + int(at) * step for at in order]
    puts = [
        PutItem(key(500 + n), [(a, step) for a in addresses[n * ranges : (n + 1) * ranges]]) for n in range(objects)
    ]
    assert big.store.batch_put(puts, 5.0) == [0] * objects
    big.memory[:] = 0
    gets = [GetItem(*put) for put in puts]
    assert big.store.batch_get(gets, 5.0) == [ranges * step] * objects
    assert np.array_equal(big.memory[: source.size], source)
    assert not big.memory[source.size :].any()
    big.close()


def test_both_segments_and_eviction(user: User) -> None:
    """Three times as much as the pool holds: no put fails, the latest are there, the oldest are not."""
    length = 256 * KIB
    before = user.store.status(2.0).evictions_total
    for n in range(96):
        assert user.put({key(1000 + n): value(n, length)}) == [0]
    status = user.store.status(2.0)
    assert status.evictions_total - before == 64 and status.objects == 32
    assert all(s.allocated_bytes == s.capacity_bytes for s in status.segments)
    assert user.store.query([key(1000), key(1095)], 2.0) == [0, length]
    assert user.get([key(1064 + n) for n in range(0, 32, 4)], length) == [
        value(64 + n, length) for n in range(0, 32, 4)
    ]


def test_an_object_in_several_extents(user: User) -> None:
    length = 1 << 20
    for n in range(8):
        assert user.put({key(n): value(n, length)}) == [0]
    where = {n: user.store.replicas([key(n)], 2.0)[0][0] for n in range(8)}
    first = [n for n in range(8) if where[n].segment == "node-0"]
    removed = [key(first[0]), key(first[2])]
    assert user.store.remove(removed, 2.0) == [0, 0]
    long = value(77, 2 * length)
    assert user.put({key(77): long}) == [0]
    assert len(user.store.replicas([key(77)], 2.0)[0][0].extents) == 2
    assert user.get([key(77)], 2 * length) == [long]
    assert user.get([key(first[1])], length) == [value(first[1], length)]


def test_two_replicas(user: User) -> None:
    assert user.put({key(1): value(1, 5000)}, replicas=2) == [0]
    assert {r.segment for r in user.store.replicas([key(1)], 2.0)[0]} == {"node-0", "node-1"}
    assert user.get([key(1)], 5000) == [value(1, 5000)]


def test_bad_items(user: User) -> None:
    assert user.put({key(1): b"x" * 100}) == [0]
    unregistered = np.zeros(100, np.uint8)
    gets = [
        GetItem(key(1), [(user.base, 99)]),
        GetItem(key(1), []),
        GetItem(b"short", [(user.base, 100)]),
        GetItem(key(1), [(user.base, 100)]),
    ]
    assert user.store.batch_get(gets, 2.0) == [-600, -600, -600, 100]
    assert user.store.batch_get([GetItem(key(1), [(unregistered.ctypes.data, 100)])], 2.0) == [-600]
    puts = [PutItem(key(2), [(unregistered.ctypes.data, 100)])]
    assert user.store.batch_put(puts, 2.0) == [-600]
    assert user.store.batch_put([PutItem(key(3), []), PutItem(key(4), [(user.base, 10)])], 2.0) == [-600, 0]
    assert user.store.query([key(2), key(3), key(4)], 2.0) == [0, 0, 10]
    assert user.put({key(2): b"y" * 100}) == [0], "the failed one is forgotten"
    assert user.put({key(5): b"z" * (user.memory.size)}) in ([0], [-200])


def test_larger_than_the_pool(user: User) -> None:
    assert user.put({key(1): b"x" * 100}) == [0]
    user.close()
    big = User(user.store._env.masters._masters, bytes_=2 * SEGMENT, token=TOKEN)  # type: ignore[arg-type]
    assert big.store.batch_put([PutItem(key(2), [(big.base, SEGMENT + 1)])], 2.0) == [-200]
    assert big.store.query([key(1)], 2.0) == [100], "nothing was evicted in vain"
    big.close()


def test_many_threads(user: User) -> None:
    """Ten threads on one client; no bytes are mixed."""
    length, wrong = 20_000, []
    memory = np.zeros((10, length), np.uint8)
    base = user.engine.register_buffer(memory)

    def work(n: int) -> None:
        at = base + n * length
        for turn in range(8):
            name, expected = key(10_000 + 100 * n + turn), value(100 * n + turn, length)
            memory[n] = np.frombuffer(expected, np.uint8)
            if user.store.batch_put([PutItem(name, [(at, length)])], 10.0) != [0]:
                wrong.append((n, turn, "put"))
            memory[n] = 0
            if (
                user.store.batch_get([GetItem(name, [(at, length)])], 10.0) != [length]
                or memory[n].tobytes() != expected
            ):
                wrong.append((n, turn, "get"))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    user.engine.unregister_local_memory(base)


def test_remove_and_leases(user: User) -> None:
    user.put({key(1): b"a" * 100, key(2): b"b" * 100})
    assert user.store.remove([key(1), key(9)], 2.0) == [0, -704]
    assert user.get([key(1), key(2)], 100) == [-704, b"b" * 100]
    assert user.store.remove_all(2.0, force=True) == 1
    assert user.store.query([key(2)], 2.0) == [0]


def test_deadline_of_a_put_and_a_get(user: User) -> None:
    user.put({key(1): b"a" * 100})
    with pytest.raises(StoreUnavailable):
        user.get([key(1)], 100, deadline_s=0.0)
    assert user.get([key(1)], 100) == [b"a" * 100], "it says nothing about the master"


def test_wrong_token(cluster: Cluster, user: User) -> None:
    stranger = User(cluster.masters, token="wrong")
    with pytest.raises(AuthenticationFailed):
        stranger.store.query([key(1)], 2.0)
    stranger.close()


def test_no_master_opens_the_circuit() -> None:
    user = User(["127.0.0.1:1"], breaker_failures=2, breaker_open_s=60.0)
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            user.store.prefix_len([key(1)], 0.3)
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match="lately"):
        user.store.batch_get([GetItem(key(1), [(user.base, 8)])], 10.0)
    assert time.monotonic() - began < 0.05 and user.store.stats()["circuit_open"] == 1
    user.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        user.store.query([key(1)], 1.0)


def test_metrics_and_pages(cluster: Cluster, user: User) -> None:
    user.put({key(1): b"a" * 100})
    text = page(cluster.roles["store-master-0"].http_url + "/metrics")
    for line in (
        "mooncake_store_master_objects 1.0",
        'mooncake_store_master_segment_allocated_bytes{segment="node-0"} 256.0',
        'mooncake_store_master_segment_capacity_bytes{segment="node-1"} 4.194304e+06',
        "mooncake_store_master_evictions_total",
        'mooncake_store_master_requests_total{call="put_start"}',
        "mooncake_store_master_leading 1.0",
    ):
        assert line in text
    assert page(cluster.roles["store-master-0"].http_url + "/get_all_segments").split() == ["node-0", "node-1"]
    node = cluster.roles["node-0"].http_url
    until(lambda: "mooncake_store_node_objects 1.0" in page(node + "/metrics"))  # once it has heard of the removals
    assert "mooncake_transfer_regions 1.0" in page(node + "/metrics"), "its transfer engine's are there, too"
    assert '"ready": true' in page(cluster.roles["node-0"].http_url + "/ready")


def page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())
