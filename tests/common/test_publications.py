"""Published topologies on a real etcd: seen by others, gone with their publisher, back after etcd lost everything."""

from __future__ import annotations

import asyncio

import pytest

from mooncake.common.publications import MAX_VALUE_BYTES
from mooncake.common.registry import Registry
from tests.common.test_registry import TTL_S, member, until, worker
from tests.etcd import Etcd


async def test_published_replaced_withdrawn(etcd: Etcd) -> None:
    async with member(etcd) as one, member(etcd) as two, member(etcd, "other") as stranger:
        await one.topologies.publish("a-1", b"x")
        await two.topologies.publish("b-2", b"y")
        await until(lambda: one.topologies.all() == two.topologies.all() == {"a-1": b"x", "b-2": b"y"})
        async with member(etcd) as late:
            assert late.topologies.all() == {"a-1": b"x", "b-2": b"y"}
        await one.topologies.publish("a-1", b"z")
        await until(lambda: two.topologies.all()["a-1"] == b"z")
        await one.topologies.withdraw("a-1")
        await until(lambda: list(two.topologies.all()) == ["b-2"])
        assert not stranger.topologies.all() and not two.instances("topology")


async def test_gone_with_a_clean_end_and_with_the_lease_of_a_crash(etcd: Etcd) -> None:
    async with member(etcd) as watcher:
        async with member(etcd) as clean:
            await clean.topologies.publish("a-1", b"x")
            await until(lambda: "a-1" in watcher.topologies.all())
        await until(lambda: not watcher.topologies.all(), 1.5)  # well before the lease would end
        crashed = Registry(etcd.endpoints, "test", lease_ttl_s=TTL_S)
        await crashed.start()
        await crashed.topologies.publish("a-2", b"x")
        await until(lambda: "a-2" in watcher.topologies.all())
        crashed._session._task.cancel()  # type: ignore[union-attr]  # what kill -9 leaves
        await until(lambda: not watcher.topologies.all(), TTL_S + 5)


async def test_kept_through_an_outage_and_written_again_to_an_empty_etcd(etcd: Etcd) -> None:
    async with member(etcd) as one, member(etcd) as two:
        await one.register(worker("a"))
        await one.topologies.publish("a-1", b"x")
        await until(lambda: bool(two.topologies.all()))
        etcd.kill()
        await until(lambda: not one.connected and not two.connected)
        assert two.topologies.all() == {"a-1": b"x"}
        await one.topologies.publish("a-2", b"while etcd is away")
        etcd.empty()
        etcd.start()
        async with member(etcd) as three:  # knows only what etcd says now
            await until(lambda: list(three.topologies.all()) == ["a-1", "a-2"], 15)


async def test_a_value_too_long_is_refused(etcd: Etcd) -> None:
    async with member(etcd) as one:
        with pytest.raises(ValueError, match="at most"):
            await one.topologies.publish("a-1", bytes(MAX_VALUE_BYTES + 1))


async def test_a_close_is_not_lost_to_a_resync_that_comes_with_it(etcd: Etcd) -> None:
    """Its own key vanishing asks for a list in the very moment in which the session is cancelled: every moment is tried."""
    for ticks in range(1, 5):
        async with member(etcd) as one:
            await one.wait_connected(5)
            task = one._session._task
            assert task is not None
            one._session.request_resync()
            for _ in range(ticks):
                await asyncio.sleep(0)
            task.cancel()
            async with asyncio.timeout(5):
                await asyncio.wait({task})
