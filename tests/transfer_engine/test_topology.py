"""The matrix of synthetic machines, and what the override file may and may not say."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.common.errors import ConfigError
from tests.transfer_engine.sysfs_tree import SysfsTree, pxb_guest, two_sockets
from transfer_engine.topology import Paths, discover

# --- machines -------------------------------------------------------------------------------------------------------


def test_two_sockets_with_switches(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    topology = discover(tmp_path)
    assert topology.matrix() == {
        "cpu:0": [["mlx5_0", "mlx5_1"], ["mlx5_2", "mlx5_3"]],
        "cpu:1": [["mlx5_2", "mlx5_3"], ["mlx5_0", "mlx5_1"]],
        "cuda:0": [["mlx5_0"], ["mlx5_1", "mlx5_2", "mlx5_3"]],
        "cuda:1": [["mlx5_0"], ["mlx5_1", "mlx5_2", "mlx5_3"]],
        "cuda:2": [["mlx5_2"], ["mlx5_0", "mlx5_1", "mlx5_3"]],
        "cuda:3": [["mlx5_2"], ["mlx5_0", "mlx5_1", "mlx5_3"]],
        "*": [["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"], []],
    }
    nic = topology.nic("mlx5_3")
    assert (nic.port, nic.numa_node, nic.netdev, nic.link_layer) == (1, 1, "eth_mlx5_3", "Ethernet")
    assert nic.pci_path == "pci0000:80/0000:80:02.0/0000:90:00.0"
    assert nic.rate_bits_per_s == 200e9
    assert not nic.active and topology.nic("mlx5_1").active


def test_a_gpu_without_nic_on_its_switch_takes_its_root_complex_then_its_node(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    tree.nodes("10 21", "21 10")
    tree.gpu("pci0000:00/0000:00:01.0/0000:01:00.0", numa=0)
    tree.hardware_nic("same_root", "pci0000:00/0000:00:02.0/0000:02:00.0", numa=0)
    tree.hardware_nic("same_node", "pci0000:40/0000:40:02.0/0000:41:00.0", numa=0)
    tree.hardware_nic("other_node", "pci0000:80/0000:80:02.0/0000:81:00.0", numa=1)
    topology = discover(tmp_path)
    assert topology.paths("cuda:0").preferred == ("same_root",)
    (tmp_path / "class/infiniband/same_root").unlink()
    assert discover(tmp_path).paths("cuda:0") == Paths(("same_node",), ("other_node",))


def test_the_nearest_node_where_none_is_local(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    tree.nodes("10 12 32", "12 10 32", "32 32 10")
    tree.hardware_nic("far", "pci0000:80/0000:80:02.0/0000:81:00.0", numa=2)
    tree.hardware_nic("near", "pci0000:00/0000:00:02.0/0000:02:00.0", numa=0)
    tree.rxe_on_veth("nowhere", "veth0")
    assert discover(tmp_path).paths("cpu:1") == Paths(("near",), ("far", "nowhere"))


def test_soft_roce_on_veth_is_near_to_all(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    tree.nodes("10")
    tree.rxe_on_veth("rxe_a0", "a0")
    tree.rxe_on_veth("rxe_a1", "a1")
    topology = discover(tmp_path)
    assert topology.matrix() == {"cpu:0": [["rxe_a0", "rxe_a1"], []], "*": [["rxe_a0", "rxe_a1"], []]}
    nic = topology.nic("rxe_a1")
    assert (nic.netdev, nic.numa_node, nic.pci_path, nic.rate_bits_per_s, nic.active) == ("a1", -1, "", 10e9, True)


def test_soft_roce_on_virtio_behind_a_pxb(tmp_path: Path) -> None:
    pxb_guest(tmp_path)
    topology = discover(tmp_path)
    assert topology.paths("cpu:0") == Paths(("rxe0",), ("rxe1",))
    assert topology.paths("cpu:1") == Paths(("rxe1",), ("rxe0",))
    nic = topology.nic("rxe0")
    assert (nic.netdev, nic.numa_node, nic.rate_bits_per_s) == ("eth1", 0, 2.5e9)
    assert nic.pci_path == "pci0000:40/0000:40:00.0/0000:41:00.0"


def test_no_rdma_at_all(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    tree.nodes("10 20", "20 10")
    tree.gpu("pci0000:00/0000:00:01.0/0000:01:00.0", numa=0)
    tree.pci("pci0000:00/0000:00:02.0", numa=0, pci_class="0x030000")  # a display of another vendor
    topology = discover(tmp_path)
    assert topology.nics == ()
    assert topology.matrix() == {name: [[], []] for name in ("cpu:0", "cpu:1", "cuda:0", "*")}
    with pytest.raises(ConfigError, match="unknown NIC 'mlx5_0'; this machine has: none"):
        topology.nic("mlx5_0")


def test_an_empty_folder_and_this_machine() -> None:
    assert discover(Path("/nonexistent")).matrix() == {"cpu:0": [[], []], "*": [[], []]}
    here = discover()
    assert "cpu:0" in here.locations
    assert all(set(p.all) == {nic.name for nic in here.nics} for p in here.locations.values())


def test_names_are_in_natural_order_and_gpus_in_that_of_pci(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    for number in (10, 2, 1):
        tree.hardware_nic(f"mlx5_{number}", f"pci0000:00/0000:00:{number:02x}.0", numa=0)
    tree.gpu("pci10000:00/10000:00:01.0", numa=0)
    tree.gpu("pci0000:f0/0000:f0:01.0", numa=0)
    topology = discover(tmp_path)
    assert [nic.name for nic in topology.nics] == ["mlx5_1", "mlx5_2", "mlx5_10"]
    assert "cuda:1" in topology.locations and "cuda:2" not in topology.locations


@pytest.mark.parametrize(
    ("visible", "near"),
    [
        (None, ["mlx5_0", "mlx5_0", "mlx5_2", "mlx5_2"]),
        ("2,0", ["mlx5_2", "mlx5_0"]),
        (" 3 , 1 ", ["mlx5_2", "mlx5_0"]),
        ("3,-1,0", ["mlx5_2"]),
        ("1,9,0", ["mlx5_0"]),
        ("", []),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", []),
        ("0,MIG-GPU-1/2/3", []),
    ],
)
def test_gpus_are_counted_as_the_process_counts_them(tmp_path: Path, visible: str | None, near: list[str]) -> None:
    two_sockets(tmp_path)
    topology = discover(tmp_path, visible=visible)
    assert [topology.paths(f"cuda:{index}").preferred for index in range(len(near))] == [(nic,) for nic in near]
    assert topology.paths(f"cuda:{len(near)}") == topology.paths("*")


def test_the_first_active_port_counts(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    tree.hardware_nic("mlx4_0", "pci0000:00/0000:00:01.0", numa=0, active=False)
    tree.port("mlx4_0", 2, active=True, rate="40 Gb/sec (4X QDR)", layer="InfiniBand")
    nic = discover(tmp_path).nic("mlx4_0")
    assert (nic.port, nic.active, nic.rate_bits_per_s, nic.link_layer) == (2, True, 40e9, "InfiniBand")


def test_the_netdev_without_gid_table(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    tree.hardware_nic("mlx5_0", "pci0000:00/0000:00:01.0", numa=0)
    gid = tmp_path / "class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/0"
    gid.unlink()
    gid.mkdir()  # reading an unused entry fails in the real tree, too
    (tmp_path / "devices/pci0000:00/0000:00:01.0/net/ens1").mkdir(parents=True)
    assert discover(tmp_path).nic("mlx5_0").netdev == "ens1"


def test_unreadable_numbers_are_unknown(tmp_path: Path) -> None:
    tree = SysfsTree(tmp_path)
    tree.nodes("10 nonsense", "20")
    tree.hardware_nic("mlx5_0", "pci0000:00/0000:00:01.0", numa=1)
    tree.write("class/infiniband/mlx5_0/ports/1/rate", "as fast as it goes")
    topology = discover(tmp_path)
    assert topology.nic("mlx5_0").rate_bits_per_s == 0
    assert topology.paths("cpu:1").preferred == ("mlx5_0",)


PLACES = st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 2))
"""Root complex (one a node), root port, device below it."""


@settings(max_examples=40, deadline=None)
@given(nics=st.sets(PLACES, max_size=6), gpus=st.sets(PLACES, max_size=4))
def test_any_tree(nics: set[tuple[int, int, int]], gpus: set[tuple[int, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree = SysfsTree(Path(folder))
        tree.nodes("10 20 30", "20 10 40", "30 40 10")
        where = {}
        for at, (node, port, device) in enumerate(sorted(nics)):
            where[f"nic{at}"] = (node, port)
            tree.hardware_nic(
                f"nic{at}", f"pci0000:{node}0/0000:{node}0:0{port}.0/0000:{node}{port + 1}:{device:02x}.1", numa=node
            )
        for node, port, device in sorted(gpus):
            tree.gpu(f"pci0000:{node}0/0000:{node}0:0{port}.0/0000:{node}{port + 1}:{device:02x}.0", numa=node)
        topology = discover(Path(folder))
        assert len(topology.locations) == 3 + len(gpus) + 1
        for paths in topology.locations.values():
            assert sorted(paths.all) == sorted(where)
            assert bool(paths.preferred) == bool(where)
        for index, (node, port, _) in enumerate(sorted(gpus)):
            below = [name for name, place in where.items() if place == (node, port)]
            beside = [name for name, place in where.items() if place[0] == node]
            if below or beside:
                assert list(topology.paths(f"cuda:{index}").preferred) == (below or beside)
        # What is printed may be used as an override file, and changes nothing.
        file = Path(folder) / "topology.json"
        file.write_text(topology.matrix_json())
        assert discover(Path(folder), file) == topology


# --- the override file ----------------------------------------------------------------------------------------------


def override(root: Path, content: object) -> Path:
    two_sockets(root)
    file = root / "topology.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_override_replaces_what_it_names(tmp_path: Path) -> None:
    file = override(tmp_path, {"cpu:0": [["mlx5_3"], []], "rates_bits_per_s": {"mlx5_3": 4e11}})
    topology = discover(tmp_path, file)
    assert topology.paths("cpu:0") == Paths(("mlx5_3",))
    assert topology.paths("cpu:1").preferred == ("mlx5_2", "mlx5_3")
    assert topology.nic("mlx5_3").rate_bits_per_s == 4e11
    assert topology.nic("mlx5_2").rate_bits_per_s == 2e11


def test_a_star_in_the_override_stands_for_the_rest(tmp_path: Path) -> None:
    file = override(tmp_path, {"*": [["mlx5_1"], ["mlx5_3"]], "cuda:0": [["mlx5_0"], []]})
    topology = discover(tmp_path, file)
    assert topology.paths("cuda:0") == Paths(("mlx5_0",))
    for location in ("cpu:0", "cuda:1", "cuda:99", "cpu", "*"):
        assert topology.paths(location) == Paths(("mlx5_1",), ("mlx5_3",))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "must be JSON like"),
        ("[]", "must be JSON like"),
        ({"cpu:0": [["mlx5_9"], []]}, "cpu:0 names NIC 'mlx5_9'; this machine has: mlx5_0, mlx5_1, mlx5_2, mlx5_3"),
        ({"cpu0": [["mlx5_0"], []]}, "unknown key 'cpu0'; use cpu:<n>, cuda:<n>, "),
        ({"cpu:0": ["mlx5_0"]}, r'cpu:0 must be \[\["preferred NICs"\], \["secondary NICs"\]\]'),
        ({"cpu:0": [["mlx5_0"]]}, "cpu:0 must be"),
        ({"cpu:0": None}, "cpu:0 must be"),
        ({"cpu:0": [["mlx5_0"], ["mlx5_0"]]}, "names a NIC twice"),
        ({"rates_bits_per_s": {"mlx5_0": "fast"}}, "rates_bits_per_s must be like"),
        ({"rates_bits_per_s": {"mlx5_0": 0}}, "of mlx5_0 must be above 0"),
        ({"rates_bits_per_s": {"eth0": 1e9}}, "rates_bits_per_s names NIC 'eth0'"),
    ],
)
def test_a_bad_override_names_the_fix(tmp_path: Path, content: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        discover(tmp_path, override(tmp_path, content))
    assert "topology.json" in str(caught.value)


def test_a_missing_override(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        discover(tmp_path, tmp_path / "missing.json")


# --- sets of NICs ---------------------------------------------------------------------------------------------------


def test_only_some_nics(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    topology = discover(tmp_path).only(["mlx5_0", "mlx5_3"])
    assert [nic.name for nic in topology.nics] == ["mlx5_0", "mlx5_3"]
    assert topology.paths("cpu:0") == Paths(("mlx5_0",), ("mlx5_3",))
    assert topology.paths("cuda:2") == Paths(("mlx5_0", "mlx5_3"))  # its near one is not ours: the far ones it is
    with pytest.raises(ConfigError, match="unknown NIC 'mlx5_7'"):
        topology.only(["mlx5_7"])
