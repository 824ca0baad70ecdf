"""`mooncake bench transfer`: how fast bytes move between two processes, by which way, and whether they arrive right.

Knows: options, the two roles, the report. Does not know: how an operation is made and proved (bench_load.py). The target only
offers memory; the initiator asks it for the range, so that an address is all that has to be told.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import secrets
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from mooncake.common.errors import AuthenticationFailed, ConfigError, PeerUnavailable
from transfer_engine.bench_config import BenchConfig
from transfer_engine.bench_load import Load
from transfer_engine.bench_phase import Measured, Phase
from transfer_engine.config import EngineConfig
from transfer_engine.engine import TransferEngine
from transfer_engine.types import Opcode, SegmentHandle

_START_S = 60.0


def main(config: BenchConfig, *, as_json: bool) -> int:
    """For the command line; the exit code. Raises ConfigError for bad input and MooncakeError for what then fails."""
    token = _token(config)
    match config.role:
        case "target":
            return _serve(config, token, as_json)
        case "initiator":
            return _report(config, _measure(config, token, config.target), config.target, as_json)
        case "both":
            token = token or secrets.token_bytes(16)  # nobody else is to find this target
            with _own_target(config, token) as address:
                return _report(config, _measure(config, token, address), address, as_json)


def _token(config: BenchConfig) -> bytes:
    if not config.token_file:
        return os.environ.get("MOONCAKE_CLUSTER_TOKEN", "").encode()
    try:
        token = Path(config.token_file).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"--token-file {config.token_file}: {error.strerror or error}") from error
    if not token:
        raise ConfigError(f"--token-file {config.token_file} is empty: write the cluster token into it")
    return token


def _engine(config: BenchConfig, token: bytes, *, port: int = 0) -> TransferEngine:
    settings = EngineConfig(
        host=config.host,
        port=port,
        name="bench",
        cluster_token=token,
        transports=tuple(config.transports),
        nics=tuple(config.nics),
    )
    try:
        return TransferEngine(settings)
    except OSError as error:
        raise ConfigError(f"cannot listen on {config.host} port {port}: {error.strerror or error}") from error


def _reserve(engine: TransferEngine, n_bytes: int) -> None:
    """Make the target's memory: what `first_region` finds. Raises ConfigError."""
    try:
        engine.allocate_shared(n_bytes, "mooncake-bench")
    except (OSError, MemoryError, ValueError) as error:
        raise ConfigError(f"--buffer-bytes {n_bytes}: no such memory here: {error}") from error


# --- the target -----------------------------------------------------------------------------------------------------


def _serve(config: BenchConfig, token: bytes, as_json: bool) -> int:
    """Offer memory until SIGINT or SIGTERM."""
    n_bytes = config.buffer_bytes or 1 << 30
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, lambda *_: stop.set())
    with _engine(config, token, port=config.port) as engine:
        _reserve(engine, n_bytes)
        ways = ", ".join(engine.identity.transports)
        told = {"target": engine.address, "buffer_bytes": n_bytes, "transports": list(engine.identity.transports)}
        text = f"Target at {engine.address}: {_size(n_bytes)} by {ways}. Ctrl-C ends it."
        print(json.dumps(told) if as_json else text, flush=True)
        stop.wait()
    return 0


@contextmanager
def _own_target(config: BenchConfig, token: bytes) -> Iterator[str]:
    """A target in a process of its own, which ends with us, however we end."""
    context = mp.get_context("spawn")
    pipe, far = context.Pipe()
    needed = config.buffer_bytes or config.block_bytes * config.batch * config.threads
    child = context.Process(target=_target_main, args=(far, config, token, needed), name="bench-target", daemon=True)
    child.start()
    far.close()
    try:
        yield _address_of(pipe)
    finally:
        pipe.close()
        child.join(5.0)
        if child.is_alive():
            child.kill()
            child.join()


