"""`mooncake trace`: the life of one request layer by layer, and whether transfer overlapped computation (paper §5.2).

Knows: the trace events of docs/protocol.md §4. A layer is computed once a chunk of the prompt; its bytes may leave
once a consumer.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deploy.run_dir import read_state
from deploy.status import table
from mooncake.common.errors import ConfigError, MooncakeError

Event = dict[str, Any]


@dataclass(frozen=True)
class LayerTimes:
    """One layer of one chunk; seconds since the trace's first event. `sent_s` is None when no send was recorded."""

    chunk: int
    layer: int
    computed_s: float
    sent_s: float | None
    left_early: bool


def layer_times(events: Sequence[Event]) -> list[LayerTimes]:
    """The k-th time that a layer was computed belongs to chunk k; its send is the first one after that.

    `left_early`: sent before the last layer of the same chunk was computed.
    """
    if not events:
        return []
    start = min(e["t"] for e in events)
    computed: dict[int, list[float]] = defaultdict(list)
    sent: dict[int, list[float]] = defaultdict(list)
    for event in sorted(events, key=lambda e: float(e["t"])):
        if event["event"] == "layer_computed":
            computed[event["layer"]].append(event["t"] - start)
        elif event["event"] == "layer_sent":
            sent[event["layer"]].append(event["t"] - start)
    last_layer = max(computed, default=-1)
    found = []
    for chunk in range(max(map(len, computed.values()), default=0)):
        ends = computed[last_layer][chunk] if chunk < len(computed[last_layer]) else None
        for layer in sorted(computed):
            if chunk >= len(computed[layer]):
                continue
            done = computed[layer][chunk]
            left = next((t for t in sent[layer] if t >= done), None)
            early = left is not None and ends is not None and left < ends
            found.append(LayerTimes(chunk, layer, done, left, early))
    return found


def render(trace: dict[str, Any]) -> str:
    """For people: other events in order, then a line a layer, then the verdict."""
    events: list[Event] = trace["events"]
    layers = layer_times(events)
    parts = [f"request {trace.get('request_id')}   transfer {_transfers(trace)}"]
    start = min((e["t"] for e in events), default=0.0)
    others = [
        (f"{(e['t'] - start) * 1e3:.1f}", e.get("who", ""), e["event"], _details(e))
        for e in sorted(events, key=lambda e: float(e["t"]))
        if e["event"] not in ("layer_computed", "layer_sent")
    ]
    if others:
        parts.append(table(("MS", "WHO", "EVENT", ""), others))
    if not layers:
        parts.append("no layer was computed for this request under a transfer: nothing to show")
        return "\n\n".join(parts)
    rows = [(x.chunk, x.layer, _ms(x.computed_s), _ms(x.sent_s), _verdict(x, layers)) for x in layers]
    parts.append(table(("CHUNK", "LAYER", "COMPUTED MS", "SENT MS", "OVERLAP"), rows))
    early = [x for x in layers if x.left_early]
    last = max(x.layer for x in layers)
    parts.append(
        "\n".join(
            f"layer {x.layer} left before the last layer was computed: {'yes' if x.left_early else 'no'}"
            for x in layers
            if x.chunk == 0 and x.layer != last
        )
    )
    parts.append(f"{len(early)} of {sum(x.layer != last for x in layers)} sends overlapped with computation")
    return "\n\n".join(part for part in parts if part)


def _transfers(trace: dict[str, Any]) -> str:
    """A request that was retried has one transfer a try."""
    tries = [str(one.get("transfer_id")) for one in trace.get("tries", ())]
    return ", ".join(tries) or str(trace.get("transfer_id") or "-")


def _details(event: Event) -> str:
    return " ".join(f"{k}={v}" for k, v in event.items() if k not in ("t", "who", "event"))


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


def _verdict(one: LayerTimes, layers: Sequence[LayerTimes]) -> str:
    if one.layer == max(x.layer for x in layers):
        return "last layer"
    return "yes" if one.left_early else "no"


def fetch(request_id: str, gateway: str, run_dir: str, api_key: str) -> dict[str, Any]:
    """Asks the gateway. Raises MooncakeError when it does not know the request or does not answer."""
    base = (gateway or str(read_state(run_dir)["endpoint"])).rstrip("/")
    if not base.startswith(("http://", "https://")):
        raise ConfigError(f"--gateway {gateway}: write a URL, e.g. http://127.0.0.1:8000")
    request = urllib.request.Request(f"{base}/debug/trace/{urllib.parse.quote(request_id, safe='')}")
    key = api_key or os.environ.get("MOONCAKE_API_KEY", "")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            trace: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise MooncakeError(f"the gateway at {base} does not know the request {request_id}") from error
        raise MooncakeError(
            f"the gateway at {base} answered {error.code}: {error.read(300).decode(errors='replace')}"
        ) from error
    except (OSError, ValueError) as error:
        raise MooncakeError(f"the gateway at {base} does not answer: {error}") from error
    return trace


def main(request_id: str, gateway: str, run_dir: str, api_key: str, *, as_json: bool) -> int:
    """For the command line."""
    trace = fetch(request_id, gateway, run_dir, api_key)
    print(json.dumps(trace, indent=1) if as_json else render(trace))
    return 0
