"""Configuration: three sources in order, typed values, and errors that name the key and the nearest valid one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest

from mooncake.common.config import (
    ClusterConfig,
    add_options,
    given_options,
    load,
    options,
    parse_size,
    read_file,
)
from mooncake.common.errors import ConfigError


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """Every kind of field a role may have."""

    max_queue: Annotated[int, msgspec.Meta(description="longest queue", ge=1)] = 10
    pool_bytes: Annotated[int, msgspec.Meta(description="size of the pool")] = 1024
    ratio: Annotated[float, msgspec.Meta(description="100% is 1")] = 0.5
    compile: Annotated[bool, msgspec.Meta(description="whether to compile")] = False
    keys: Annotated[list[str], msgspec.Meta(description="API keys")] = msgspec.field(default_factory=list)
    mode: Annotated[Literal["a", "b"], msgspec.Meta(description="which")] = "a"
    path: Annotated[str | None, msgspec.Meta(description="optional")] = None
    extra: Annotated[dict[str, int], msgspec.Meta(description="object")] = msgspec.field(default_factory=dict)


def example(file: dict[str, object] | None = None, environ: dict[str, str] | None = None, *arguments: str) -> Example:
    parser = argparse.ArgumentParser()
    add_options(parser, Example)
    given = given_options(Example, parser.parse_args(arguments))
    return load(Example, "gateway", file={"gateway": file or {}}, environ=environ or {}, given=given)


def test_later_sources_win() -> None:
    assert example().max_queue == 10
    assert example({"max_queue": 1}).max_queue == 1
    assert example({"max-queue": 1}, {"MOONCAKE_GATEWAY_MAX_QUEUE": "2"}).max_queue == 2
    assert example({"max_queue": 1}, {"MOONCAKE_GATEWAY_MAX_QUEUE": "2"}, "--max-queue", "3").max_queue == 3


def test_every_kind_from_text() -> None:
    got = example(
        None,
        {"MOONCAKE_GATEWAY_COMPILE": "true", "MOONCAKE_GATEWAY_EXTRA": '{"x": 1}'},
        *("--pool-bytes", "64MiB", "--ratio", "0.25", "--keys", "a, b", "--mode", "b", "--path", "p"),
    )
    assert got == Example(
        pool_bytes=64 << 20, ratio=0.25, compile=True, keys=["a", "b"], mode="b", path="p", extra={"x": 1}
    )
    assert example({"compile": True}, {}, "--no-compile").compile is False
    assert example({"keys": ["k"], "pool_bytes": "1KiB"}) == Example(keys=["k"], pool_bytes=1024)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: example({"max_queu": 1}), "did you mean max_queue"),
        (lambda: example(None, {"MOONCAKE_GATEWAY_MAX_QEUE": "1"}), "did you mean MOONCAKE_GATEWAY_MAX_QUEUE"),
        (lambda: example({"max_queue": "many"}), r"max_queue in \[gateway\]"),
        (lambda: example(None, {}, "--max-queue", "0"), "--max-queue: Expected `int` >= 1"),
        (lambda: example(None, {"MOONCAKE_GATEWAY_MODE": "c"}), "MOONCAKE_GATEWAY_MODE"),
        (lambda: example(None, {}, "--pool-bytes", "lots"), "not a size"),
        (lambda: example(None, {}, "--extra", "{"), "--extra: not JSON"),
    ],
)
def test_errors_say_what_and_where(call: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        call()  # type: ignore[operator]


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[cluster]\netcd = ["10.0.0.1:2379"]\n[gateway]\nmax_queue = 5\n')
    file = read_file(path)
    assert load(ClusterConfig, "cluster", file=file, environ={}).etcd == ["10.0.0.1:2379"]
    assert load(Example, "gateway", file=file, environ={}).max_queue == 5
    for text, says in (("[gatway]", "gateway"), ("x = 1", "unknown section"), ("[", "--config .*key part")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=says):
            read_file(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_file(tmp_path / "none")


def test_cluster_variables_live_beside_others() -> None:
    environ = {"MOONCAKE_CLUSTER_TOKEN": "t", "MOONCAKE_ETCD": "a:1,b:2", "MOONCAKE_GATEWAY_MAX_QUEUE": "1"}
    cluster = load(ClusterConfig, "cluster", environ=environ)
    assert cluster.cluster_token == "t" and cluster.etcd == ["a:1", "b:2"]


def test_every_field_has_a_help_text() -> None:
    assert all(option.help for option in (*options(ClusterConfig), *options(Example)))


def test_sizes() -> None:
    assert [parse_size(t) for t in ("1", "1k", "1KiB", "1.5 GB", "2GiB")] == [1, 1000, 1024, 1500000000, 2 << 30]
