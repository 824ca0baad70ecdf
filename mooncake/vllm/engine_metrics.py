"""`/metrics` of a worker host: its own metrics, the connector's counters, vLLM's own text, as one valid exposition.

Knows: the text format. Only `vllm:*` families of vLLM's text pass (its process and Python families would collide with
ours). Type and help text of a connector sample are those of counters.py, of its transfer engine's those of
transfer_engine/metrics.py; for names that they lack (a connector of another version) the type follows from the name.
Halves that tell the same sample are added up. Does not know: HTTP.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from mooncake.vllm.counters import METRICS
from mooncake.vllm.counters import PREFIX as CONNECTOR_PREFIX
from transfer_engine import metrics as transfer

_UNKNOWN = "Of the connector inside vLLM's processes"
_KNOWN = {CONNECTOR_PREFIX + name: (metric.kind, metric.help) for name, metric in METRICS.items()}
_KNOWN |= {transfer.PREFIX + name: (metric.kind, metric.help) for name, metric in transfer.METRICS.items()}
_SAMPLE = re.compile(
    r'(?P<name>mooncake_(connector|transfer)_[a-zA-Z0-9_]+)(\{(?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\.)*",?)*\})?'
)
_ENGINE_LINE = re.compile(r"(# (HELP|TYPE) )?vllm:")


def engine_text(text: str) -> str:
    """vLLM's families out of its exposition, unchanged."""
    kept = [line for line in text.splitlines() if _ENGINE_LINE.match(line)]
    return "\n".join(kept) + "\n" if kept else ""


def connector_text(halves: Iterable[Mapping[str, float]]) -> str:
    """Exposition of what the halves told. Names that do not fit are left out."""
    values: dict[str, float] = {}
    for half in halves:
        for sample, value in half.items():
            if _SAMPLE.fullmatch(sample):
                values[sample] = values.get(sample, 0.0) + value
    families: dict[str, list[str]] = {}
    for sample in sorted(values):
        families.setdefault(sample.partition("{")[0], []).append(f"{sample} {_number(values[sample])}")
    lines = []
    for name, samples in families.items():
        kind, text = _KNOWN.get(name) or (_type_of(name), _UNKNOWN)
        lines.append(f"# HELP {name} {text}")
        lines.append(f"# TYPE {name} {kind}")
        lines += samples
    return "\n".join(lines) + "\n" if lines else ""


def _type_of(name: str) -> str:
    if name.endswith("_total"):
        return "counter"
    if name.endswith(("_bucket", "_sum", "_count")):
        return "untyped"
    return "gauge"


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf")


def merge(own: bytes, halves: Iterable[Mapping[str, float]], vllm: str) -> bytes:
    """The whole body."""
    return own + connector_text(halves).encode() + engine_text(vllm).encode()
