"""Writes docs/reference.md: every option of every command and every metric of every role, out of the code.

Options come from the command line's own parsers and config structs, metrics from the registries that the roles fill.
No role is started: its objects are made and asked. `make docs` writes the file, `--check` compares it only.
Knows: where each role declares its options and metrics. Does not know: what they mean; an option or a metric without a
help text is an error here, because it would be one there.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from prometheus_client import CollectorRegistry

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

from deploy.up_config import UpConfig  # noqa: E402
from mooncake import cli  # noqa: E402
from mooncake.common.config import ClusterConfig, Option, options  # noqa: E402
from mooncake.common.metrics import start_loop_lag  # noqa: E402
from mooncake.common.role import Role  # noqa: E402
from mooncake.vllm.counters import METRICS, PREFIX  # noqa: E402
from transfer_engine.metrics import PREFIX as TRANSFER_PREFIX  # noqa: E402

TARGET = ROOT / "docs" / "reference.md"
COMMON_METRICS = ("mooncake_etcd_connected", "mooncake_event_loop_lag_seconds")
"""What `Role` gives to each role: told once."""
FOREIGN_PREFIXES = ("process_", "python_")

HEAD = """\
# Reference

Made from the code by `make docs` (scripts/gen_reference.py); do not edit. How to use it: [operating.md](operating.md).

A field can be set in three places; later ones win: its key in the file that `--config` names (TOML; `-` and `_` in keys
are the same), its environment variable, its option. Lists are comma-separated in variables and options, arrays in the
file. Sizes take units everywhere: `64KiB`, `256MiB`, `2GiB`. Switches have a `--no-` form. An unknown key is an error,
and so is an unknown variable that begins like a role's own.
"""

METRICS_HEAD = """\
# Metrics

