"""The `openai` client's calls, sync and async, streaming and not, compared field by field with a plain vLLM."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from deploy.testbed import PlainVLLM, Platform

MESSAGES = [
    {"role": "system", "content": "You are a terse assistant."},
    {"role": "user", "content": "List three colours. Grüße, 你好 🦀!"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 8}},
                "required": ["city"],
            },
        },
    }
]
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"type": "string", "enum": ["red", "green"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["colour", "count"],
    "additionalProperties": False,
}
GREEDY = {"model": "tiny", "temperature": 0, "seed": 5}

CHAT: dict[str, dict[str, Any]] = {
    "plain": {"max_tokens": 24},
    "max_tokens 1": {"max_tokens": 1},
    "max_completion_tokens": {"max_completion_tokens": 7},
    "logprobs": {"max_tokens": 8, "logprobs": True, "top_logprobs": 3},
    "n 2 sampled": {"max_tokens": 12, "n": 2, "temperature": 0.8},
    "stop string": {"max_tokens": 200, "stop": ["a"]},
    "tool auto": {"max_tokens": 24, "tools": TOOLS},
    "tool required": {"max_tokens": 80, "tools": TOOLS, "tool_choice": "required"},
    "tool named": {
        "max_tokens": 80,
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
    },
    "json schema": {
        "max_tokens": 60,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}},
    },
    "bias and penalties": {
        "max_tokens": 16,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {"100": 3},
    },
    "vllm extras": {
        "max_tokens": 16,
        "extra_body": {"top_k": 5, "min_tokens": 3, "repetition_penalty": 1.2, "return_token_ids": True},
    },
    "stop token ids": {
        "max_tokens": 64,
        "extra_body": {"stop_token_ids": list(range(300, 1200)), "include_stop_str_in_output": True},
    },
    "list content": {
        "max_tokens": 8,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}],
    },
    "prompt logprobs": {"max_tokens": 4, "extra_body": {"prompt_logprobs": 1}},
    "continue message": {
        "max_tokens": 8,
        "messages": [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "One, two"}],
        "extra_body": {"add_generation_prompt": False, "continue_final_message": True},
    },
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "def fib(n):", "max_tokens": 24},
    "token ids": {"prompt": list(range(20, 90)), "max_tokens": 9},
    "two prompts": {"prompt": ["import os", "class A:"], "max_tokens": 6},
    "echo": {"prompt": "import", "max_tokens": 4, "echo": True},
    "logprobs": {"prompt": "return", "max_tokens": 6, "logprobs": 2},
    "n 2": {"prompt": "while", "max_tokens": 6, "n": 2, "temperature": 0.9},
    "stop": {"prompt": "for x in", "max_tokens": 120, "stop": ["e"]},
    "unicode": {"prompt": "你好🦀 naïve", "max_tokens": 40},
}
VOLATILE = {"id", "created", "system_fingerprint", "kv_transfer_params", "prompt_tokens_details", "service_tier"}


def stable(value: Any) -> Any:
    """An answer without what differs between any two runs; float noise rounded; unset fields dropped."""
    if isinstance(value, dict):
        kept = {k: stable(v) for k, v in value.items() if k not in VOLATILE and v is not None}
        if set(kept) == {"function", "type"} or (set(kept) >= {"function", "index"}):
            kept.pop("id", None)
        return kept
    if isinstance(value, list):
        return [stable(v) for v in value]
    return round(value, 3) if isinstance(value, float) else value


def chat_arguments(case: str) -> dict[str, Any]:
    return {"messages": MESSAGES} | GREEDY | CHAT[case]


def clients(platform: Platform, plain: PlainVLLM, kind: type) -> tuple[Any, Any]:
    return tuple(
        kind(base_url=url + "/v1", api_key="none", max_retries=0, timeout=120) for url in (platform.url, plain.url)
    )  # type: ignore[return-value]


def joined(chunks: list[Any]) -> dict[str, Any]:
    """A stream folded into what a non-streaming answer would say, with every field a chunk can carry."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in (stable(c.model_dump()) for c in chunks):
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            into = choices.setdefault(
                choice["index"], {"content": "", "text": "", "tools": "", "logprobs": {}, "finish": None}
            )
            delta = choice.get("delta", {})
            into["content"] += delta.get("content") or ""
            into["text"] += choice.get("text") or ""
            for call in delta.get("tool_calls") or []:
                into["tools"] += (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
            for name, values in (choice.get("logprobs") or {}).items():  # a chunk may carry several tokens
                into["logprobs"].setdefault(name, []).extend(values)
            into["finish"] = choice.get("finish_reason") or into["finish"]
    return {"choices": choices, "usage": usage}


@pytest.mark.parametrize("case", CHAT)
def test_chat(platform: Platform, plain: PlainVLLM, case: str) -> None:
    ours, theirs = clients(platform, plain, openai.OpenAI)
    got = ours.chat.completions.create(**chat_arguments(case))
    expected = theirs.chat.completions.create(**chat_arguments(case))
    assert stable(got.model_dump()) == stable(expected.model_dump())
    assert got.usage.prompt_tokens_details is not None and got.usage.prompt_tokens_details.cached_tokens >= 0


@pytest.mark.parametrize("case", CHAT)
def test_chat_stream(platform: Platform, plain: PlainVLLM, case: str) -> None:
    ours, theirs = clients(platform, plain, openai.OpenAI)
    arguments = chat_arguments(case) | {"stream": True, "stream_options": {"include_usage": True}}
    if case == "prompt logprobs":
        with pytest.raises(openai.BadRequestError) as mine:
            list(ours.chat.completions.create(**arguments))
        with pytest.raises(openai.BadRequestError) as other:
            list(theirs.chat.completions.create(**arguments))
        assert mine.value.body == other.value.body
        return
    got = joined(list(ours.chat.completions.create(**arguments)))
    assert got == joined(list(theirs.chat.completions.create(**arguments)))
    assert got["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("case", COMPLETIONS)
async def test_completions_async(platform: Platform, plain: PlainVLLM, case: str, stream: bool) -> None:
    answers = []
    for client in clients(platform, plain, openai.AsyncOpenAI):
        async with client:
            arguments = GREEDY | COMPLETIONS[case] | {"stream": stream}
            if stream:
                chunks = [
                    c
                    async for c in await client.completions.create(**arguments, stream_options={"include_usage": True})
                ]
                answers.append(joined(chunks))
            else:
                answers.append(stable((await client.completions.create(**arguments)).model_dump()))
    assert answers[0] == answers[1]


def test_continuous_usage(platform: Platform, plain: PlainVLLM) -> None:
    ours, theirs = clients(platform, plain, openai.OpenAI)
    options = {"include_usage": True, "continuous_usage_stats": True}
    arguments = chat_arguments("plain") | {"stream": True, "stream_options": options}
    got, expected = (
        [stable(c.model_dump()).get("usage") for c in c.chat.completions.create(**arguments)] for c in (ours, theirs)
    )
    assert [u["completion_tokens"] for u in got if u][-1] == [u["completion_tokens"] for u in expected if u][-1]
    assert all(u["prompt_tokens"] == expected[-1]["prompt_tokens"] for u in got if u)


def test_cached_tokens_are_the_prefill_sides(platform: Platform) -> None:
    client = openai.OpenAI(base_url=platform.url + "/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "the same words " * 100}]
    headers = {"x-mooncake-prefill-instance": platform.names("prefill")[0]}
    first, second = (
        client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=2, temperature=0, extra_headers=headers
        )
        for _ in range(2)
    )
    assert first.usage and second.usage and first.usage.prompt_tokens_details and second.usage.prompt_tokens_details
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens >= 0.8 * second.usage.prompt_tokens


def test_unicode_survives_the_relay(platform: Platform, plain: PlainVLLM) -> None:
    """Sampled bytes of a byte-level vocabulary: characters that are split over tokens arrive whole or as vLLM sends them."""
    ours, theirs = clients(platform, plain, openai.OpenAI)
    arguments = GREEDY | {"prompt": "你好🦀", "max_tokens": 60, "temperature": 1.5, "stream": True, "seed": 11}
    got, expected = (
        "".join(c.choices[0].text for c in client.completions.create(**arguments)) for client in (ours, theirs)
    )
    assert got == expected


def test_models(platform: Platform, plain: PlainVLLM) -> None:
    ours, theirs = clients(platform, plain, openai.OpenAI)
    got, expected = ([(m.id, m.object) for m in client.models.list()] for client in (ours, theirs))
    assert got == expected
    assert ours.models.retrieve("tiny").id == "tiny"


@pytest.mark.parametrize(
    "wrong",
    [{"model": "nope"}, {"max_tokens": -3}, {"messages": []}, {"temperature": -1}, {"n": 0}],
    ids=lambda w: json.dumps(w),
)
def test_errors_have_the_same_type(platform: Platform, plain: PlainVLLM, wrong: dict[str, Any]) -> None:
    raised = []
    for client in clients(platform, plain, openai.OpenAI):
        with pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(**(chat_arguments("plain") | wrong))
        raised.append(caught.value)
    if wrong != {"messages": []}:  # vLLM renders an empty conversation; we refuse it
        assert type(raised[0]) is type(raised[1])
    assert raised[0].status_code in (400, 404)
