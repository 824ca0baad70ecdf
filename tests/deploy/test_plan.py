"""From options to processes, the command line, and the trace's verdict."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Literal

import pytest

from deploy.plan import Plan, make_plan
from deploy.run_dir import RunDir
from deploy.trace import layer_times, render
from deploy.up_config import UpConfig
from mooncake.cli import main
from mooncake.common.errors import ConfigError

WORKER = frozenset(
    {"model", "served_model_name", "kv_cache_memory_bytes", "enforce_eager", "dtype", "max_model_len", "transports"}
)


def plan(tmp_path: Path, device: Literal["cpu", "gpu"] = "cpu", **options: object) -> Plan:
    run_dir = RunDir(str(tmp_path / "run"))
    try:
        return make_plan(
            UpConfig(**options),  # type: ignore[arg-type]
            run_dir,
            tmp_path / "model",
            device=device,
            config_file=None,
            worker_options=WORKER,
            gateway_options=frozenset({"graceful_shutdown_s"}),
            node_options=frozenset({"segment_bytes"}),
        )
    finally:
        run_dir.close()


def test_stages_names_and_ports(tmp_path: Path) -> None:
    made = plan(tmp_path, prefill=2, decode=1, store_nodes=2)
    assert [[s.name for s in stage] for stage in made.stages] == [
        ["etcd"],
        ["conductor-0", "store-master-0"],
        ["store-node-0", "store-node-1"],
        ["prefill-0", "prefill-1", "decode-0", "gateway-0"],
    ]
    specs = [s for stage in made.stages for s in stage]
    assert len({s.port for s in specs}) == len(specs)
    assert made.endpoint.endswith(f":{specs[-1].port}")


def test_worker_options_and_secrets(tmp_path: Path) -> None:
    made = plan(tmp_path, dtype="float32", enforce_eager=False, kv_cache_bytes=1 << 26, block_size=32)
    worker = next(s for stage in made.stages for s in stage if s.name == "prefill-0")
    text = " ".join(worker.command)
    assert f"--model {tmp_path / 'model'} --served-model-name tiny" in text
    assert "--dtype float32" in text and "--no-enforce-eager" in text and "--kv-cache-memory-bytes 67108864" in text
    assert "--max-model-len" not in text  # left to the worker
    assert "--block-size" not in text  # the worker has no such option
    assert made.cluster_token not in text and worker.environment["MOONCAKE_CLUSTER_TOKEN"] == made.cluster_token


def command(made: Plan, name: str) -> str:
    return " ".join(next(s.command for stage in made.stages for s in stage if s.name == name))


def test_transports_are_passed_to_workers_and_store_nodes(tmp_path: Path) -> None:
    made = plan(tmp_path, transports=["shm", "tcp"])
    assert all("--transports shm,tcp" in command(made, name) for name in ("prefill-0", "decode-0", "store-node-0"))
    assert "--transports" not in command(plan(tmp_path / "other"), "prefill-0")


def test_defaults_of_workers_depend_on_the_device(tmp_path: Path) -> None:
    cpu, gpu = (command(plan(tmp_path, device), "decode-0") for device in ("cpu", "gpu"))
    assert "--kv-cache-memory-bytes 268435456" in cpu and " --enforce-eager" in cpu
    assert "--kv-cache-memory-bytes" not in gpu and "enforce-eager" not in gpu
    told = command(plan(tmp_path, "gpu", kv_cache_bytes=1 << 30, enforce_eager=True), "decode-0")
    assert "--kv-cache-memory-bytes 1073741824" in told and " --enforce-eager" in told


def test_only_the_gateway_binds_the_given_host(tmp_path: Path) -> None:
    made = plan(tmp_path, host="127.0.0.2", prefill=2)
    hosts = {s.name: s.environment.get("MOONCAKE_HOST", s.host) for stage in made.stages for s in stage}
    assert hosts.pop("gateway-0") == "127.0.0.2"
    assert set(hosts.values()) == {"127.0.0.1"} and len(hosts) == 7
    assert "127.0.0.2" not in command(made, "etcd")
    assert made.endpoint.startswith("http://127.0.0.2:") and made.etcd[0].startswith("127.0.0.1:")


def test_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}"):
            plan(tmp_path, port=port)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["gatway"], "did you mean gateway?"),
        (["up", "--prefil", "2"], "did you mean --prefill?"),
        (["up", "--prefill", "0"], "--prefill: Expected `int` >= 1"),
        (["up", "--store-bytes", "lots"], "not a size"),
        (["up", "--config", "/does/not/exist"], "--config /does/not/exist"),
        (["status", "--run-dir", "/does/not/exist"], "no cluster runs"),
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    err = capsys.readouterr().err
    assert code == 2 and says in err and err.count("\n") == 1


def event(t: float, kind: str, layer: int) -> dict[str, object]:
    return {"t": t, "who": "prefill-0", "event": kind, "layer": layer}


def test_trace_verdict_by_chunk() -> None:
    events = [
        *(event(1.0 + i / 10, "layer_computed", i) for i in range(3)),
        *(event(1.05 + i / 10, "layer_sent", i) for i in range(3)),
        *(event(2.0 + i / 10, "layer_computed", i) for i in range(3)),
        *(event(2.5 + i / 10, "layer_sent", i) for i in range(3)),  # the second chunk leaves when all is computed
    ]
    times = layer_times(events)
    assert [(x.chunk, x.layer, x.left_early) for x in times] == [
        (0, 0, True),
        (0, 1, True),
        (0, 2, False),
        (1, 0, False),
        (1, 1, False),
        (1, 2, False),
    ]
    text = render({"request_id": "req-1", "transfer_id": "xfer-1", "events": events})
    assert "layer 0 left before the last layer was computed: yes" in text and "2 of 4 sends" in text


def test_trace_without_layers() -> None:
    assert "nothing to show" in render({"request_id": "r", "transfer_id": None, "events": []})
