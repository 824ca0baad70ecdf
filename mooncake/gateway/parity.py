"""Proof, on each worker, that the gateway's token ids are the worker's own: otherwise block keys match nothing and legs disagree.

Probe prompts go to the worker's `/tokenize` and through our tokenizer pool. A worker that differs is an error in the log and a metric;
its model's prompts are then tokenized by the worker itself, or, where that cannot be asked, one worker serves the whole request.
Knows: probes, `/tokenize`. Does not know: placement, legs.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import aiohttp
import msgspec

from mooncake.common.errors import BadRequest, MooncakeError
from mooncake.common.registry import Kind
from mooncake.gateway.conversation import NoKVInformation
from mooncake.gateway.directory import Directory, Model, Worker
from mooncake.gateway.legs import read_limited
from mooncake.gateway.openai import Call, Route, single_prompt
from mooncake.gateway.render import RenderJob, template_arguments
from mooncake.gateway.tokenizer_pool import TokenizerPool

_log = logging.getLogger(__name__)
TOKENIZE_TIMEOUT_S = 10.0
PROBE_TRIES = 30
PROBE_AGAIN_S = 2.0

_USER = {"role": "user", "content": "Grüße, 你好 🦀! How many r's are in “strawberry”?"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
PROBES: dict[str, dict[str, Any]] = {
    "text": {"prompt": "The quick brown fox\n\tjumps over 12,345 lazy dogs. naïve 你好 🦀 \u200d def f(x): return x"},
    "text without special tokens": {"prompt": " leading space", "add_special_tokens": False},
    "chat": {"messages": [_USER]},
    "chat with system and turns": {
        "messages": [
            {"role": "system", "content": "Be terse."},
            _USER,
            {"role": "assistant", "content": "Three."},
            {"role": "user", "content": "Sure?"},
        ]
    },
    "chat with parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    },
    "chat with tools": {"messages": [_USER], "tools": [_TOOL]},
    "continued chat": {
        "messages": [_USER, {"role": "assistant", "content": "One, two"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
}


class Parity:
    """One object a gateway. Probing goes on in the background; until a worker is probed it is trusted (digests guard the answers)."""

    def __init__(
        self, directory: Directory, pool: TokenizerPool, session: aiohttp.ClientSession, headers: dict[str, str]
    ) -> None:
        self._directory = directory
        self._pool = pool
        self._session = session
        self._headers = headers
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._checked: dict[str, str] = {}
        directory.watch(self._on_worker)

    def _on_worker(self, kind: Kind, worker: Worker) -> None:
        if kind == "down":
            self._checked.pop(worker.name, None)
            self._cancel(worker.name)
        elif self._checked.get(worker.name) != worker.instance_id:
            self._checked[worker.name] = worker.instance_id
            self._cancel(worker.name)
            self._tasks[worker.name] = asyncio.create_task(self._check(worker), name=f"parity {worker.name}")

    def _cancel(self, name: str) -> None:
        task = self._tasks.pop(name, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def settled(self) -> None:
        """Waits for the probes that are under way."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _check(self, worker: Worker) -> None:
        await self._pool.load(worker.model_path)
        for attempt in range(PROBE_TRIES):
            try:
                different = [name for name, probe in PROBES.items() if await self._differs(worker, probe)]
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError, MooncakeError) as error:
                if attempt == PROBE_TRIES - 1:
                    _log.error(
                        "a worker's tokenizer cannot be asked",
                        extra={"fields": {"name": worker.name, "error": repr(error)}},
                    )
                await asyncio.sleep(PROBE_AGAIN_S)
                continue
            metric = self._directory.metrics.tokenizer_mismatch.labels(worker.model, worker.name)
            metric.set(bool(different))
            if different:
                self._directory.mismatched.add(worker.instance_id)
                fields = {"worker": worker.name, "model": worker.model, "probes": "; ".join(different)}
                _log.error("token ids differ from the worker's: the worker's own are used", extra={"fields": fields})
            return

    async def _differs(self, worker: Worker, probe: dict[str, Any]) -> bool:
        theirs = await self._ask(worker, probe)
        job = RenderJob(
            worker.model_path,
            worker.model,
            worker.fingerprint,
            worker.block_size,
            worker.max_model_len or 1 << 20,
            "messages" in probe,
            probe,
            probe.get("prompt"),
        )
        try:
            ours = (await self._pool.render(job)).token_json
        except NoKVInformation:
            return False  # we say ourselves that we do not know: no harm done
        return theirs is not None and msgspec.json.decode(ours) != theirs

    async def _ask(self, worker: Worker, body: dict[str, Any]) -> list[int] | None:
        """The worker's token ids; None when it refuses such a prompt."""
        async with (
            asyncio.timeout(TOKENIZE_TIMEOUT_S),
            self._session.post(
                worker.engine_url + "/tokenize",
                data=msgspec.json.encode({"model": worker.model, **body}),
                headers=self._headers | {"Content-Type": "application/json"},
            ) as response,
        ):
            answer = await read_limited(response, 64 << 20)
            if response.status == 200:
                return [int(token) for token in msgspec.json.decode(answer)["tokens"]]
            if response.status in (400, 422):
                return None
            raise ValueError(f"/tokenize answered {response.status}")

    async def worker_tokens(self, model: Model, call: Call) -> list[int]:
        """The prompt's ids as a worker makes them. Raises NoKVInformation when `/tokenize` cannot say it for such a request."""
        body = tokenize_body(call)
        workers = [w for w in model.workers if not w.draining] or list(model.workers)
        try:
            tokens = await self._ask(min(workers, key=lambda w: self._directory.in_flight[w.instance_id]), body)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            raise NoKVInformation("the worker's tokenizer does not answer") from None
        if not tokens:
            raise NoKVInformation("the worker refuses to tokenize")
        return tokens


def tokenize_body(call: Call) -> dict[str, Any]:
    """What `/tokenize` must be asked so that it renders as the request itself would be rendered."""
    if call.body.get("truncate_prompt_tokens") is not None:
        raise NoKVInformation("truncate_prompt_tokens")
    if call.route is Route.CHAT:
        fields = (
            "messages",
            "tools",
            "add_generation_prompt",
            "continue_final_message",
            "add_special_tokens",
            "chat_template",
        )
        arguments = template_arguments(call.body)
        kept = {k: v for k, v in arguments.items() if k not in ("add_generation_prompt", "continue_final_message")}
        body = {k: call.body[k] for k in fields if call.body.get(k) is not None}
        body["messages"] = [_with_reasoning(message) for message in body["messages"]]
        # `/tokenize` wants these to be told apart; a request may leave the first to its default.
        body["add_generation_prompt"] = arguments["add_generation_prompt"]
        return body | {"chat_template_kwargs": kept}
    prompt = single_prompt(call.body)
    if not isinstance(prompt, str):
        raise BadRequest("`prompt` must be text.", param="prompt")
    return {"prompt": prompt, "add_special_tokens": call.body.get("add_special_tokens", True)}


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The old name of the field, which `/tokenize` does not know."""
    if message.get("reasoning_content") is None or message.get("reasoning") is not None:
        return message
    return {k: v for k, v in message.items() if k != "reasoning_content"} | {"reasoning": message["reasoning_content"]}
