"""The registry on a real etcd: membership, outages, restarts with and without data, leadership."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from mooncake.common.metrics import serve_http
from mooncake.common.registry import InstanceRecord, Registry
from tests.etcd import Etcd

TTL_S = 2.0


async def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@asynccontextmanager
async def member(etcd: Etcd, cluster: str = "test", **options: float) -> AsyncIterator[Registry]:
    registry = Registry(etcd.endpoints, cluster, lease_ttl_s=TTL_S, probe_every_s=0.2, **options)
    await registry.start()
    try:
        yield registry
    finally:
        await registry.close()


@dataclass
class Seen:
    """What a watcher was told."""

    events: list[tuple[str, str, str]] = field(default_factory=list)

    def __call__(self, kind: str, record: InstanceRecord) -> None:
        self.events.append((kind, record.name, record.instance_id))


def worker(name: str, instance_id: str = "i1", http_url: str = "", **info: object) -> InstanceRecord:
    return InstanceRecord(name, instance_id, "worker", http_url=http_url, info=dict(info))


async def test_up_changed_down(etcd: Etcd) -> None:
    async with member(etcd) as watcher:
        seen = Seen()
        watcher.watch("worker", seen)
        async with member(etcd) as first:
            await first.register(worker("a", slots=1))
            await until(lambda: "a" in watcher.instances("worker"))
            await first.register(worker("a", slots=2))
            await until(lambda: watcher.instances("worker")["a"].info == {"slots": 2})
        await until(lambda: not watcher.instances("worker"), 1.5)  # well before the lease would end
        assert seen.events == [("up", "a", "i1"), ("changed", "a", "i1"), ("down", "a", "i1")]


async def test_late_watcher_gets_the_list_and_roles_are_apart(etcd: Etcd) -> None:
    async with member(etcd) as one, member(etcd) as two, member(etcd, "other") as stranger:
        await one.register(worker("a"))
        await one.register(InstanceRecord("g", "i1", "gateway"))
        await until(lambda: "a" in two.instances("worker"))
        seen = Seen()
        stop = two.watch("worker", seen)
        assert seen.events == [("up", "a", "i1")]
        stop()
        await one.deregister("worker", "a")
        await until(lambda: not two.instances("worker"))
        assert seen.events == [("up", "a", "i1")]
        assert not stranger.instances("worker") and two.instances("gateway")


async def test_restart_under_the_same_name_replaces_the_old_self(etcd: Etcd) -> None:
    async with member(etcd) as watcher:
        seen = Seen()
        watcher.watch("worker", seen)
        async with member(etcd) as old:
            await old.register(worker("a", "old"))
            await until(lambda: bool(seen.events))
            async with member(etcd) as new:
                await new.register(worker("a", "new"))
                await until(lambda: watcher.instances("worker")["a"].instance_id == "new")
                await old.close()  # the old self goes late: the new entry stays
                await asyncio.sleep(TTL_S + 1)
                assert watcher.instances("worker")["a"].instance_id == "new"
        await until(lambda: not watcher.instances("worker"))
        assert [e[0] for e in seen.events] == ["up", "changed", "down"]


async def test_killed_process_is_down_after_its_lease(etcd: Etcd) -> None:
    async with member(etcd) as watcher:
        crashed = Registry(etcd.endpoints, "test", lease_ttl_s=TTL_S)
        await crashed.start()
        await crashed.register(worker("a", http_url="http://127.0.0.1:9"))
        await until(lambda: "a" in watcher.instances("worker"))
        crashed._session._task.cancel()  # type: ignore[union-attr]  # what kill -9 leaves: a lease that nobody prolongs
        await until(lambda: not watcher.instances("worker"), TTL_S + 5)


async def test_vanished_key_of_a_living_process_is_kept(etcd: Etcd) -> None:
    url = await serve_http("127.0.0.1", 0, CollectorRegistry(), ready=lambda: True, instance_id="i1")
    async with member(etcd) as watcher:
        seen = Seen()
        watcher.watch("worker", seen)
        hung = Registry(etcd.endpoints, "test", lease_ttl_s=TTL_S)
        await hung.start()
        await hung.register(worker("a", "i1", str(url)))
        await until(lambda: bool(seen.events))
        hung._session._task.cancel()  # type: ignore[union-attr]
        await asyncio.sleep(TTL_S + 2)
        assert [e[0] for e in seen.events] == ["up"]
        await url.close()
        await until(lambda: not watcher.instances("worker"), 5)


async def test_etcd_killed_and_restarted_with_its_data(etcd: Etcd) -> None:
    async with member(etcd) as one, member(etcd) as two:
        seen = Seen()
        two.watch("worker", seen)
        await one.register(worker("a"))
        await until(lambda: bool(seen.events))
        etcd.kill()
        await until(lambda: not one.connected and not two.connected, 10)
        await one.register(worker("b"))  # while etcd is away
        etcd.start()
        await until(lambda: "b" in two.instances("worker"), 15)
        assert seen.events == [("up", "a", "i1"), ("up", "b", "i1")]
        await asyncio.sleep(TTL_S + 1)
        assert sorted(two.instances("worker")) == ["a", "b"] and len(seen.events) == 2


async def test_etcd_restarted_empty(etcd: Etcd) -> None:
    url = await serve_http("127.0.0.1", 0, CollectorRegistry(), ready=lambda: True, instance_id="i1")
    async with member(etcd) as one, member(etcd) as two:
        seen = Seen()
        two.watch("worker", seen)
        await one.register(worker("a", "i1", str(url)))
        leadership = await one.campaign("conductor", "c", "i1", "127.0.0.1:1")
        epoch = leadership.epoch
        await until(lambda: bool(seen.events))
        etcd.kill()
        etcd.empty()
        etcd.start()
        async with member(etcd) as three:  # knows only what etcd says now
            await until(lambda: "a" in three.instances("worker"), 15)
            await until(lambda: three.leader("conductor") is not None, 15)
            assert three.leader("conductor") == leadership.record
        await one.register(worker("a", "i1", str(url), slots=3))
        await until(lambda: two.instances("worker")["a"].info == {"slots": 3}, 15)
        assert [e[0] for e in seen.events] == ["up", "changed"]
        assert not leadership.lost.is_set()
        await leadership.resign()
        later = await one.campaign("conductor", "c", "i1", "127.0.0.1:1")
        assert later.epoch > epoch  # also on an etcd whose revisions started anew
    await url.close()


@pytest.mark.slow
@pytest.mark.parametrize("paused", [False, True], ids=["killed", "stopped"])
async def test_outage_much_longer_than_the_lease(etcd: Etcd, paused: bool) -> None:
    url = await serve_http("127.0.0.1", 0, CollectorRegistry(), ready=lambda: True, instance_id="i1")
    async with member(etcd) as one, member(etcd) as two:
        seen = Seen()
        two.watch("worker", seen)
        await one.register(worker("a", "i1", str(url)))
        leadership = await one.campaign("store-master", "m", "i1", str(url).removeprefix("http://"))
        await until(lambda: two.leader("store-master") is not None and bool(seen.events))
        etcd.pause() if paused else etcd.kill()
        for _ in range(15):
            await asyncio.sleep(1)
            assert list(two.instances("worker")) == ["a"] and two.leader("store-master") == leadership.record
        assert not two.connected
        etcd.resume() if paused else etcd.start()
        await until(lambda: one.connected and two.connected, 15)
        await asyncio.sleep(TTL_S + 2)
        assert seen.events == [("up", "a", "i1")]
        assert not leadership.lost.is_set() and two.leader("store-master") == leadership.record
        await one.register(worker("a", "i1", str(url), alive=True))
        await until(lambda: two.instances("worker")["a"].info == {"alive": True})
    await url.close()


async def test_start_without_etcd(etcd: Etcd) -> None:
    etcd.kill()
    async with member(etcd) as late:
        assert not late.connected
        await late.register(worker("a"))
        etcd.start()
        async with member(etcd) as watcher:
            await until(lambda: "a" in watcher.instances("worker"), 15)


async def test_campaign_handover(etcd: Etcd) -> None:
    async with member(etcd) as one, member(etcd) as two, member(etcd) as watcher:
        leaders: list[str | None] = []
        watcher.watch_leader("conductor", lambda r: leaders.append(r.instance_id if r else None))
        first = await one.campaign("conductor", "c0", "i1", "127.0.0.1:1")
        waiting = asyncio.create_task(two.campaign("conductor", "c1", "i2", "127.0.0.1:2"))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        await first.resign()
        second = await asyncio.wait_for(waiting, 3)
        assert first.lost.is_set() and second.epoch > first.epoch
        await until(lambda: watcher.leader("conductor") == second.record)
        assert leaders[0] is None and leaders[-1] == "i2"


async def test_restarted_leader_replaces_its_old_self_at_once(etcd: Etcd) -> None:
    async with member(etcd) as one, member(etcd) as two:
        old = await one.campaign("conductor", "c0", "old", "127.0.0.1:1")
        new = await asyncio.wait_for(two.campaign("conductor", "c0", "new", "127.0.0.1:2"), 2)
        await asyncio.wait_for(old.lost.wait(), 2)
        assert new.epoch > old.epoch and not new.lost.is_set()


async def test_leader_that_missed_an_election_steps_down(etcd: Etcd) -> None:
    async with member(etcd) as one, member(etcd) as two:
        old = await one.campaign("conductor", "c0", "i1", "127.0.0.1:1")
        one._session._task.cancel()  # type: ignore[union-attr]  # cut off from etcd, but living on
        new = await asyncio.wait_for(two.campaign("conductor", "c1", "i2", "127.0.0.1:2"), TTL_S + 5)
        assert not old.lost.is_set()
        one._session._task = None
        one._session.start()
        await asyncio.wait_for(old.lost.wait(), 5)
        assert not new.lost.is_set() and one.leader("conductor") == new.record


async def test_compaction_while_cut_off(etcd: Etcd) -> None:
    """Events that compaction swallowed during an outage are found by the new list."""
    async with member(etcd) as one, member(etcd) as two, member(etcd) as admin:
        await one.register(worker("a"))
        await one.register(worker("b"))
        await until(lambda: len(two.instances("worker")) == 2)
        two._session._task.cancel()  # type: ignore[union-attr]
        await one.deregister("worker", "a")
        for i in range(20):
            await one.register(worker("b", turn=i))
        revision = (await admin._session.read("/none"))[1]  # type: ignore[index]
        await admin._session._client.kv.compact(revision, physical=True, timeout=5)
        two._session._task = None
        two._session.start()
        await until(lambda: list(two.instances("worker")) == ["b"])
        await until(lambda: two.instances("worker")["b"].info == {"turn": 19})
