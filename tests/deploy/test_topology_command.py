"""`mooncake topology` as users run it: on synthetic machines, and on a cluster whose store node published its own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.topology import published
from tests.etcd import Etcd
from tests.store.cluster import RoleProcess, until
from tests.transfer_engine.sysfs_tree import pxb_guest, two_sockets

TABLES = """\
NIC   STATE   RATE        LINK      NETDEV  NUMA  PCI
rxe0  active  2.5 Gbit/s  Ethernet  eth1    0     0000:41:00.0
rxe1  active  2.5 Gbit/s  Ethernet  eth0    1     0000:81:00.0

LOCATION  PREFERRED  SECONDARY
cpu:0     rxe0       rxe1
cpu:1     rxe1       rxe0
*         rxe0 rxe1
"""


def topology(*options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mooncake", "topology", *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_tables(tmp_path: Path) -> None:
    pxb_guest(tmp_path)
    done = topology("--sysfs", tmp_path)
    assert (done.returncode, done.stdout) == (0, TABLES), done.stderr


def test_json_with_an_override(tmp_path: Path) -> None:
    two_sockets(tmp_path / "sys")
    file = tmp_path / "near.json"
    file.write_text('{"cuda:1": [["mlx5_1"], []], "rates_bits_per_s": {"mlx5_1": 1e11}}')
    done = topology("--sysfs", tmp_path / "sys", "--override", file, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["matrix"]["cuda:1"] == [["mlx5_1"], []]
    assert found["matrix"]["cuda:0"] == [["mlx5_0"], ["mlx5_1", "mlx5_2", "mlx5_3"]]
    assert [(nic["name"], nic["rate_bits_per_s"]) for nic in found["nics"][:2]] == [("mlx5_0", 2e11), ("mlx5_1", 1e11)]
    assert "instances" not in found


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--sysfs", "/nonexistent"], 2, "--sysfs /nonexistent: no such folder"),
        (["--override", "/nonexistent"], 2, "topology file /nonexistent: No such file"),
        (["--etcd", "127.0.0.1:1"], 1, "etcd does not answer at 127.0.0.1:1"),
        (["--sysf", "x"], 2, "unknown option --sysf; did you mean --sysfs?"),
    ],
)
def test_bad_input(options: list[str], code: int, says: str) -> None:
    done = topology(*options)
    assert done.returncode == code
    assert says in done.stderr and "Traceback" not in done.stderr


def test_what_a_store_node_published(etcd: Etcd, tmp_path: Path) -> None:
    file = tmp_path / "near.json"
    file.write_text('{"cpu:7": [[], []]}')
    options = ("--segment-bytes", "1MiB", "--transfer-topology", str(file))
    node = RoleProcess("store-node", "node-0", etcd.endpoints, tmp_path, *options)
    where = ("--etcd", ",".join(etcd.endpoints), "--cluster", "mooncake", "--json")
    try:
        node.wait_ready()
        until(lambda: asyncio.run(published(etcd.endpoints, "mooncake")))
        (record,) = json.loads(topology(*where).stdout)["instances"]
        assert (record["name"], record["role"]) == ("node-0", "store-node")
        assert record["topology"]["matrix"]["cpu:7"] == [[], []]
        assert "node-0 (store-node) on " in topology(*where[:-1]).stdout
        node.kill()
        until(lambda: not asyncio.run(published(etcd.endpoints, "mooncake")))
    finally:
        node.kill()
    assert "No instance of cluster 'mooncake' has published" in topology(*where[:-1]).stdout


def test_a_node_with_a_bad_file_does_not_start(etcd: Etcd, tmp_path: Path) -> None:
    file = tmp_path / "near.json"
    file.write_text('{"cpu:0": [["mlx5_77"], []]}')
    options = ("--segment-bytes", "1MiB", "--transfer-topology", str(file))
    node = RoleProcess("store-node", "node-0", etcd.endpoints, tmp_path, *options)
    try:
        assert node.process.wait(30) == 2
        assert "cpu:0 names NIC 'mlx5_77'; this machine has: none" in node.log.read_text()
    finally:
        node.kill()