def _address_of(pipe: Connection) -> str:
    try:
        if not pipe.poll(_START_S):
            raise PeerUnavailable(f"the target did not start within {_START_S:g} s")
        told = pipe.recv()
    except EOFError:
        raise PeerUnavailable("the target's process ended at its start") from None
    if isinstance(told, ConfigError):
        raise told
    return str(told)


def _target_main(pipe: Connection, config: BenchConfig, token: bytes, n_bytes: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to both; the initiator ends us
    try:
        with _engine(config, token, port=config.port) as engine:
            _reserve(engine, n_bytes)
            pipe.send(engine.address)
            pipe.poll(None)  # until the other end is closed
    except ConfigError as error:
        pipe.send(error)


# --- the initiator --------------------------------------------------------------------------------------------------


def _measure(config: BenchConfig, token: bytes, address: str) -> list[Measured]:
    load = Load(
        config.block_bytes, config.batch, config.threads, config.ops, config.seconds, config.deadline_s, config.check, config.seed
    )  # fmt: skip
    opcodes = {"write": [Opcode.WRITE], "read": [Opcode.READ], "both": [Opcode.WRITE, Opcode.READ]}[config.op]
    with _engine(config, token) as engine:
        segment = _open(engine, address)
        base, offered = engine.first_region(segment) or (0, 0)
        if offered < load.total_bytes:
            raise ConfigError(
                f"{address} offers {_size(offered)}, but threads x batch x block is {_size(load.total_bytes)}: "
                f"start the target with --buffer-bytes {load.total_bytes}"
            )
        try:
            return [Phase(opcode, load, engine, segment, base).run() for opcode in opcodes]
        except MemoryError as error:
            raise ConfigError(f"threads x batch x block is {_size(load.total_bytes)}: too much here") from error


def _open(engine: TransferEngine, address: str) -> SegmentHandle:
    try:
        return engine.open_segment(address)
    except AuthenticationFailed as error:
        raise AuthenticationFailed(f"{error}; give both sides the same --token-file") from error


def _row(config: BenchConfig, one: Measured) -> dict[str, Any]:
    blocks = one.operations * config.batch
    p50, p99 = np.percentile(one.latencies_s, [50, 99]).tolist() if len(one.latencies_s) else (0.0, 0.0)
    moved = [{"transport": way, "nic": nic, "bytes": n} for (way, nic), n in sorted(one.moved.items())]
    return {
        "op": one.opcode.name.lower(),
        "operations": one.operations,
        "seconds": one.seconds,
        "bytes_per_s": blocks * config.block_bytes / one.seconds,
        "ops_per_s": one.operations / one.seconds,
        "latency_s": {"p50": p50, "p99": p99},
        "moved": moved,
    }


def _report(config: BenchConfig, found: list[Measured], address: str, as_json: bool) -> int:
    rows = [_row(config, one) for one in found]
    if as_json:
        about = {"target": address, "block_bytes": config.block_bytes, "batch": config.batch, "threads": config.threads}
        print(json.dumps(about | {"checked": config.check, "rows": rows}, indent=1))
        return 0
    checked = ", every operation checked" if config.check else ""
    print(f"{config.batch} x {_size(config.block_bytes)} an operation, {config.threads} threads, to {address}{checked}")
    print(f"{'OP':<6} {'GB/s':>8} {'OPS/s':>10} {'P50':>10} {'P99':>10} {'OPERATIONS':>11}  MOVED BY")
    for row in rows:
        ways = ", ".join(f"{m['transport']} {m['nic']}".strip() + f" {m['bytes'] / 1e9:.2f} GB" for m in row["moved"])
        p50, p99 = (_duration(row["latency_s"][key]) for key in ("p50", "p99"))
        speed, rate = f"{row['bytes_per_s'] / 1e9:.3f}", f"{row['ops_per_s']:.1f}"
        print(f"{row['op']:<6} {speed:>8} {rate:>10} {p50:>10} {p99:>10} {row['operations']:>11}  {ways}")
    return 0


def _duration(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _size(n_bytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if n_bytes >= unit:
            return f"{n_bytes / unit:g} {name}"
    return f"{n_bytes} B"
