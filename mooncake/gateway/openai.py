"""The OpenAI surface: what is checked of a request, and the shape of every error.

A request stays the client's own JSON object. Only the fields that the gateway acts on are checked; everything else, vLLM's extras
included, goes through untouched and is judged by the engine (a closed schema here would break with each engine release).
Knows: field names and their meaning. Does not know: instances, legs, HTTP servers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec

from mooncake.common.errors import BadRequest, MooncakeError


class Route(StrEnum):
    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


STRIPPED = ("kv_transfer_params", "ec_transfer_params")
_MEDIA_KEYS = frozenset(
    [
        "input_image",
        "image_url",
        "image_embeds",
        "audio_embeds",
        "video_embeds",
        "prompt_embeds",
        "image_pil",
        "audio_url",
        "input_audio",
        "video_url",
    ]
)
_TEXT_PARTS = frozenset(("text", "input_text", "output_text", "refusal", "thinking", "tool_reference"))


@dataclass
class Call:
    """One checked request. `body` is the client's own object, less what clients must not send."""

    route: Route
    body: dict[str, Any]
    model: str | None
    stream: bool
    n: int
    max_output_tokens: int
    """0: unknown."""
    priority: int = 0
    cache_salt: str = ""
    single_worker_reason: str | None = None
    """Why the two-leg path cannot give what a plain engine gives; None when it can."""
    stripped: list[str] = field(default_factory=list)


def parse_call(route: Route, raw: bytes) -> Call:
    """Raises BadRequest, which names the field."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"The request body is not valid JSON: {error}", error_code="invalid_json") from None
    if not isinstance(body, dict):
        raise BadRequest("The request body must be a JSON object.")
    model = _optional(body, "model", str, "a string")
    stream = _optional(body, "stream", bool, "a boolean") or False
    options = _optional(body, "stream_options", dict, "an object")
    if options and not stream:
        raise BadRequest("Stream options can only be defined when `stream=True`.", param="stream_options")
    if route is Route.CHAT:
        _check_messages(body)
    else:
        _check_prompt(body)
    n = _whole(body, "n", at_least=1)
    priority, salt = body.get("priority"), body.get("cache_salt")
    return Call(
        route=route,
        body=body,
        model=model,
        stream=stream,
        n=1 if n is None else n,
        max_output_tokens=_max_output_tokens(route, body),
        priority=priority if isinstance(priority, int) and abs(priority) < 2**31 else 0,
        cache_salt=salt if isinstance(salt, str) else "",
        single_worker_reason=_single_worker_reason(route, body),
        stripped=[name for name in STRIPPED if body.pop(name, None) is not None],
    )


def _optional(body: dict[str, Any], name: str, kind: type, what: str) -> Any:
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        raise BadRequest(f"`{name}` must be {what}.", param=name)
    return value


def _whole(body: dict[str, Any], name: str, *, at_least: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadRequest(f"`{name}` must be an integer.", param=name)
    if value < at_least:
        raise BadRequest(f"`{name}` must be at least {at_least}, got {value}.", param=name)
    return value


def _max_output_tokens(route: Route, body: dict[str, Any]) -> int:
    # `max_tokens: 0` with `echo` asks only for the prompt's own logprobs (completions).
    at_least = 0 if route is Route.COMPLETIONS and body.get("echo") else 1
    limits = [_whole(body, name, at_least=at_least) for name in ("max_completion_tokens", "max_tokens")]
    known = [limit for limit in limits if limit is not None]
    if known:
        return known[0]
    return 16 if route is Route.COMPLETIONS else 0  # what vLLM and OpenAI take when nothing is said


def _check_messages(body: dict[str, Any]) -> None:
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise BadRequest("`messages` must be an array.", param="messages")
    if not messages:
        raise BadRequest("`messages` must not be empty.", param="messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadRequest("A message must be an object.", param=f"messages.{index}")
        if not isinstance(message.get("role"), str):
            raise BadRequest("A message must have a `role`.", param=f"messages.{index}.role")
        if not isinstance(message.get("content"), str | list | None):
            raise BadRequest("`content` must be a string or an array of parts.", param=f"messages.{index}.content")


def _check_prompt(body: dict[str, Any]) -> None:
    prompt, embeds = body.get("prompt"), body.get("prompt_embeds")
    if not isinstance(prompt, str | list | None):
        raise BadRequest("`prompt` must be a string, an array of strings, or an array of token ids.", param="prompt")
    if not prompt and not embeds:
        raise BadRequest("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")


def single_prompt(body: dict[str, Any]) -> str | list[Any] | None:
    """The one prompt of a completions request, as text or as token ids; None when there are several (or none)."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not prompt:
        return None
    if isinstance(prompt[0], str | list):
        return prompt[0] if len(prompt) == 1 else None
    return prompt


def _single_worker_reason(route: Route, body: dict[str, Any]) -> str | None:
    if body.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    if body.get("echo"):
        return "echo"
    if body.get("use_beam_search") or (body.get("best_of") or 1) != 1:
        return "beam_search"
    if route is Route.CHAT:
        return "media" if _has_media(body["messages"]) else None
    if body.get("suffix") is not None:
        return "suffix"
    if body.get("prompt_embeds"):
        return "prompt_embeds"
    return None if single_prompt(body) is not None else "several_prompts"


def _has_media(messages: list[dict[str, Any]]) -> bool:
    """Whether any content part is not text; the rule is vLLM's `chat_utils.has_non_text_content`."""
    return any(
        isinstance(part, dict) and (_MEDIA_KEYS & part.keys() or part.get("type", "text") not in _TEXT_PARTS)
        for message in messages
        if isinstance(parts := message.get("content"), list)
        for part in parts
        if not isinstance(part, dict) or isinstance(part.get("type", "text"), str)
    )


def error_object(message: str, kind: str, param: str | None = None, code: str | int | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_of(error: MooncakeError) -> dict[str, Any]:
    """The OpenAI error object of one of our own errors."""
    if isinstance(error, BadRequest):
        return error_object(str(error), error.error_type, error.param, error.error_code)
    return error_object(str(error), error.error_type)


def error_body(error: MooncakeError) -> bytes:
    return msgspec.json.encode(error_of(error))
