"""Token ids: ours beside a real vLLM's, for every way of asking; and what happens when they differ."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from mooncake.gateway.metrics import GatewayMetrics
from mooncake.gateway.openai import Route, parse_call
from mooncake.gateway.parity import PROBES, tokenize_body
from mooncake.gateway.render import RenderJob
from mooncake.gateway.tokenizer_pool import TokenizerPool
from mooncake.models import resolve_model
from tests.gateway.conftest import eventually, make_bed

SYSTEM = {"role": "system", "content": "Be terse."}
USER = {"role": "user", "content": "Grüße, 你好 🦀!"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "x"]}'}}
# Looks at everything that a template can see, so that a difference anywhere shows in the tokens.
CURIOUS = (
    "{%- for m in messages %}[{{ m.role }}|{{ m.name }}|"
    "{% for c in m.content %}{% if c is mapping %}<{{ c.type }}:{{ c.text }}>{% else %}{{ c }}{% endif %}{% endfor %}"
    "|{{ m.tool_calls | tojson if m.tool_calls else '' }}|{{ m.tool_call_id }}|{{ m.reasoning_content }}]\n{% endfor %}"
    "{{ tools | tojson if tools else 'no tools' }}|{{ documents }}|{{ reasoning_effort }}|{{ enable_thinking }}|{{ custom }}|"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATS: dict[str, dict[str, Any]] = {
    "user": {"messages": [USER]},
    "turns": {"messages": [SYSTEM, USER, {"role": "assistant", "content": "No."}, USER]},
    "parts": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": ""}, {"type": "text", "text": "b"}],
            }
        ]
    },
    "null content and tool calls": {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
        ]
    },
    "tool result in parts": {
        "messages": [
            USER,
            {
                "role": "tool",
                "tool_call_id": "c1",
                "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}],
            },
        ]
    },
    "bad arguments": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": "x",
                "tool_calls": [CALL | {"function": {"name": "f", "arguments": "{nope"}}],
            },
        ]
    },
    "empty arguments": {
        "messages": [USER, {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": ""}}]}]
    },
    "names": {"messages": [USER | {"name": "ann"}]},
    "custom role": {"messages": [{"role": "critic", "content": "hm"}, USER]},
    "developer": {"messages": [USER, {"role": "developer", "content": "late rules"}, SYSTEM, USER]},
    "reasoning": {"messages": [USER, {"role": "assistant", "content": "x", "reasoning_content": "because"}, USER]},
    "tools": {
        "messages": [USER],
        "tools": [
            TOOL,
            {
                "type": "function",
                "function": {"name": "g", "description": "d", "strict": True, "parameters": {"b": 1, "a": 2}},
            },
        ],
    },
    "tools none": {"messages": [USER], "tools": [TOOL], "tool_choice": "none"},
    "no generation prompt": {"messages": [USER], "add_generation_prompt": False},
    "continued": {
        "messages": [USER, {"role": "assistant", "content": "One, two"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "kwargs": {"messages": [USER], "chat_template_kwargs": {"custom": "z", "unused": 1, "enable_thinking": False}},
    "effort": {"messages": [USER], "reasoning_effort": "low"},
    "documents": {"messages": [USER], "documents": [{"title": "t", "text": "x"}]},
    "special tokens": {"messages": [USER], "add_special_tokens": True},
    "special token text": {"messages": [{"role": "user", "content": "<|im_end|>\n<|im_start|>system\nhi"}]},
    "billing header": {"messages": [{"role": "system", "content": "x-anthropic-billing-header: cch=1\nrules"}, USER]},
}
TEXTS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "def f(x):\n\treturn 你好🦀 naïve"},
    "one in a list": {"prompt": [" one"]},
    "no special tokens": {"prompt": "x", "add_special_tokens": False},
    "special token text": {"prompt": "<|im_start|>user<|endoftext|>"},
    "token ids": {"prompt": [5, 6, 7, 4000]},
}


def job(model_path: str, body: dict[str, Any], **more: Any) -> RenderJob:
    chat = "messages" in body
    call = parse_call(Route.CHAT if chat else Route.COMPLETIONS, msgspec.json.encode({"model": "tiny"} | body))
    prompt = body.get("prompt")
    prompt = prompt[0] if isinstance(prompt, list) and isinstance(prompt[0], str) else prompt
    return RenderJob(model_path, "tiny", "fp", 32, 8192, chat, call.body, prompt, **more)


@pytest.fixture(scope="module")
def model_dir() -> str:
    return str(resolve_model("tiny"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(model_dir: str) -> AsyncIterator[TokenizerPool]:
    made = TokenizerPool(GatewayMetrics(CollectorRegistry()), processes=2)
    await made.load(model_dir)
    yield made
    made.close()


@pytest.fixture(scope="module")
def plain(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A real vLLM and its model directory: the tiny model with a template that shows all that a template can see."""
    from deploy.testbed import PlainVLLM

    curious = tmp_path_factory.mktemp("curious")
    for path in Path(model_dir).iterdir():
        if path.name != "chat_template.jinja":
            (curious / path.name).symlink_to(path)
    (curious / "chat_template.jinja").write_text(CURIOUS)
    server = PlainVLLM(curious, curious / "vllm.log")
    server.wait_ready()
    yield server.url, str(curious)
    server.stop()


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(400)
@pytest.mark.asyncio(loop_scope="module")
async def test_ids_equal_real_vllm(pool: TokenizerPool, plain: tuple[str, str]) -> None:
    """What the engine says it computed (`prompt_token_ids` of an answer, not `/tokenize`) against what the pool makes."""
    url, directory = plain
    wrong = {}
    async with httpx.AsyncClient(timeout=120) as client:
        for name, body in (CHATS | TEXTS).items():
            chat = "messages" in body
            asked = {"model": "tiny", "max_tokens": 1, "return_token_ids": True, "ignore_eos": True} | body
            answer = await client.post(f"{url}/v1/{'chat/' if chat else ''}completions", json=asked)
            assert answer.status_code == 200, (name, answer.text)
            got = answer.json()
            theirs = got["prompt_token_ids"] if chat else got["choices"][0]["prompt_token_ids"]
            ours = msgspec.json.decode((await pool.render(job(directory, body))).token_json)
            if ours != theirs:
                wrong[name] = (ours, theirs)
        for name, body in (dict(CHATS.items()) | {k: v for k, v in TEXTS.items() if k != "token ids"}).items():
            call = parse_call(
                Route.CHAT if "messages" in body else Route.COMPLETIONS, json.dumps({"model": "tiny"} | body).encode()
            )
            tokens = (await client.post(f"{url}/tokenize", json={"model": "tiny"} | tokenize_body(call))).json()
            ours = msgspec.json.decode((await pool.render(job(directory, body))).token_json)
            if tokens.get("tokens") != ours:
                wrong["/tokenize " + name] = (ours, tokens)
    assert not wrong


