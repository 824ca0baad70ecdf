"""What `initialize`'s strings and the environment mean."""

from __future__ import annotations

import pytest

from mooncake.common.errors import ConfigError
from mooncake.drop_in import settings
from mooncake.drop_in.names import Addresses
from mooncake.drop_in.settings import Place
from mooncake.engine import TransferEngine


def test_protocols() -> None:
    assert settings.ways("tcp", {}) == ("local", "shm", "tcp")
    assert settings.ways(" TCP ", {}) == settings.ways("tcp", {})
    assert settings.ways("shm", {}) == ("local", "shm")
    assert "rdma" in settings.ways("rdma", {}) and "rdma" in settings.ways("", {})
    for value, forced in (("1", True), ("true", True), ("0", False), ("", False), ("false", False)):
        assert (settings.ways("rdma", {"MC_FORCE_TCP": value}) == ("tcp",)) is forced
    with pytest.raises(ConfigError, match="udp"):
        settings.ways("udp", {"MC_FORCE_TCP": "1"})


@pytest.mark.parametrize("protocol", ["rdma", ""])
def test_without_rdma_the_engine_runs_on_what_there_is(protocol: str) -> None:
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", protocol, "") == 0
    assert {"shm", "tcp"} <= set(engine.get_engine().identity.transports)
    engine.close()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("mlx5_0", ("mlx5_0",)),
        (" mlx5_0, mlx5_1 ,,mlx5_0", ("mlx5_0", "mlx5_1")),
        ('["mlx5_1", "mlx5_0"]', ("mlx5_1", "mlx5_0")),
        ('{"cpu:0": [["mlx5_0"], ["mlx5_1"]], "cuda:0": "mlx5_2,mlx5_0"}', ("mlx5_0", "mlx5_1", "mlx5_2")),
    ],
)
def test_nic_lists(text: str, names: tuple[str, ...]) -> None:
    assert settings.nics(text) == names


def test_a_broken_nic_list() -> None:
    with pytest.raises(ConfigError):
        settings.nics('{"cpu:0": ')


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("10.0.0.7", ("10.0.0.7", 0)),
        ("10.0.0.7:41", ("10.0.0.7", 41)),
        ("node-3:0", ("node-3", 0)),
        ("fd00::7", ("fd00::7", 0)),
        ("[fd00::7]", ("fd00::7", 0)),
        ("[fd00::7]:41", ("fd00::7", 41)),
        ("", ("127.0.0.1", 0)),
    ],
)
def test_host_names(text: str, parts: tuple[str, int]) -> None:
    assert settings.split(text) == parts


@pytest.mark.parametrize("text", ["host:x", "[::1", "[::1]41", "host:70000", "host:-1"])
def test_what_is_no_host_name(text: str) -> None:
    with pytest.raises(ConfigError):
        settings.split(text)
    assert TransferEngine().initialize(text, "P2PHANDSHAKE", "tcp", "") == -1


def test_an_engine_listens_where_it_is_named() -> None:
    assert settings.place("127.0.0.1:5", {}) == Place("127.0.0.1", "127.0.0.1", 5)
    assert settings.place("[::1]:5", {}) == Place("::1", "::1", 5)
    assert settings.place("10.1.2.3", {}) == Place("10.1.2.3", "10.1.2.3", 0)
    assert settings.place("localhost", {}).bind in ("127.0.0.1", "::1")
    assert settings.place("no-such-host.invalid", {}) == Place("0.0.0.0", "no-such-host.invalid", 0)
    assert settings.place("10.1.2.3", {"MC_TCP_BIND_ADDRESS": "0.0.0.0"}) == Place("0.0.0.0", "10.1.2.3", 0)


def test_an_address_that_this_host_does_not_have_is_advertised_all_the_same() -> None:
    engine = TransferEngine()
    assert engine.initialize("192.0.2.7", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.get_engine().address == f"192.0.2.7:{engine.get_rpc_port()}"
    assert engine.send_probe(f"127.0.0.1:{engine.get_rpc_port()}") == 0
    engine.close()


def test_targets() -> None:
    names = Addresses()
    assert names.address_of("10.0.0.7:41") == "10.0.0.7:41"
    assert names.address_of("[::1]:41") == names.address_of("::1:41") == "[::1]:41"
    for wrong in ("10.0.0.7", "[::1]", ":41", "host:", ""):
        with pytest.raises(ValueError, match="get_rpc_port"):
            names.address_of(wrong)


def test_time_grows_with_the_bytes() -> None:
    assert settings.deadline_s(0, {}) == 30.0
    assert settings.deadline_s(0, {"MC_TRANSFER_TIMEOUT": "5"}) == 5.0
    assert settings.deadline_s(0, {"MC_TRANSFER_TIMEOUT": "soon"}) == 30.0
    assert settings.deadline_s(5 << 30, {}) > 100
    assert settings.deadline_s(1 << 60, {}) == 600.0
