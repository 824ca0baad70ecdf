"""The connector on real vLLM servers and a real store, without gateway, Conductor and worker host.

Two engines with chunked prefill (512 tokens a step) and a plain one; one start for all tests of this file.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from mooncake.vllm.host_link import PrefillFinished, PrefillStarted
from tests.e2e.conftest import Beds
from tests.etcd import Etcd
from tests.store.cluster import Cluster
from tests.vllm.engines import Engine, complete, leg, new_transfer, pair, tokens
from tests.vllm.host_stand_in import HostStandIn

pytestmark = [pytest.mark.timeout(1500), pytest.mark.slow, pytest.mark.e2e]
CHUNK = ("--max-num-batched-tokens", "512")


@dataclass
class World:
    directory: Path
    cluster: Cluster
    prefill: Engine
    decode: Engine
    plain: Engine
    prefill_host: HostStandIn
    decode_host: HostStandIn
    random: random.Random

    @property
    def peer(self) -> dict[str, str]:
        return self.prefill_host.peer()

    def prompt(self, n: int) -> list[int]:
        return [self.random.randrange(5, 4000) for _ in range(n)]

    async def same_as_plain(self, client: httpx.AsyncClient, prompt: list[int], **options: Any) -> dict[str, Any]:
        """Both legs give the tokens of a plain vLLM; the decoding leg's answer."""
        n = options.get("n", 1)
        wanted = await complete(client, self.plain, prompt, 16, n=n)
        _, got = await pair(client, self.prefill, self.decode, self.peer, prompt, 16, **options)
        assert tokens(got) == tokens(wanted), f"{len(prompt)} tokens"
        return got

    async def idle(self) -> None:
        """Nothing is held, waited for or burnt on either engine."""
        await until(lambda: self.prefill.kv_usage() == self.decode.kv_usage() == 0.0)
        for host in (self.prefill_host, self.decode_host):
            await until(lambda host=host: not any(_gauges(host).values()))  # type: ignore[misc]
        before = self.prefill.cpu_seconds(), self.decode.cpu_seconds()
        await asyncio.sleep(3)
        spent = self.prefill.cpu_seconds() - before[0], self.decode.cpu_seconds() - before[1]
        assert max(spent) < 0.6, f"{spent} CPU seconds in 3 s"


async def _tied(client: httpx.AsyncClient, plain: Engine, prompt: list[int], want: list[int], got: list[int]) -> bool:
    """The first differing token is as likely as the wanted one: batches of another shape round the last bit differently."""
    at = next(i for i, (a, b) in enumerate(zip(want, got, strict=True)) if a != b)
    answer = await complete(client, plain, prompt + want[:at], 1, logprobs=2)
    first, second = sorted(answer["choices"][0]["logprobs"]["top_logprobs"][0].values(), reverse=True)[:2]
    return first - second < 1e-4


def _gauges(host: HostStandIn) -> dict[str, float]:
    names = ("held_transfers", "waiting_loads", "quarantined_blocks", "pending_saves")
    return {k: v for k, v in host.counters().items() if k.removeprefix("mooncake_connector_") in names}


