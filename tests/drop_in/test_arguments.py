"""Wrong arguments are TypeError, as from a compiled binding; runtime failures never raise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import mooncake.engine
from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode
from tests.drop_in.conftest import Here


@pytest.fixture(scope="module")
def here() -> Iterator[Here]:
    made = Here(length=4096)
    yield made
    made.engine.close()


W = TransferOpcode.Write
PEER = "127.0.0.1:1"


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("initialize", ("127.0.0.1", "P2PHANDSHAKE", "tcp")),
        ("initialize", ("127.0.0.1", "P2PHANDSHAKE", "tcp", None)),
        ("initialize", (1, "P2PHANDSHAKE", "tcp", "")),
        ("register_memory", ("x", 1)),
        ("register_memory", (1.5, 1)),
        ("register_memory", (-1, 1)),
        ("register_memory", (1, 1 << 64)),
        ("register_memory", (1, 1, 7)),
        ("unregister_memory", (None,)),
        ("batch_register_memory", (1, 1)),
        ("batch_register_memory", (["1"], [1])),
        ("batch_register_memory", ({1}, [1])),
        ("batch_register_memory", ("1", [1])),
        ("batch_unregister_memory", ([-1],)),
        ("transfer_sync_write", (PEER, 1, 1)),
        ("transfer_sync_write", (5, 1, 1, 1)),
        ("transfer_sync_write", (PEER, 1, 1, -1)),
        ("transfer_sync_write", (PEER, 1 << 64, 1, 1)),
        ("transfer_sync_write", (PEER, 1, 1, 1, None)),
        ("transfer_sync", (PEER, 1, 1, 1, 1)),
        ("transfer_sync", (PEER, 1, 1, 1, W, "note")),
        ("batch_transfer_sync_write", (PEER, None, [1], [1])),
        ("batch_transfer_sync_write", (PEER, [1.0], [1], [1])),
        ("batch_transfer_sync_read", (PEER, np.array([1.0]), [1], [1])),
        ("batch_transfer_sync_read", (PEER, np.array([[1]]), [1], [1])),
        ("batch_transfer_sync_read", (PEER, np.array([-1]), [1], [1])),
        ("batch_transfer_async", (PEER, [1], [1], [1], "Write")),
        ("get_batch_transfer_status", (5,)),
        ("transfer_check_status", ("5",)),
        ("send_probe", (5,)),
        ("allocate_managed_buffer", (-1,)),
        ("write_bytes_to_buffer", (1, 5, 1)),
        ("get_local_topology", (5,)),
    ],
)
def test_wrong_arguments(here: Here, method: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        getattr(here.engine, method)(*arguments)
    with pytest.raises(TypeError):
        getattr(TransferEngine(), method)(*arguments)
    assert here.engine.send_probe(f"127.0.0.1:{here.engine.get_rpc_port()}") == 0, "the engine is as it was"


def test_names_of_arguments(here: Here) -> None:
    """Those of the open-source binding."""
    engine, at, name = here.engine, here.at, f"127.0.0.1:{here.engine.get_rpc_port()}"
    one = {"target_hostname": name, "buffer": at, "peer_buffer_address": at + 100, "length": 10}
    many = {"target_hostname": name, "buffers": [at], "peer_buffer_addresses": [at + 100], "lengths": [10]}
    assert engine.transfer_sync_write(**one, transport_hint="tcp") == 0
    assert engine.transfer_sync(**one, opcode=W, notify=None, transport_hint="anything") == 0
    assert engine.batch_transfer_sync(**many, opcode=W, notify=TransferNotify(name="n", msg="m")) == 0
    assert engine.get_batch_transfer_status([engine.batch_transfer_async(**many, opcode=W)]) == 0
    assert engine.register_memory(buffer_addr=at, capacity=len(here.array), location="*") == 0
    assert engine.batch_register_memory(buffer_addresses=[at], capacities=[len(here.array)], location="cpu:0") == 0
    assert engine.send_probe(peer_server_name=name) == 0
    with pytest.raises(TypeError):
        engine.register_memory(buffer_addr=at, capacity=1, colour="red")


@pytest.mark.parametrize(
    ("method", "arguments", "result"),
    [
        ("get_rpc_port", (), -1),
        ("register_memory", (4096, 10), -1),
        ("batch_register_memory", ([4096], [10]), -1),
        ("unregister_memory", (4096,), -1),
        ("batch_unregister_memory", ([4096],), -1),
        ("transfer_sync_write", (PEER, 1, 1, 1), -1),
        ("transfer_sync_read", (PEER, 1, 1, 1), -1),
        ("transfer_sync", (PEER, 1, 1, 1, W), -1),
        ("batch_transfer_sync_write", (PEER, [1], [1], [1]), -1),
        ("batch_transfer_sync_read", (PEER, [1], [1], [1]), -1),
        ("batch_transfer_sync", (PEER, [1], [1], [1], W), -1),
        ("batch_transfer_async_write", (PEER, [1], [1], [1]), 0),
        ("batch_transfer_async_read", (PEER, [1], [1], [1]), 0),
        ("batch_transfer_async", (PEER, [1], [1], [1], W), 0),
        ("transfer_submit_write", (PEER, 1, 1, 1), 0),
        ("transfer_check_status", (5,), -1),
        ("get_batch_transfer_status", ([5],), -1),
        ("allocate_managed_buffer", (10,), 0),
        ("free_managed_buffer", (4096, 10), -1),
        ("write_bytes_to_buffer", (4096, b"a", 1), -1),
        ("read_bytes_from_buffer", (4096, 1), b""),
        ("get_first_buffer_address", (PEER,), 0),
        ("send_probe", (PEER,), -1),
        ("warmup_efa_segment", (PEER,), -1),
        ("get_notifies", (), []),
        ("get_engine", (), None),
        ("get_engine_ptr", (), 0),
        ("transfer_write_on_cuda", (PEER, 1, 1, 1), -1),
        ("transfer_read_on_cuda", (PEER, 1, 1, 1, 7), -1),
    ],
)
def test_before_initialize_every_call_fails_as_documented(method: str, arguments: tuple[Any, ...], result: Any) -> None:
    assert getattr(TransferEngine(), method)(*arguments) == result


def test_the_topology_needs_no_initialize() -> None:
    matrix = json.loads(TransferEngine().get_local_topology())
    assert all(len(paths) == 2 for paths in matrix.values())
    assert "cpu:0" in matrix
    none = json.loads(TransferEngine().get_local_topology("no_such_nic"))
    assert all(paths == [[], []] for paths in none.values())


def test_the_module() -> None:
    assert TransferEngine.TransferOpcode is TransferOpcode
    assert (int(TransferOpcode.Read), int(TransferOpcode.Write)) == (0, 1)
    assert (mooncake.engine.Read, mooncake.engine.Write) == (TransferOpcode.Read, TransferOpcode.Write)
    flags = {name: getattr(mooncake.engine, name) for name in dir(mooncake.engine) if name.startswith("SUPPORT_")}
    assert flags == dict.fromkeys(
        ["SUPPORT_CUDA", "SUPPORT_EFA", "SUPPORT_HIP", "SUPPORT_INTRA_NVLINK", "SUPPORT_MNNVL", "SUPPORT_MUSA"], False
    )
    for wrong in (("a",), ("a", "b", "c"), (1, "b")):
        with pytest.raises(TypeError):
            TransferNotify(*wrong)


def test_a_failure_is_logged_once_and_names_the_fix(here: Here, caplog: pytest.LogCaptureFixture) -> None:
    name = f"127.0.0.1:{here.engine.get_rpc_port()}"
    for _ in range(20):
        assert here.engine.transfer_sync_write(name, 640, here.at, 10) == -1
    assert [r.getMessage() for r in caplog.records if "inside registered memory" in r.getMessage()] == [
        f"transfer with {name}: [0x280, +10) is not inside registered memory; register_memory() must cover it, on the side "
        "that owns it, before the transfer"
    ]
