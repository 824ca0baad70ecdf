"""Messages of a chat request as the conversation that a template sees: vLLM's `renderers/chat_utils.py` for text.

Pure: knows message objects; does not know templates or tokens. It copies what it changes.
"""

from __future__ import annotations

import json
from typing import Any

from mooncake.gateway.content_format import ContentFormat

Message = dict[str, Any]
_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_SKIPPED_WHEN_EMPTY = ("text", "refusal")
_BILLING_HEADER = "x-anthropic-billing-header"


class NoKVInformation(Exception):
    """The gateway cannot say which tokens the worker will compute; the text names the cause."""


def conversation_of(messages: list[Message], form: ContentFormat) -> list[Message]:
    """Raises NoKVInformation for what is not plain text, and for what vLLM would refuse."""
    return [_message(message, form) for message in messages]


def _message(message: Message, form: ContentFormat) -> Message:
    role = message["role"]
    content = message.get("content")
    parts: list[Any] = (
        [] if content is None else [{"type": "text", "text": content}] if isinstance(content, str) else content
    )
    if role == "system":
        parts = _without_billing_header(parts)
    texts = [text for part in parts if (text := _text_of(part)) is not None and (text or form == "openai")]
    rendered: Any = [{"type": "text", "text": text} for text in texts] if form == "openai" else "\n".join(texts)
    result: Message = {"role": role, "content": rendered}
    if role == "assistant":
        _add_assistant_fields(message, result)
    elif role == "tool":
        if "tool_call_id" in message:
            result["tool_call_id"] = message["tool_call_id"]
        result["content"] = "\n".join(texts)
    if isinstance(message.get("name"), str):
        result["name"] = message["name"]
    if isinstance(message.get("task"), str):
        result["task"] = message["task"]
    if role == "developer":
        result["tools"] = message.get("tools")
    return result


def _text_of(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("uuid") is not None:
        raise NoKVInformation("content part")
    kind = part.get("type")
    if kind not in _TEXT_PARTS:
        raise NoKVInformation(f"content part of type {kind!r}")
    text = part.get(_TEXT_PARTS[kind])
    if text is None and kind in _SKIPPED_WHEN_EMPTY:
        return None
    if not isinstance(text, str):
        raise NoKVInformation("content part without text")
    return text


def _add_assistant_fields(message: Message, result: Message) -> None:
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        result["reasoning"] = result["reasoning_content"] = reasoning
    calls = message.get("tool_calls")
    if calls is None:
        return
    if not isinstance(calls, list):
        raise NoKVInformation("tool_calls")
    if calls:
        result["tool_calls"] = [_tool_call(call) for call in calls]


def _tool_call(call: Any) -> dict[str, Any]:
    """Templates expect `arguments` as an object; what is no object becomes an empty one, as in vLLM.

    Keys are in the order in which vLLM's validation (the TypedDicts of `openai`) leaves them, since templates print them as JSON.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type") != "function":
        raise NoKVInformation("tool_calls")
    arguments = function.get("arguments")
    if (
        not isinstance(call.get("id"), str)
        or not isinstance(function.get("name"), str)
        or not isinstance(arguments, str)
    ):
        raise NoKVInformation("tool_calls")
    try:
        parsed = json.loads(arguments or "{}")
    except json.JSONDecodeError:
        parsed = {}
    dumped = {"arguments": parsed if isinstance(parsed, dict) else {}, "name": function["name"]}
    return {"id": call["id"], "function": dumped, "type": "function"}


def _without_billing_header(parts: list[Any]) -> list[Any]:
    """vLLM drops this line of system texts: its value changes with every request and would spoil every prefix."""
    kept = []
    for part in parts:
        text = (
            part
            if isinstance(part, str)
            else part.get("text")
            if isinstance(part, dict) and part.get("type") == "text"
            else None
        )
        if not (isinstance(text, str) and text.startswith(_BILLING_HEADER)):
            kept.append(part)
        elif rest := text.partition("\n")[2]:
            kept.append(rest if isinstance(part, str) else part | {"text": rest})
    return kept


def as_system(conversation: list[Message]) -> list[Message]:
    """For templates that do not know the role `developer`: such messages become system ones, and all system ones a first one."""
    turned = [
        {k: v for k, v in message.items() if k != "tools"} | {"role": "system"}
        if message["role"] == "developer"
        else message
        for message in conversation
    ]
    systems = [index for index, message in enumerate(turned) if message["role"] == "system"]
    if systems in ([], [0]):
        return turned
    contents = [text for index in systems if (text := _plain(turned[index].get("content", "")))]
    return [{"role": "system", "content": "\n\n".join(contents)}, *(m for m in turned if m["role"] != "system")]


def _plain(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] if isinstance(part, dict) else part for part in content)
    return content if isinstance(content, str) else ""


def tool_dicts(tools: Any) -> list[dict[str, Any]] | None:
    """Tools as vLLM's `ChatCompletionToolsParam.model_dump()` gives them to the template: known keys, in its order."""
    if tools is None:
        return None
    if not isinstance(tools, list) or not tools:
        raise NoKVInformation("tools")
    return [_tool_dict(tool) for tool in tools]


def _tool_dict(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if (
        not isinstance(function, dict)
        or tool.get("type", "function") != "function"
        or not isinstance(function.get("name"), str)
    ):
        raise NoKVInformation("tools")
    if tool.get("defer_loading") is not None or function.get("defer_loading") is not None:
        raise NoKVInformation("tools.defer_loading")
    dumped = {
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters"),
    }
    if function.get("strict") is not None:
        dumped["strict"] = function["strict"]
    return {"type": "function", "function": dumped}
