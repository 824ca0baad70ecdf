"""GPU memory over local, shm and tcp: on a fake driver everywhere, and the same tests on a real one where there is a GPU."""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mooncake.common.errors import ConfigError, DeviceError, NotRegistered
from tests.transfer_engine.certs import member
from tests.transfer_engine.conftest import TOKEN, InProcess
from tests.transfer_engine.gpu import EAGER, LAZY, MOODY, Gpu, Tensor, fake_driver, real_driver
from tests.transfer_engine.peer import Peer
from transfer_engine import EngineConfig, Opcode, TransferEngine, TransferRequest

LENGTH = 512 << 10
SLICE = 64 << 10
SIZES = [1, 4095, SLICE + 13, LENGTH]
DRIVERS = [pytest.param(fake_driver, id="fake"), pytest.param(real_driver, id="real")]


def config(driver: str, *transports: str, **more: Any) -> EngineConfig:
    small = {"slice_bytes": SLICE, "slice_min_bytes": SLICE // 4, "staging_buffers": 2}
    return EngineConfig(cluster_token=TOKEN, transports=transports, cuda_driver=driver, **(small | more))


class Memory:
    """The four kinds of memory of one side: `host`, `shared`, `cuda:0`, `cuda:1`."""

    def __init__(self, at: dict[str, int], read: Any, fill: Any) -> None:
        self.at, self.read, self.fill = at, read, fill


class Pair:
    def __init__(self, way: str, driver: str) -> None:
        self.gpu = gpu = Gpu(driver)
        self.engine = TransferEngine(config(driver, *({"local": ("local",), "tcp": ("tcp",)}.get(way, ("shm", "tcp")))))
        target = config(driver, "local", "shm", "tcp")
        self.target: Any = InProcess(target) if way == "local" else Peer(target)
        self.segment = self.engine.open_segment(self.target.address)
        self.host = np.zeros(LENGTH, np.uint8)
        at = {"host": self.engine.register_buffer(self.host)}
        for device in (0, 1):
            at[f"cuda:{device}"] = address = gpu.allocate(LENGTH, gpu.ordinal(device))
            self.engine.register_local_memory(address, LENGTH, location=f"cuda:{gpu.ordinal(device)}")
        self.near = Memory(at, self._read, self._fill)
        there = {name: self.target.call("allocate", LENGTH, name == "shared") for name in ("host", "shared")}
        there |= {f"cuda:{device}": self.target.call("allocate_on", device, LENGTH) for device in (0, 1)}
        self.far = Memory(there, self._far_read, self._far_fill)

    def _read(self, address: int, length: int) -> np.ndarray:
        start = address - self.near.at["host"]
        return self.host[start : start + length].copy() if 0 <= start < LENGTH else self.gpu.read(address, length)

    def _fill(self, address: int, content: np.ndarray) -> None:
        start = address - self.near.at["host"]
        if 0 <= start < LENGTH:
            self.host[start : start + len(content)] = content
        else:
            self.gpu.fill(address, content)

    def _on_host(self, address: int) -> bool:
        return any(0 <= address - self.far.at[name] < LENGTH for name in ("host", "shared"))

    def _far_read(self, address: int, length: int) -> np.ndarray:
        if self._on_host(address):
            return np.frombuffer(self.target.call("read", address, length), np.uint8)
        found: np.ndarray = self.target.call("gpu", "read", address, length)
        return found

    def _far_fill(self, address: int, content: np.ndarray) -> None:
        if self._on_host(address):
            self.target.call("write_bytes", address, content.tobytes())
        else:
            self.target.call("gpu", "fill", address, content)

    def temper(self, which: int) -> None:
        self.gpu.temper(which)
        self.target.call("gpu", "temper", which)

    def close(self) -> None:
        self.engine.close()
        self.target.close()
        self.gpu.free_all()


@pytest.fixture(scope="module", params=["local", "shm", "tcp"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=DRIVERS)
def driver(request: pytest.FixtureRequest) -> str:
    return str(request.param())


@pytest.fixture(scope="module")
def pair(way: str, driver: str) -> Iterator[Pair]:
    made = Pair(way, driver)
    yield made
    made.close()


def _random(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


def _move(pair: Pair, opcode: Opcode, near: int, far: int, length: int) -> None:
    pair.engine.transfer_sync([TransferRequest(opcode, near, pair.segment, far, length)], 20.0)


@pytest.mark.parametrize("temper", [EAGER, LAZY], ids=["eager", "lazy"])
@pytest.mark.parametrize("opcode", list(Opcode))
def test_every_pairing_carries_the_bytes(pair: Pair, opcode: Opcode, temper: int) -> None:
    pair.temper(temper)
    seeds = itertools.count(100 * temper + opcode)
    for mine, theirs in itertools.product(pair.near.at, pair.far.at):
        if mine == theirs == "host":
            continue
        for size in SIZES:
            near, far = pair.near.at[mine] + LENGTH - size, pair.far.at[theirs]
            source, target = (pair.near, pair.far) if opcode is Opcode.WRITE else (pair.far, pair.near)
            of, to = (near, far) if opcode is Opcode.WRITE else (far, near)
            content = _random(next(seeds), size)
            source.fill(of, content)
            _move(pair, opcode, near, far, size)
            assert np.array_equal(target.read(to, size), content), (mine, theirs, size)


@pytest.mark.parametrize("temper", [EAGER, LAZY, MOODY], ids=["eager", "lazy", "moody"])
def test_host_and_device_ranges_mixed_in_one_scattered_batch(pair: Pair, temper: int) -> None:
    pair.temper(temper)
    random = np.random.default_rng(temper)
    before = {name: _random(7, LENGTH) for name in pair.far.at}
    for name, content in before.items():
        pair.far.fill(pair.far.at[name], content)
    mine = {name: _random(at % 1000, LENGTH) for name, at in pair.near.at.items()}
    for name, content in mine.items():
        pair.near.fill(pair.near.at[name], content)
    requests, reads = [], []
    for block in random.permutation(64).tolist():
        source, target = random.choice(list(mine)), random.choice(list(before))
        offset, length = block * (LENGTH // 64), int(random.integers(1, LENGTH // 64 + 1))
        requests.append((str(source), str(target), offset, length))
        before[target][offset : offset + length] = mine[source][offset : offset + length]
    writes = [
        TransferRequest(Opcode.WRITE, pair.near.at[s] + o, pair.segment, pair.far.at[t] + o, n)
        for s, t, o, n in requests
    ]
    pair.engine.transfer_sync(writes, 20.0)
    for name, content in before.items():
        assert np.array_equal(pair.far.read(pair.far.at[name], LENGTH), content), name
    for source, target, offset, length in requests:
        back = str(random.choice(list(mine)))
        reads.append(
            TransferRequest(
                Opcode.READ, pair.near.at[back] + offset, pair.segment, pair.far.at[target] + offset, length
            )
        )
        mine[back][offset : offset + length] = before[target][offset : offset + length]
        assert source in mine
    pair.engine.transfer_sync(reads, 20.0)
    for name, content in mine.items():
        assert np.array_equal(pair.near.read(pair.near.at[name], LENGTH), content), name


def test_a_peers_gpu_memory_is_left_to_tcp(pair: Pair, way: str) -> None:
    if way != "shm":
        pytest.skip("only shm has a choice")
    before = pair.engine.stats()
    _move(pair, Opcode.WRITE, pair.near.at["cuda:0"], pair.far.at["host"], SLICE)
    between = pair.engine.stats()
    assert between["shm_write_bytes"] == before.get("shm_write_bytes", 0) + SLICE
    _move(pair, Opcode.WRITE, pair.near.at["host"], pair.far.at["cuda:0"], SLICE)
    after = pair.engine.stats()
    assert after["tcp_write_bytes"] == between.get("tcp_write_bytes", 0) + SLICE
    assert after["shm_write_bytes"] == between["shm_write_bytes"]


@pytest.mark.parametrize("opcode", list(Opcode))
@pytest.mark.parametrize("theirs", ["host", "shared"])
def test_a_failed_copy_is_a_typed_error_and_the_next_transfer_works(pair: Pair, opcode: Opcode, theirs: str) -> None:
    if not pair.gpu.fake:
        pytest.skip("a real driver does not fail on command")
    content = _random(9, LENGTH)
    source = pair.near if opcode is Opcode.WRITE else pair.far
    source.fill((source.at["cuda:0"] if opcode is Opcode.WRITE else source.at[theirs]), content)
    for nth in (1, LENGTH // SLICE):
        pair.gpu.fail("copy", nth)
        with pytest.raises(DeviceError, match=r"illegal memory access"):
            _move(pair, opcode, pair.near.at["cuda:0"], pair.far.at[theirs], LENGTH)
        assert pair.engine.stats()["device_errors"] > 0
        pair.gpu.fail("nothing", 0)
        _move(pair, opcode, pair.near.at["cuda:0"], pair.far.at[theirs], LENGTH)
        for side, kind in ((pair.near, "cuda:0"), (pair.far, theirs)):
            assert np.array_equal(side.read(side.at[kind], LENGTH), content)


def test_pinned_memory_is_freed_with_the_last_region_and_at_close(driver: str) -> None:
    gpu = Gpu(driver)
    before = (gpu.pinned_bytes(), gpu.streams()) if gpu.fake else (0, 0)
    one, other = (TransferEngine(config(driver, "tcp")) for _ in range(2))
    address, near = gpu.allocate(LENGTH), gpu.allocate(LENGTH)
    gpu.fill(near, _random(1, LENGTH))
    with one, other:
        other.register_local_memory(address, LENGTH, location="cuda:0")
        one.register_local_memory(near, LENGTH, location="cuda:0")
        segment = one.open_segment(other.address)
        one.transfer_sync([TransferRequest(Opcode.WRITE, near, segment, address, LENGTH)], 10.0)
        assert 1 <= other.stats()["staging_buffers"] <= 2
        other.unregister_local_memory(address)
        assert other.stats()["staging_buffers"] == 0
        assert 1 <= one.stats()["staging_buffers"] <= 2
    assert one.stats()["staging_buffers"] == 0
    if gpu.fake:
        assert (gpu.pinned_bytes(), gpu.streams()) == before
    gpu.free_all()


def test_what_is_said_of_a_location_is_checked(driver: str) -> None:
    gpu = Gpu(driver)
    address = gpu.allocate(LENGTH)
    host = np.zeros(100, np.uint8)
    with TransferEngine(config(driver, "tcp")) as engine:
        for length, location in ((LENGTH, "cuda:0"), (1, "*")):
            engine.register_local_memory(address, length, location=location)
            assert engine.memory.regions()[0].location == "cuda:0"
            engine.unregister_local_memory(address)
        engine.register_local_memory(host.ctypes.data, 100, location="*")
        assert engine.memory.regions()[0].location == "*"
        with pytest.raises(ValueError, match=r"not memory of any GPU"):
            engine.register_local_memory(host.ctypes.data, 50, location="cuda:0")
        with pytest.raises(ValueError, match=r"named 'cuda:N'"):
            engine.register_local_memory(address, LENGTH, location="cuda")
        with pytest.raises(ConfigError, match=r"GPUs; see CUDA_VISIBLE_DEVICES"):
            engine.register_local_memory(address, LENGTH, location="cuda:77")
        if gpu.fake:  # a real GPU's neighbour may be mapped, and is on some machines by the CPU too
            gpu.fail("cuCtxPushCurrent_v2", 1, 2)
            with pytest.raises(DeviceError, match=r"out of memory"):
                engine.register_local_memory(address, LENGTH, location="cuda:0")
            with pytest.raises(ValueError, match=r"location='cuda:0'"):
                engine.register_local_memory(address, LENGTH)
            with pytest.raises(ValueError, match=r"memory of cuda:0, though 'cuda:1'"):
                engine.register_local_memory(address, LENGTH, location="cuda:1")
            with pytest.raises(ValueError, match=r"not memory of any GPU"):
                engine.register_local_memory(address, LENGTH + 1, location="cuda:0")
            with pytest.raises(ValueError, match=r"not mapped memory"):
                engine.register_local_memory(16, 4096)
        assert [region.address for region in engine.memory.regions()] == [host.ctypes.data]
    gpu.free_all()


def test_a_tensor_says_itself_where_it_is(driver: str) -> None:
    gpu = Gpu(driver)
    index = gpu.ordinal(1)
    address = gpu.allocate(4096, index)
    with TransferEngine(config(driver, "tcp")) as engine:
        assert engine.register_buffer(Tensor(address, 4096, index)) == address
        assert engine.memory.regions()[0].device == index
    gpu.free_all()


def test_torch_tensors_on_a_real_gpu() -> None:
    real_driver()
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    source, target = torch.arange(1 << 20, dtype=torch.uint8, device="cuda"), torch.zeros(1 << 20, dtype=torch.uint8)
    with TransferEngine(EngineConfig(transports=("tcp",))) as one, TransferEngine(EngineConfig()) as other:
        there = other.register_buffer(target)
        at = one.register_buffer(source)
        torch.cuda.synchronize()
        segment = one.open_segment(other.address)
        one.transfer_sync([TransferRequest(Opcode.WRITE, at, segment, there, 1 << 20)], 10.0)
    assert torch.equal(source.cpu(), target)


@pytest.mark.parametrize("opcode", list(Opcode))
def test_staged_bytes_pass_through_tls(opcode: Opcode) -> None:
    gpu = Gpu(fake_driver())
    names = ("initiator", "target")
    one, other = (TransferEngine(config(fake_driver(), "tcp", **member(name))) for name in names)
    with one, other:
        at = [gpu.allocate(LENGTH, device) for device in (0, 1)]
        for device, engine in enumerate((one, other)):
            engine.register_local_memory(at[device], LENGTH, location=f"cuda:{device}")
        source, target = at if opcode is Opcode.WRITE else at[::-1]
        gpu.fill(source, content := _random(5, LENGTH))
        segment = one.open_segment(other.address)
        one.transfer_sync([TransferRequest(opcode, at[0], segment, at[1], LENGTH)], 10.0)
        assert np.array_equal(gpu.read(target, LENGTH), content)
    gpu.free_all()


def test_without_a_driver_only_gpu_memory_is_refused() -> None:
    with TransferEngine(EngineConfig(transports=("local",), cuda_driver="no-such-driver.so")) as engine:
        host = np.zeros(4096, np.uint8)
        at = engine.register_buffer(host)
        engine.transfer_sync([TransferRequest(Opcode.WRITE, at, engine.open_segment(engine.address), at + 2048, 9)], 5)
        with pytest.raises(ConfigError, match=r"install the driver"):
            engine.register_local_memory(at, 100, location="cuda:0")
        with pytest.raises(ValueError, match=r"not mapped"):
            engine.register_local_memory(16, 4096)


def test_a_region_as_dmabuf() -> None:
    gpu = Gpu(fake_driver())
    address = gpu.allocate(3 * mmap.PAGESIZE)
    content = _random(3, 3 * mmap.PAGESIZE)
    gpu.fill(address, content)
    with TransferEngine(config(fake_driver(), "tcp")) as engine:
        engine.register_local_memory(address + 100, 5000, location="cuda:0")
        region = engine.memory.regions()[0]
        found = engine.devices.dmabuf_fd(region)
        assert found is not None and found.offset == 100
        with mmap.mmap(found.fd, 2 * mmap.PAGESIZE, prot=mmap.PROT_READ) as view:
            assert view[found.offset : found.offset + 5000] == content[100:5100].tobytes()
        os.close(found.fd)
        for name in ("cuPointerSetAttribute", "cuMemGetHandleForAddressRange", "cuDeviceGetAttribute"):
            gpu.fail(name)
            assert engine.devices.dmabuf_fd(region) is None
        gpu.dmabuf(False)
        assert engine.devices.dmabuf_fd(region) is None
        gpu.dmabuf(True)
    gpu.free_all()


def test_unregistered_gpu_memory_is_refused(pair: Pair) -> None:
    with pytest.raises(NotRegistered):
        _move(pair, Opcode.WRITE, 4096, pair.far.at["host"], 2)
    with pytest.raises(NotRegistered):
        _move(pair, Opcode.READ, pair.near.at["cuda:0"], 4096, 2)
