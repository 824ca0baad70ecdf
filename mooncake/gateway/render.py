"""From a request to token ids and block keys, exactly as the model's own vLLM would do it. Runs in a process of the tokenizer pool.

Follows vLLM 0.32: `renderers/online_renderer.py` (which arguments reach the template), `renderers/chat_utils.py` (messages to conversation),
`renderers/hf.py` (template, kwargs), `renderers/params.py` (tokenizing). What cannot be followed raises NoKVInformation: one worker then
serves the whole request, and gives the answer or the error that it would have given anyway. `parity.py` proves the rest on each worker.
Knows: model directories, templates, tokens, keys. Does not know: HTTP, instances, processes.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import msgspec
import numpy as np

from mooncake.common.block_key import iter_keys, pack_keys, root_key, tokens_to_bytes
from mooncake.gateway.content_format import content_format, template_environment
from mooncake.gateway.conversation import NoKVInformation, as_system, conversation_of, tool_dicts

# Their chat prompts are not made by a Jinja template, or not by one that we know to find.
UNSUPPORTED_CHAT = frozenset(
    (
        "gpt_oss",
        "deepseek_v32",
        "deepseek_v4",
        "deepseek_v41",
        "kimi_k3",
        "kimi_audio",
        "inkling",
        "terratorch",
        "cohere2",
    )
)
TEMPLATES_KEPT = 32
MAX_TOKEN_ID = 2**32 - 1


@dataclass(frozen=True)
class RenderJob:
    """What the pool needs to know of a request. Exactly one of `messages`, `prompt` is used, by `chat`."""

    model_path: str
    model: str
    fingerprint: str
    block_size: int
    max_model_len: int
    chat: bool
    body: dict[str, Any] = field(default_factory=dict)
    prompt: str | list[Any] | None = None
    lora: str = ""
    cache_salt: str = ""
    trust_chat_template: bool = False


@dataclass(frozen=True)
class Rendered:
    """A tokenized prompt."""

    prompt_tokens: int
    token_bytes: bytes
    """Little-endian u32."""
    token_json: bytes
    """The ids as a JSON array, ready to be spliced into a request."""
    block_keys: bytes
    """Packed, 16 bytes each."""
    digest: str
    """Hex of `prompt_digest`."""


class PromptTooLong(Exception):
    """`args`: number of tokens (at least), the model's limit."""


class BadPrompt(Exception):
    """The prompt can be no prompt of this model; the text says why."""