Each role serves them at `/metrics` of its HTTP address (`mooncake status` shows it). A histogram is scraped as `…_bucket`, `…_sum` and
`…_count`. All roles also have `process_*` and `python_*` of the Prometheus client.
"""


CONNECTOR_HEAD = """\
Served by the worker host beside its own, the sum over the engine's processes. vLLM's own `vllm:*` follow unchanged.
"""


TRANSFER_HEAD = """\
A worker shows the sum over its processes' engines. "From here" counts what the engine began itself: a target does nothing per transfer, and
knows only of tcp what passed.
"""


class MissingHelp(Exception):
    """An option or a metric that nobody explained."""


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


# --- options ---------------------------------------------------------------------------------------------------------


class _Captured(Exception):
    """Carries a finished parser out of the command line's code."""


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser that `mooncake COMMAND` builds for itself."""

    class Capturing(cli.Parser):
        def parse_args(self, *_args: Any, **_kwargs: Any) -> Any:
            raise _Captured(self)

    original, cli.Parser = cli.Parser, Capturing  # type: ignore[misc]
    try:
        cli.main([command])
    except _Captured as captured:
        return typing.cast(argparse.ArgumentParser, captured.args[0])
    finally:
        cli.Parser = original  # type: ignore[misc]
    raise AssertionError(f"mooncake {command} parsed nothing")


def default_text(option: Option) -> str:
    """As it would be written on the command line; empty when there is none."""
    value = option.default
    if value in (None, "", [], {}, ()):
        return ""
    if isinstance(value, list | tuple):
        return f"`{','.join(map(str, value))}`"
    if isinstance(value, bool):
        return "on" if value else "off"
    if option.name.endswith("_bytes") and isinstance(value, int):
        return f"`{_size(value)}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _size(count: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count and count % unit == 0:
            return f"{count // unit}{name}"
    return str(count)


def kind_text(struct: type[msgspec.Struct], option: Option) -> str:
    """Type and bounds."""
    if typing.get_origin(option.kind) is typing.Literal:
        return " / ".join(f"`{value}`" for value in typing.get_args(option.kind))
    origin = typing.get_origin(option.kind) or option.kind
    name = {bool: "switch", int: "integer", float: "number", str: "text", list: "list"}.get(origin, "JSON")
    if option.kind is int and option.name.endswith("_bytes"):
        name = "size"
    bounds = _bounds(struct, option.name)
    return f"{name}, {bounds}" if bounds else name


def _bounds(struct: type[msgspec.Struct], name: str) -> str:
    kind = next(field.type for field in msgspec.structs.fields(struct) if field.name == name)
    found: list[str] = []
    for meta in typing.get_args(kind)[1:] if typing.get_origin(kind) is typing.Annotated else ():
        for sign, value in ((">", meta.gt), ("≥", meta.ge), ("<", meta.lt), ("≤", meta.le)):
            if value is not None:
                shown = _size(value) if name.endswith("_bytes") and isinstance(value, int) else f"{value:.12g}"
                found.append(f"{sign} {shown}")
    return ", ".join(found)


def struct_table(struct: type[msgspec.Struct], section: str) -> str:
    """One line per field. Raises MissingHelp."""
    prefix = "MOONCAKE_" if section == "cluster" else f"MOONCAKE_{section.upper().replace('-', '_')}_"
    rows = []
    for option in options(struct):
        if not option.help:
            raise MissingHelp(f"{struct.__name__}.{option.name} has no msgspec.Meta(description=...)")
        rows.append(
            (
                f"`{option.flag}`",
                f"`{option.name}`",
                f"`{prefix}{option.name.upper()}`",
                kind_text(struct, option),
                "required" if option.required else default_text(option),
                option.help,
            )
        )
    return table(("option", "key", "variable", "value", "default", "meaning"), rows)


def other_options(command: str, structs: Sequence[type[msgspec.Struct]]) -> str:
    """What a command takes beyond its structs. Raises MissingHelp for any option without a text."""
    known = {option.name for struct in structs for option in options(struct)}
    rows = []
    for action in parser_of(command)._actions:
        flags = ", ".join(f"`{flag}`" for flag in action.option_strings) or f"`{action.dest.upper()}`"
        if not action.help:
            raise MissingHelp(f"mooncake {command} {flags} has no help text")
        in_struct = action.dest in known and f"--{action.dest.replace('_', '-')}" in action.option_strings
        if not in_struct and "--help" not in action.option_strings:
            text = action.help % {"default": action.default, "prog": ""}
            rows.append((flags, text))
    return table(("option", "meaning"), rows)


def options_part() -> Iterator[str]:
    yield "# Options\n\n## All roles: `[cluster]`\n\n" + struct_table(ClusterConfig, "cluster")
    done: set[str] = set()
    for command, entry in cli.ROLES.items():
        struct = cli._load(entry.config)
        extra = other_options(command, (ClusterConfig, struct))
        same = [name for name, other in cli.ROLES.items() if other.section == entry.section]
        if entry.section in done:
            continue
        done.add(entry.section)
        title = ", ".join(f"`mooncake {name}`" for name in same)
        what = "; ".join(f"`{name}`: {cli.ROLES[name].help}" for name in same)
        yield f"\n## {title}: `[{entry.section}]`\n\n{what}.\n\n{extra}\n"
        yield struct_table(struct, entry.section)
    yield f"\n## `mooncake up`: `[up]`\n\n{other_options('up', (UpConfig,))}\n{struct_table(UpConfig, 'up')}"
    for command, text in cli.OTHERS.items():
        if command != "up":
            yield f"\n## `mooncake {command}`\n\n{text[0].upper()}{text[1:]}.\n\n{other_options(command, ())}"


# --- metrics ---------------------------------------------------------------------------------------------------------


class MetricLine(NamedTuple):
    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


def lines_of(registry: CollectorRegistry) -> list[MetricLine]:
    """What a scrape of that registry can show. Raises MissingHelp."""
    labels: dict[str, tuple[str, ...]] = {}
    for collector in registry._collector_to_names:
        if hasattr(collector, "_name"):
            labels[collector._name] = tuple(collector._labelnames)
    found = []
    for family in registry.collect():
        if family.name.startswith(FOREIGN_PREFIXES):
            continue
        if not family.documentation:
            raise MissingHelp(f"metric {family.name} has no help text")
        name = family.name + ("_total" if family.type == "counter" else "")
        own = labels.get(family.name, tuple(getattr(family, "_labelnames", ())))
        found.append(MetricLine(name, family.type, own, family.documentation))
    return sorted(found)


def metric_table(lines: Iterable[MetricLine]) -> str:
    rows = [(f"`{x.name}`", x.kind, ", ".join(f"`{label}`" for label in x.labels), x.help) for x in lines]
    return table(("metric", "type", "labels", "meaning"), rows)


def _fill_gateway(role: Role) -> None:
    from mooncake.gateway.metrics import GatewayMetrics

    GatewayMetrics(role.metrics)


def _fill_conductor(role: Role) -> None:
    from conductor.config import ConductorConfig
    from conductor.core import Conductor
    from conductor.telemetry import Telemetry
    from mooncake.common.clock import MonotonicClock

    Telemetry(role.metrics, Conductor(ConductorConfig()), MonotonicClock(), leads=lambda: False)


def _fill_worker(role: Role) -> None:
    from mooncake.vllm.host import WorkerHost
    from mooncake.vllm.host_config import WorkerConfig

    WorkerHost(role, ClusterConfig(), WorkerConfig(), ("prefill",), Path("unused"))


def _fill_store_master(role: Role) -> None:
    from store.master.config import MasterConfig
    from store.master.service import MasterService

    MasterService(MasterConfig().settings(), role.metrics).lead(1)


def _fill_store_node(role: Role) -> None:
    from store.node.config import NodeConfig
    from store.node.metrics import NodeMetrics
    from store.node.segment import NodeSegment

    segment = NodeSegment(ClusterConfig(), NodeConfig(segment_bytes=1 << 16), role.name)  # on a free loopback port
    try:
        NodeMetrics(role.metrics, segment)
    finally:
        segment.close()


FILLERS: dict[str, tuple[str, Callable[[Role], None]]] = {
    "gateway": ("Gateway", _fill_gateway),
    "conductor": ("Conductor", _fill_conductor),
    "store-master": ("Store master", _fill_store_master),
    "store-node": ("Store node", _fill_store_node),
    "prefill": ("Workers (prefill and decoding), from the worker host", _fill_worker),
}


# --- the connector, which lives in vLLM's processes and has no registry --------------------------------------------------

CONNECTOR_SOURCES = ("mooncake/connector/*.py", "mooncake/vllm/*.py", "prefill/*.py", "decode/*.py")


def connector_lines() -> list[MetricLine]:
    """Every `….counters.add("name", label=…)` and `….gauge(…)` of the connector's sources. Raises MissingHelp."""
    found: dict[str, tuple[str, set[str]]] = {}
    for pattern in CONNECTOR_SOURCES:
        for file in sorted(ROOT.glob(pattern)):
            for kind, call in _counter_calls(ast.parse(file.read_text())):
                name = call.args[0]
                if not (isinstance(name, ast.Constant) and isinstance(name.value, str)):
                    raise MissingHelp(f"{file.name}:{call.lineno}: the metric's name must be a literal")
                labels = {word.arg for word in call.keywords if word.arg not in (None, "amount", "value")}
                found.setdefault(name.value, (kind, set()))[1].update(labels)  # type: ignore[arg-type]
    for name in sorted(found.keys() - METRICS.keys()):
        raise MissingHelp(f"{PREFIX}{name} is missing in METRICS of mooncake/vllm/counters.py")
    for name in sorted(METRICS.keys() - found.keys()):
        raise MissingHelp(f"{PREFIX}{name} is missing in the code")
    for name, (kind, _) in found.items():
        if kind != METRICS[name].kind:
            raise MissingHelp(
                f"{PREFIX}{name} is used as a {kind}, mooncake/vllm/counters.py says {METRICS[name].kind}"
            )
    return [
        MetricLine(PREFIX + name, kind, tuple(sorted(labels)), METRICS[name].help)
        for name, (kind, labels) in sorted(found.items())
    ]


