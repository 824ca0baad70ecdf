"""The `mooncake` command: one sub-command a role, `up` for all of them, `status` and `trace` to look at them.

Knows: names of sub-commands and where their config structs and `run` functions are; options come from the structs.
Does not know: what a role does. Modules of a role are imported when its sub-command was chosen.
Exit codes: 0, 1 could not start (or not all ready), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from mooncake import __version__
from mooncake.common.errors import ConfigError, MooncakeError


class RoleEntry(NamedTuple):
    """Where a role lives."""

    help: str
    section: str
    config: str  # module:class
    main: str  # module with `run`


ROLES = {
    "gateway": RoleEntry(
        "OpenAI-compatible endpoint", "gateway", "mooncake.gateway.config:GatewayConfig", "mooncake.gateway.main"
    ),
    "conductor": RoleEntry(
        "places requests on instances", "conductor", "conductor.config:ConductorConfig", "conductor.main"
    ),
    "prefill": RoleEntry(
        "vLLM worker that prefills", "worker", "mooncake.vllm.host_config:WorkerConfig", "prefill.main"
    ),
    "decode": RoleEntry("vLLM worker that decodes", "worker", "mooncake.vllm.host_config:WorkerConfig", "decode.main"),
    "store-master": RoleEntry(
        "metadata of the KVCache pool", "store-master", "store.master.config:MasterConfig", "store.master.main"
    ),
    "store-node": RoleEntry(
        "memory of the KVCache pool", "store-node", "store.node.config:NodeConfig", "store.node.main"
    ),
}
OTHERS = {
    "bench": "measure a part of the platform: `mooncake bench transfer`",
    "up": "start a whole cluster on this machine",
    "status": "show who is in the cluster and whether all are ready",
    "topology": "show which NICs are near which memory, here and on the cluster's machines",
    "trace": "show one request's life, layer by layer",
}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, with the nearest valid option."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | {"allow_abbrev": False}))

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            wrong = message.split(": ", 1)[1].split()[0].split("=")[0]
            close = difflib.get_close_matches(wrong, list(self._option_string_actions), n=1)
            message = f"unknown option {wrong}" + (f"; did you mean {close[0]}?" if close else "")
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one sub-command; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    command = arguments[0] if arguments else ""
    try:
        if command in ROLES:
            return _role(command, arguments[1:])
        if command in OTHERS:
            return _OTHER_MAINS[command](arguments[1:])
        return _top(arguments)
    except ConfigError as error:
        print(f"mooncake {command}: {error}", file=sys.stderr)
        return 2
    except MooncakeError as error:
        print(f"mooncake {command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _top(arguments: Sequence[str]) -> int:
    lines = [f"  {name:<14}{text}" for name, text in ({n: r.help for n, r in ROLES.items()} | OTHERS).items()]
    parser = Parser(
        prog="mooncake",
        usage="mooncake COMMAND [options]",
        description="KVCache-centric, disaggregated serving of large language models.",
        epilog="commands:\n" + "\n".join(lines) + "\n\n`mooncake COMMAND --help` shows a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"mooncake {__version__}")
    if not arguments:
        parser.print_help()
        return 2
    if not arguments[0].startswith("-"):
        close = difflib.get_close_matches(arguments[0], [*ROLES, *OTHERS], n=1)
        parser.error(f"unknown command {arguments[0]!r}" + (f"; did you mean {close[0]}?" if close else ""))
    parser.parse_args(arguments)
    return 2


def _role(command: str, arguments: Sequence[str]) -> int:
    from mooncake.common.config import ClusterConfig, add_options, given_options, load, read_file

    entry = ROLES[command]
    struct = _load(entry.config)
    parser = Parser(prog=f"mooncake {command}", description=entry.help + ".")
    parser.add_argument("--name", default=f"{command}-0", help="stable name of this instance (default %(default)s)")
    parser.add_argument("--port", type=_port, default=None, help="port to listen on (default: a free one)")
    parser.add_argument("--config", type=Path, default=None, metavar="FILE", help="TOML file; options win over it")
    add_options(parser.add_argument_group("cluster"), ClusterConfig)
    add_options(parser.add_argument_group(command), struct)
    options = parser.parse_args(arguments)
    file = read_file(options.config)
    cluster = load(ClusterConfig, "cluster", file=file, given=given_options(ClusterConfig, options))
    config = load(struct, entry.section, file=file, given=given_options(struct, options))
    run = importlib.import_module(entry.main).run
    with asyncio.Runner(loop_factory=_fast_loop if command == "gateway" else None) as runner:
        runner.run(run(cluster, config, name=options.name, port=options.port))
    return 0


def _fast_loop() -> asyncio.AbstractEventLoop:
    """The gateway relays every token: uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def _up(arguments: Sequence[str]) -> int:
    from deploy.local import main as up
    from deploy.up_config import UpConfig
    from mooncake.common.config import add_options, given_options, load, read_file

    parser = Parser(prog="mooncake up", description="Start a whole cluster on this machine; Ctrl-C stops it.")
    parser.add_argument("--config", type=Path, default=None, metavar="FILE", help="TOML file, also for the roles")
    parser.add_argument(
        "--compile", dest="enforce_eager", action="store_false", default=None, help="same as --no-enforce-eager"
    )
    add_options(parser, UpConfig)
    options = parser.parse_args(arguments)
    config = load(UpConfig, "up", file=read_file(options.config), given=given_options(UpConfig, options))
    return up(config, options.config.absolute() if options.config else None)