class ModelRenderer:
    """Tokenizer and templates of one model directory."""

    def __init__(self, model_path: str) -> None:
        if not model_path:
            raise NoKVInformation("the worker does not tell its model directory")
        from transformers import AutoTokenizer

        directory = Path(model_path)
        config = json.loads((directory / "config.json").read_text()) if (directory / "config.json").exists() else {}
        self._model_type = str(config.get("model_type", ""))
        if (directory / "tekken.json").exists():
            raise NoKVInformation("Mistral's own tokenizer format")
        # vLLM loads it with these arguments (tokenizers/registry.py); remote code is never run here.
        self._tokenizer = AutoTokenizer.from_pretrained(model_path, truncation_side="left", trust_remote_code=False)
        self._max_chars_per_token = max(len(token) for token in self._tokenizer.get_vocab())
        self._template = lru_cache(TEMPLATES_KEPT)(_Template)
        self._accepted = frozenset(inspect.signature(self._tokenizer.apply_chat_template).parameters) - {"kwargs"}

    def token_ids(self, job: RenderJob) -> list[int]:
        """Raises NoKVInformation, PromptTooLong, BadPrompt."""
        if job.body.get("truncate_prompt_tokens") is not None:
            raise NoKVInformation("truncate_prompt_tokens")
        if job.chat:
            return self._encode(self._chat_text(job), job, job.body.get("add_special_tokens", False))
        if isinstance(job.prompt, str):
            return self._encode(job.prompt, job, job.body.get("add_special_tokens", True))
        raise NoKVInformation("no single prompt")

    def _encode(self, text: str, job: RenderJob, add_special_tokens: object) -> list[int]:
        # Bounded work: neither text nor tokens beyond what could fit are looked at (vLLM: TokenizeParams).
        if len(text) > job.max_model_len * self._max_chars_per_token:
            raise PromptTooLong(len(text) // self._max_chars_per_token, job.max_model_len)
        encoded = self._tokenizer(
            text, truncation=True, max_length=job.max_model_len + 1, add_special_tokens=bool(add_special_tokens)
        )
        ids: list[int] = encoded["input_ids"]
        if len(ids) > job.max_model_len:
            raise PromptTooLong(len(ids), job.max_model_len)
        return ids

    def _chat_text(self, job: RenderJob) -> str:
        if self._model_type in UNSUPPORTED_CHAT:
            raise NoKVInformation(f"chat format of {self._model_type}")
        body = job.body
        given = body.get("chat_template")
        if given is not None and not job.trust_chat_template:
            raise NoKVInformation("chat_template of the request")
        tools = tool_dicts(body.get("tools"))
        try:
            template = self._template(self._tokenizer.get_chat_template(given, tools=tools))
        except (ValueError, jinja2.TemplateError) as error:
            raise NoKVInformation(f"chat template: {error}") from None
        conversation = conversation_of(body["messages"], template.format)
        if not template.knows_developer and any(message["role"] == "developer" for message in conversation):
            conversation = as_system(conversation)
        wanted = template_arguments(body)
        if wanted.keys() & {"chat_template", "tokenize"}:
            raise NoKVInformation("chat_template_kwargs")
        accepted = {k: v for k, v in wanted.items() if k in template.variables or k in self._accepted}
        if accepted.keys() & {"tokenize", "conversation", "tools"}:
            raise NoKVInformation("chat_template_kwargs")
        try:
            text = self._tokenizer.apply_chat_template(
                conversation,
                tools=tools,
                chat_template=template.source,
                tokenize=False,
                **{"return_dict": False, **accepted},
            )
        except Exception as error:  # a template may raise anything; the worker words the refusal
            raise NoKVInformation(f"chat template: {error}") from None
        if not isinstance(text, str):
            raise NoKVInformation("chat_template_kwargs")
        return text


class _Template:
    """What is known of one template's text."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.format = content_format(source)
        self.knows_developer = '"developer"' in source or "'developer'" in source
        self.variables = jinja2.meta.find_undeclared_variables(template_environment().parse(source))


def template_arguments(body: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of the template, as `ChatCompletionRequest.build_chat_params` merges them: the request's own fields win."""
    given = body.get("chat_template_kwargs") or {}
    if not isinstance(given, dict):
        raise NoKVInformation("chat_template_kwargs")
    effort = body.get("reasoning_effort")
    fields: dict[str, Any] = {
        "add_generation_prompt": _flag(body, "add_generation_prompt", True),
        "continue_final_message": _flag(body, "continue_final_message", False),
        "documents": body.get("documents"),
        "reasoning_effort": effort,
    }
    if effort is not None and "enable_thinking" not in given:
        fields["enable_thinking"] = effort != "none"
    return given | {k: v for k, v in fields.items() if v is not None and v != "auto"}


def _flag(body: dict[str, Any], name: str, default: bool) -> bool:
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise NoKVInformation(name)
    return value


def checked_ids(prompt: list[Any], max_model_len: int) -> list[int]:
    """A prompt that came as token ids already. Raises NoKVInformation, PromptTooLong, BadPrompt."""
    if len(prompt) > max_model_len:
        raise PromptTooLong(len(prompt), max_model_len)
    if any(type(token) is not int for token in prompt):
        raise NoKVInformation("prompt of mixed types")
    if (low := min(prompt)) < 0:
        raise BadPrompt(f"Token id {low} is out of vocabulary")
    if (high := max(prompt)) > MAX_TOKEN_ID:
        raise BadPrompt(f"Token id {high} is out of vocabulary")
    return prompt


def keys_of(token_ids: list[int], job: RenderJob) -> Rendered:
    """Packs token ids and derives the block keys of their full blocks."""
    import hashlib

    token_bytes = tokens_to_bytes(np.asarray(token_ids, dtype=np.int64))
    root = root_key(
        model=job.model,
        fingerprint=job.fingerprint,
        block_size=job.block_size,
        lora=job.lora,
        cache_salt=job.cache_salt,
    )
    return Rendered(
        prompt_tokens=len(token_ids),
        token_bytes=token_bytes,
        token_json=msgspec.json.encode(token_ids),
        block_keys=pack_keys(list(iter_keys(root, token_bytes, job.block_size))),
        digest=hashlib.sha256(token_bytes).hexdigest(),
    )
