"""From a request to its tokens: by the tokenizer pool, by the worker where it tokenizes otherwise, or not at all.

Knows: who can say it. Does not know: how tokens are made (render.py), what they are used for.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from mooncake.gateway.directory import Directory, Model
from mooncake.gateway.openai import Call, Route, single_prompt
from mooncake.gateway.parity import Parity
from mooncake.gateway.render import Rendered, RenderJob
from mooncake.gateway.tokenizer_pool import TokenizerPool

NOT_TEXT = frozenset(("media", "prompt_embeds", "several_prompts", "suffix"))
"""Reasons for a single worker that also keep the gateway from knowing the tokens."""


@dataclass(frozen=True)
class Prompts:
    """One object a gateway."""

    pool: TokenizerPool
    parity: Parity
    directory: Directory
    trust_chat_template: bool

    async def tokenize(self, call: Call, model: Model) -> Rendered:
        """Raises NoKVInformation, BadRequest (too long, bad ids), Overloaded."""
        chat = call.route is Route.CHAT
        prompt = None if chat else single_prompt(call.body)
        job = RenderJob(
            model_path=model.model_path,
            model=model.name,
            fingerprint=model.fingerprint,
            block_size=model.block_size,
            max_model_len=model.max_model_len,
            chat=chat,
            body=call.body,
            prompt=prompt,
            lora=model.lora,
            cache_salt=call.cache_salt,
            trust_chat_template=self.trust_chat_template,
        )
        if isinstance(prompt, list) or self.directory.tokenizes_alike(model):
            return await self.pool.render(job)
        return await self.pool.pack(await self.parity.worker_tokens(model, call), job)


def rough_tokens(call: Call) -> int:
    """A prompt's length when its tokens are not known: about four bytes each."""
    asked = call.body.get("messages") if call.route is Route.CHAT else call.body.get("prompt")
    return max(1, len(msgspec.json.encode(asked)) // 4)