def _status(arguments: Sequence[str]) -> int:
    parser = Parser(prog="mooncake status", description="Exit code 0: everything is ready.")
    _cluster_options(parser)
    _look_options(parser)
    options = parser.parse_args(arguments)
    from deploy.status import main as status

    return status(_split(options.etcd), options.cluster, options.run_dir, as_json=options.json)


def _trace(arguments: Sequence[str]) -> int:
    parser = Parser(prog="mooncake trace", description="Per-layer timeline of one request.")
    parser.add_argument("request_id", help="x-mooncake-request-id of the answer")
    parser.add_argument("--gateway", default="", metavar="URL", help="the gateway that served it")
    parser.add_argument("--api-key", default="", help="when the gateway wants one (or MOONCAKE_API_KEY)")
    _look_options(parser)
    options = parser.parse_args(arguments)
    from deploy.trace import main as trace

    return trace(options.request_id, options.gateway, options.run_dir, options.api_key, as_json=options.json)


def _topology(arguments: Sequence[str]) -> int:
    parser = Parser(prog="mooncake topology", description="NICs and the memory that they are near.")
    parser.add_argument("--sysfs", type=Path, default=Path("/sys"), metavar="DIR", help="tree to read (default /sys)")
    parser.add_argument(
        "--override", type=Path, default=None, metavar="FILE", help="JSON file as a role's --transfer-topology"
    )
    _cluster_options(parser)
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(arguments)
    from deploy.topology import main as topology

    cluster = options.cluster or os.environ.get("MOONCAKE_CLUSTER", "mooncake")
    return topology(options.sysfs, options.override, _split(options.etcd), cluster, as_json=options.json)


def _bench(arguments: Sequence[str]) -> int:
    from mooncake.common.config import add_options, given_options, load
    from transfer_engine.bench import main
    from transfer_engine.bench_config import BenchConfig

    parser = Parser(prog="mooncake bench", description="Throughput and latency of the transfer engine.")
    parser.add_argument("what", choices=["transfer"], help="what to measure: transfer, the transfer engine")
    add_options(parser, BenchConfig)
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(arguments)
    config = load(BenchConfig, "bench", environ={}, given=given_options(BenchConfig, options))
    return main(config, as_json=options.json)


def _cluster_options(parser: Parser) -> None:
    parser.add_argument("--etcd", default="", metavar="HOST:PORT,...", help="etcd endpoints of the cluster")
    parser.add_argument("--cluster", default="", help="name of the cluster")


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _look_options(parser: Parser) -> None:
    parser.add_argument("--run-dir", default="", help="folder of a `mooncake up` (default .run)")
    parser.add_argument("--json", action="store_true", help="for programs")


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


_OTHER_MAINS = {"bench": _bench, "up": _up, "status": _status, "topology": _topology, "trace": _trace}


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)