async def until(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def world(beds: Beds, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    beds.stop()
    directory = tmp_path_factory.mktemp("pair")
    for name in ("etcd", "store"):
        (directory / name).mkdir()
    etcd = Etcd(directory / "etcd")
    etcd.start()
    cluster = Cluster(etcd.endpoints, directory / "store")
    hosts = [HostStandIn(directory, name) for name in ("p", "d")]
    engines: list[Engine] = []
    try:
        cluster.start(256 << 20, "store-node-0")
        store = {"masters": cluster.masters, "local_segment": "store-node-0", "block_tokens": 256}
        transfer = {"transports": beds.transports.split(",")} if beds.transports else {}
        engines = [
            Engine(
                directory,
                name,
                arguments=CHUNK,
                connector={"host_link": host.endpoint, "store": store, "transfer": transfer},
            )
            for name, host in zip(("p", "d"), hosts, strict=True)
        ]
        engines.append(Engine(directory, "plain", connector=None))
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_healthy()
        yield World(directory, cluster, *engines, *hosts, random.Random(7))
    finally:
        for engine in engines:
            engine.stop()
        cluster.close()
        etcd.close()
        for host in hosts:
            host.close()


async def test_tokens_are_those_of_a_plain_engine_and_decoding_computes_no_prompt(world: World) -> None:
    computed = world.decode.tokens_by_source("local_compute")
    lengths = [1, 31, 32, 33, 300, 511, 512, 513, 1000, 5000]
    async with httpx.AsyncClient(timeout=300) as client:
        for n in lengths:
            await world.same_as_plain(client, world.prompt(n), decode_first=n % 2 == 0)
        mixed = [world.prompt(world.random.randrange(20, 2000)) for _ in range(10)]
        await asyncio.gather(*(world.same_as_plain(client, prompt) for prompt in mixed))
    # vLLM counts the last token of a prompt that was received whole as computed only when it is the only one.
    assert world.decode.tokens_by_source("local_compute") - computed <= len(lengths) + len(mixed)
    await world.idle()


async def test_two_choices_get_the_blocks_twice(world: World) -> None:
    async with httpx.AsyncClient(timeout=300) as client:
        got = await world.same_as_plain(client, world.prompt(700), n=2)
    assert len(got["choices"]) == 2
    await world.idle()


async def test_a_layer_leaves_before_the_last_one_is_computed(world: World) -> None:
    transfer_id = new_transfer()
    prompt = world.prompt(1200)
    async with httpx.AsyncClient(timeout=300) as client:
        decoding = asyncio.create_task(
            complete(client, world.decode, prompt, 4, **leg("decode", transfer_id, **world.peer))
        )
        await asyncio.sleep(0.3)
        await complete(client, world.prefill, prompt, 1, **leg("prefill", transfer_id, request_id="req-1"))
        await decoding
    await until(lambda: bool(world.prefill_host.trace(transfer_id)))
    events = world.prefill_host.trace(transfer_id)
    sent = min(e["t"] for e in events if e["event"] == "layer_sent" and e["layer"] == 0)
    last = max(e["t"] for e in events if e["event"] == "layer_computed")
    assert sent < last
    started = world.prefill_host.wait_for(PrefillStarted, lambda m: m.transfer_id == transfer_id)
    finished = world.prefill_host.wait_for(PrefillFinished, lambda m: m.transfer_id == transfer_id)
    assert (started.prompt_tokens, finished.request_id, finished.cached_tokens) == (1200, "req-1", 0)
    assert 0 < finished.compute_s < 60


async def test_a_prompt_that_differs_is_recomputed(world: World) -> None:
    ours, theirs = world.prompt(300), world.prompt(300)
    transfer_id = new_transfer()
    async with httpx.AsyncClient(timeout=300) as client:
        wanted = await complete(client, world.plain, ours, 8)
        decoding = asyncio.create_task(
            complete(client, world.decode, ours, 8, **leg("decode", transfer_id, **world.peer))
        )
        await complete(client, world.prefill, theirs, 1, **leg("prefill", transfer_id))
        assert tokens(await decoding) == tokens(wanted)
    key = 'mooncake_connector_recomputed_tokens_total{reason="prompt_mismatch"}'
    await until(lambda: world.decode_host.counters().get(key) == 300)
    await world.idle()


async def test_what_one_engine_computed_another_loads_from_the_store(world: World) -> None:
    prompt = world.prompt(5000)
    key = "mooncake_connector_store_saved_blocks_total"
    saved = world.prefill_host.counters().get(key, 0)
    async with httpx.AsyncClient(timeout=300) as client:
        wanted = await complete(client, world.plain, prompt, 8)
        assert tokens(await complete(client, world.prefill, prompt, 8)) == tokens(wanted)
        await until(lambda: world.prefill_host.counters().get(key, 0) >= saved + 19)
        external = world.decode.tokens_by_source("external_kv_transfer")
        got = await complete(client, world.decode, prompt, 8)
        assert tokens(got) == tokens(wanted)
        assert world.decode.tokens_by_source("external_kv_transfer") - external == 19 * 256
        # What went wrong in the store must not be felt: a longer prompt with the same prefix, once more.
        longer = [*prompt, *world.prompt(40)]
        assert tokens(await complete(client, world.decode, longer, 8)) == tokens(
            await complete(client, world.plain, longer, 8)
        )
    await world.idle()


async def test_a_client_that_goes_at_any_stage_leaves_nothing(world: World) -> None:
    async with httpx.AsyncClient(timeout=300) as client:
        for delay_s in (0.0, 0.05, 0.1, 0.2, 0.4, 0.8):
            prompt, transfer_id = world.prompt(3000), new_transfer()
            legs = [
                asyncio.create_task(
                    complete(client, world.decode, prompt, 64, **leg("decode", transfer_id, **world.peer))
                ),
                asyncio.create_task(complete(client, world.prefill, prompt, 1, **leg("prefill", transfer_id))),
            ]
            await asyncio.sleep(delay_s)
            for task in legs:
                task.cancel()
            await asyncio.gather(*legs, return_exceptions=True)
        for _ in range(5):  # only one of the legs ever comes
            prompt, transfer_id = world.prompt(400), new_transfer()
            await complete(client, world.prefill, prompt, 1, **leg("prefill", transfer_id))
            world.prefill_host.release(transfer_id)
            alone = asyncio.create_task(
                complete(client, world.decode, prompt, 4, **leg("decode", new_transfer(), **world.peer))
            )
            await asyncio.sleep(0.2)
            alone.cancel()
            await asyncio.gather(alone, return_exceptions=True)
    await world.idle()


async def test_waiting_for_kv_does_not_burn_cpu(world: World) -> None:
    async with httpx.AsyncClient(timeout=300) as client:
        waiting = asyncio.create_task(
            complete(client, world.decode, world.prompt(300), 4, **leg("decode", new_transfer(), **world.peer))
        )
        await asyncio.sleep(1)
        before = world.decode.cpu_seconds()
        await asyncio.sleep(4)
        spent = (world.decode.cpu_seconds() - before) / 4
        began = time.monotonic()
        await complete(client, world.decode, world.prompt(30), 1)  # and others are served meanwhile
        assert time.monotonic() - began < 2
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert spent < 0.35, f"{spent:.2f} cores while it only waits"
    await world.idle()


async def test_preemption_in_a_small_cache_changes_no_token(world: World) -> None:
    """More tokens than the 64 MiB of KV (32,768 tokens) hold at once, on both engines."""
    prompts = [world.prompt(3000) for _ in range(12)]
    async with httpx.AsyncClient(timeout=600) as client:
        wanted = [tokens(await complete(client, world.plain, prompt, 40)) for prompt in prompts]
        both = [pair(client, world.prefill, world.decode, world.peer, prompt, 40) for prompt in prompts]
        for prompt, want, (_, got) in zip(prompts, wanted, await asyncio.gather(*both), strict=True):
            assert tokens(got) == want or await _tied(client, world.plain, prompt, want[0], tokens(got)[0])
    await world.idle()


async def test_a_store_that_dies_is_not_missed(world: World) -> None:
    for role in world.cluster.roles.values():
        role.kill()
    async with httpx.AsyncClient(timeout=300) as client:
        for n in (600, 1500):
            await world.same_as_plain(client, world.prompt(n))
    await world.idle()


async def test_a_producer_that_is_killed_while_it_sends_costs_a_recompute(world: World) -> None:
    """The last test: the prefill engine is gone afterwards."""
    prompt, transfer_id = world.prompt(8000), new_transfer()
    async with httpx.AsyncClient(timeout=300) as client:
        wanted = await complete(client, world.plain, prompt, 8)
        decoding = asyncio.create_task(
            complete(client, world.decode, prompt, 8, **leg("decode", transfer_id, **world.peer))
        )
        prefilling = asyncio.create_task(complete(client, world.prefill, prompt, 1, **leg("prefill", transfer_id)))
        await asyncio.sleep(0.7)
        world.prefill.kill()
        assert tokens(await decoding) == tokens(wanted)
        await asyncio.gather(prefilling, return_exceptions=True)
    await until(lambda: world.decode.kv_usage() == 0.0)
    assert sum(v for k, v in world.decode_host.counters().items() if "recomputed_tokens_total" in k) >= 8000