def _counter_calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            holder = node.func.value
            owner = holder.attr if isinstance(holder, ast.Attribute) else getattr(holder, "id", "")
            if owner.endswith("counters") and node.func.attr in ("add", "gauge"):
                yield "counter" if node.func.attr == "add" else "gauge", node


async def registry_of(role_name: str, fill: Callable[[Role], None]) -> CollectorRegistry:
    """A role's registry as its start-up fills it."""
    role = Role(ClusterConfig(), role_name, f"{role_name}-0")
    fill(role)
    start_loop_lag(role.metrics).cancel()
    return role.metrics


async def metrics_part() -> list[str]:
    parts, common, transfer = [METRICS_HEAD], {}, {}
    sections = []
    for role_name, (title, fill) in FILLERS.items():
        lines = lines_of(await registry_of(role_name, fill))
        common.update({line.name: line for line in lines if line.name in COMMON_METRICS})
        transfer.update({line.name: line for line in lines if line.name.startswith(TRANSFER_PREFIX)})
        own = [line for line in lines if line.name not in {*COMMON_METRICS, *transfer}]
        sections.append(f"\n## {title}\n\n{metric_table(own)}")
    parts.append(f"\n## All roles\n\n{metric_table(sorted(common.values()))}")
    connector = f"\n## Workers, from the connector inside vLLM\n\n{CONNECTOR_HEAD}\n{metric_table(connector_lines())}"
    engine = (
        f"\n## Transfer engine of store nodes and workers\n\n{TRANSFER_HEAD}\n{metric_table(sorted(transfer.values()))}"
    )
    return [*parts, *sections, connector, engine]


def reference() -> str:
    """The whole page."""
    return HEAD + "\n" + "".join(options_part()) + "\n" + "".join(asyncio.run(metrics_part()))


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/reference.md out of the code.")
    parser.add_argument("--check", action="store_true", help="only say whether the file is what would be written")
    check = parser.parse_args().check
    try:
        text = reference()
    except MissingHelp as missing:
        print(f"gen_reference: {missing}", file=sys.stderr)
        return 1
    if not check:
        TARGET.write_text(text)
    elif not TARGET.is_file() or TARGET.read_text() != text:
        print("docs/reference.md is not what the code says: run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
