"""A tiny random-weight Llama that vLLM serves offline: real tokenizer, real chat template, meaningless text.

Knows: what makes vLLM's CPU backend accept a model and what keeps its greedy text from degenerating.
Does not know: where models are kept (`cache`), or how they are named by users (`resolve`).

1.1 M parameters and 2.4 MB with four layers; made in about five seconds. One token's KVCache is
layers x 2 KV heads x (32 + 32) values: 1 KiB in bfloat16 and 2 KiB in float32 with four layers.
"""

from __future__ import annotations

import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mooncake.models.cache import build_once, cache_dir

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Raise it whenever the bytes made here change: it is part of the cache folder's name.
TINY_VERSION = "1"

VOCABULARY = 4096
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# ChatML. Tools are listed in a system turn of their own and calls are written in `<tool_call>` tags, as Hermes and Qwen
# do, so vLLM's "hermes" parser fits. It never loops over `content`: vLLM would then hand it parts instead of text.
CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
You may call one of these functions by writing <tool_call>{"name": ..., "arguments": ...}</tool_call>:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] %}{{ message['content'] }}{% endif %}
{%- for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor -%}
<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_tiny(directory: str | Path, layers: int = 4, seed: int = 0) -> Path:
    """Write the model into `directory` (created if missing) and return it.

    The same arguments give the same bytes under one version of Python, tokenizers and torch: the tokenizer is trained
    on the standard library's source and the weights are drawn from `seed`. The global random state is left alone.
    """
    out = Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer()
    tokenizer.save_pretrained(out)
    _save_model(_draw_model(tokenizer, layers, seed), out)
    return out


def cached_tiny(layers: int = 4, seed: int = 0) -> Path:
    """The model's folder in the cache, made on first use."""
    made_by = f"py{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}-torch{version('torch')}"
    name = f"tiny-v{TINY_VERSION}-{layers}layers-seed{seed}-{made_by}"
    return build_once(cache_dir() / name, lambda folder: make_tiny(folder, layers, seed))


def _train_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    byte_pairs = Tokenizer(models.BPE())
    byte_pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_pairs.decoder = decoders.ByteLevel()
    text = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:150]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    byte_pairs.train([str(path) for path in text], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_pairs, eos_token=TURN_END, pad_token=END_OF_TEXT, bos_token=None
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _draw_model(tokenizer: PreTrainedTokenizerFast, layers: int, seed: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's CPU attention takes
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,  # smaller, and greedy text repeats one token for ever
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


def _save_model(model: Any, out: Path) -> None:
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(out)
    finally:
        if bars:
            logging.enable_progress_bar()
    (out / "model.safetensors").chmod(0o644)  # written as private to the user
