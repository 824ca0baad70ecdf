"""vLLM's own MooncakeConnector on `mooncake.engine`: the acceptance of the drop-in."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator

import httpx
import pytest

from tests.drop_in.pairs import InTreePair
from tests.vllm.engines import Engine, complete, tokens

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow, pytest.mark.e2e]
BLOCK_TOKENS, TOKEN_BYTES = 32, 2048  # 4 layers, 2 heads, 2 x 32 float32
LENGTHS = (20, 31, 32, 33, 129, 300, 1000, 2000)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[InTreePair, Engine]]:
    directory = tmp_path_factory.mktemp("in-tree")
    pair, plain = InTreePair(directory), Engine(directory, "plain", connector=None)
    try:
        plain.start()
        pair.start()
        pair.wait_healthy()
        plain.wait_healthy()
        yield pair, plain
    finally:
        pair.stop()
        plain.stop()


async def test_the_in_tree_connector_gives_a_plain_engines_tokens(servers: tuple[InTreePair, Engine]) -> None:
    pair, plain = servers
    generator = random.Random(5)
    engine_id = pair.engine_id()
    prompts = [[generator.randrange(5, 4000) for _ in range(n)] for n in LENGTHS]
    local = pair.decode.tokens_by_source("local_compute")
    async with httpx.AsyncClient(timeout=300) as client:
        wanted = [tokens(await complete(client, plain, prompt, 16)) for prompt in prompts]
        got = [tokens(await pair.complete(client, engine_id, prompt, 16)) for prompt in prompts]
        assert got == wanted
        mixed = [[generator.randrange(5, 4000) for _ in range(generator.randrange(20, 2000))] for _ in range(8)]
        together = await asyncio.gather(*(pair.complete(client, engine_id, prompt, 8) for prompt in mixed))
        assert [tokens(answer) for answer in together] == [
            tokens(await complete(client, plain, prompt, 8)) for prompt in mixed
        ]
    assert pair.decode.tokens_by_source("external_kv_transfer") == sum(map(len, prompts + mixed))
    assert pair.decode.tokens_by_source("local_compute") == local
    pushes = [json.loads(line) for line in pair.times.read_text().splitlines()]
    assert {push["result"] for push in pushes} == {0}
    blocks = sum(-(-len(prompt) // BLOCK_TOKENS) for prompt in prompts + mixed)
    assert sum(push["bytes"] for push in pushes) == blocks * BLOCK_TOKENS * TOKEN_BYTES
