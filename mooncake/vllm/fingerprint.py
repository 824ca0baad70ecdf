"""Layout fingerprint: equal exactly if the bytes of a block mean the same KV to two engines (DESIGN.md §4, "KV layout").

Knows: what the KV bytes depend on: the model's weights and configuration, dtypes, block size, shapes inside a block, the
attention backend and, on a CPU, the instruction set that decides how keys are packed. Stable over processes, restarts and
machines. Does not know: addresses or the number of blocks, which may differ between two equal engines.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mooncake.vllm.kv_layout import KVLayout

_log = logging.getLogger(__name__)
_SAMPLE_BYTES = 64 * 1024
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth")
_IGNORED = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}


def fingerprint(layout: KVLayout, *, engine: dict[str, Any], model: str, salt: str) -> str:
    """64 hex digits. `engine` holds plain values (see `engine_facts`), `model` comes from `model_identity`."""
    layers = [(layer.name, layer.block_bytes, layer.inner) for layer in layout.layers]
    facts = {"v": 1, "block_size": layout.block_size, "layers": layers, "engine": engine, "model": model, "salt": salt}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def engine_facts(vllm_config: Any, layer_names: Iterable[str]) -> dict[str, Any]:
    """What of vLLM's configuration decides about the bytes inside of a block."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    modules = vllm_config.compilation_config.static_forward_context
    backends, isas = set(), set()
    for name in layer_names:
        module = modules.get(name.split("#")[0])
        backend = getattr(module, "attn_backend", None)
        backends.add(backend.get_name() if backend is not None else "")
        isas.add(str(getattr(module, "isa", "")))
    return {
        "dtype": str(model.dtype),
        "kv_dtype": str(cache.cache_dtype),
        "backends": sorted(backends),
        "isas": sorted(isas),
        "quantization": str(model.quantization),
        "tensor_parallel": vllm_config.parallel_config.tensor_parallel_size,
        "rope": json.dumps(getattr(model.hf_text_config, "rope_parameters", None), sort_keys=True, default=str),
    }


def model_identity(model: str, revision: str | None, hf_config: Any) -> str:
    """Digest of the model's configuration and of its weight files' names, sizes and sampled content."""
    digest = hashlib.sha256()
    config = {key: value for key, value in hf_config.to_dict().items() if key not in _IGNORED}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    folder = Path(model)
    if not folder.is_dir():
        digest.update(f"{model}@{revision}".encode())
        return digest.hexdigest()
    for path in sorted({p for pattern in _WEIGHTS for p in folder.glob(pattern)}):
        digest.update(f"{path.name}:{path.stat().st_size}:".encode())
        for piece in _samples(path):
            digest.update(piece)
    return digest.hexdigest()


def _samples(path: Path) -> Iterable[bytes]:
    """Head (with the safetensors header), middle and tail of a file: enough to tell two trainings apart."""
    size = path.stat().st_size
    with path.open("rb") as file:
        for offset in (0, max(0, size // 2 - _SAMPLE_BYTES // 2), max(0, size - _SAMPLE_BYTES)):
            file.seek(offset)
            yield file.read(_SAMPLE_BYTES)