@pytest.mark.asyncio(loop_scope="module")
async def test_probes_render(pool: TokenizerPool, model_dir: str) -> None:
    for probe in PROBES.values():
        assert (await pool.render(job(model_dir, probe))).prompt_tokens > 0


@pytest.mark.asyncio(loop_scope="module")
async def test_mismatch_uses_the_workers_tokens(pool: TokenizerPool, model_dir: str) -> None:
    """The last user of `pool`: closing the gateway closes it."""
    async with make_bed(pool_type=lambda *_args, **_more: pool) as bed:
        for worker in bed.workers:
            worker.info["model_path"] = model_dir
            worker.instance_id += "-again"
            worker.tokenize = lambda body: [7] * (40 if "messages" in body else 50)
            bed.gateway.directory.on_record("up", worker.record)
        await eventually("the probes", lambda: len(bed.gateway.directory.mismatched) == 4, 30)
        assert bed.value("tokenizer_mismatch", model="tiny", instance="decode-1") == 1
        assert (await bed.completion(prompt="hello")).status_code == 200
        assert bed.prefills[0].prefills[0]["prompt"] == [7] * 50
        chat = {"model": "tiny", "messages": [USER], "max_tokens": 3}
        assert (await bed.http.post("/v1/chat/completions", json=chat)).status_code == 200
        assert bed.prefills[0].prefills[1]["prompt"] == [7] * 40
        assert bed.decodes[0].decodes[1]["messages"] == [USER]
        # Where the worker cannot be asked either, one worker serves the whole request.
        for worker in bed.workers:
            worker.tokenize = lambda body: []
        assert (await bed.http.post("/v1/chat/completions", json=chat)).status_code == 200
        assert bed.conductor.asked[-1].single_worker
        assert bed.value("requests_without_kv_information_total", reason="the worker refuses to tokenize") == 1
