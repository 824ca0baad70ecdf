"""The virtual machine is what the RDMA tests take it for: four soft-RoCE NICs on two cables, two NUMA nodes."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from transfer_engine import topology
from transfer_engine.transports.rdma import verbs

pytestmark = [pytest.mark.slow, pytest.mark.elsewhere("vm")]

NICS = ("rxe_a0", "rxe_a1", "rxe_b0", "rxe_b1")


def test_the_nics_are_there_with_an_address_each() -> None:
    assert sorted(verbs.load().device_names()) == list(NICS)
    found = set()
    for name in NICS:
        context = verbs.load().Context(name=name)
        found.add(verbs.choose_gid(context, 1, context.query_port(1).link_layer).text[-9:])
        context.close()
    assert found == {f"0a4d:{cable:02x}{end:02x}" for cable in (0, 1) for end in (1, 2)}


def test_bytes_cross_the_cable() -> None:
    counter = Path("/sys/class/net/b1/statistics/rx_bytes")
    before = int(counter.read_text())
    server = subprocess.Popen(["ibv_rc_pingpong", "-d", "rxe_b1", "-g", "1", "-n", "20"], stdout=subprocess.DEVNULL)
    command = ["ibv_rc_pingpong", "-d", "rxe_a1", "-g", "1", "-n", "20", "127.0.0.1"]
    for _ in range(20):  # until the server listens
        if subprocess.run(command, check=False, capture_output=True, timeout=30).returncode == 0:
            break
    assert server.wait(10) == 0
    assert int(counter.read_text()) - before > 20 * 4096


@pytest.fixture
def near_nics() -> Iterator[dict[int, str]]:
    """A soft-RoCE device on the PCI NIC of each NUMA node (whose MAC address ends in the node's number); node to name."""
    made = {}
    for netdev in Path("/sys/class/net").iterdir():
        if (netdev / "device").exists():
            node = int((netdev / "address").read_text().strip()[-1])
            made[node] = f"rxe_n{node}"
            subprocess.run(["rdma", "link", "add", made[node], "type", "rxe", "netdev", netdev.name], check=True)
    yield made
    for name in made.values():
        subprocess.run(["rdma", "link", "delete", name], check=True)


def test_memory_prefers_the_nic_of_its_numa_node(near_nics: dict[int, str]) -> None:
    assert near_nics == {0: "rxe_n0", 1: "rxe_n1"}
    found = topology.discover().only(near_nics.values())
    assert {nic.name: nic.numa_node for nic in found.nics} == {"rxe_n0": 0, "rxe_n1": 1}
    assert found.paths("cpu:0") == topology.Paths(("rxe_n0",), ("rxe_n1",))
    assert found.paths("cpu:1") == topology.Paths(("rxe_n1",), ("rxe_n0",))
    paths = [nic.pci_path.split("/") for nic in found.nics]
    assert paths[0][0] != paths[1][0] and all(len(path) == 3 for path in paths)  # root, port, NIC


def test_nothing_that_is_written_reaches_the_host() -> None:
    assert shutil.disk_usage("/").total < 8 << 30, "the root is not an overlay in memory"
