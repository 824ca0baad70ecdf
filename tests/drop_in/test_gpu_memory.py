"""Pointers into GPU memory come without a location from engines like vLLM's connector; on the fake driver, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.native import build
from transfer_engine.device import cuda_driver
from transfer_engine.transports import sysio

_ROOT = Path(__file__).resolve().parents[2]
_LENGTH = 3 << 20


def test_pointers_into_gpu_memory_are_recognised() -> None:
    # With that soname, whoever asks the loader for the driver gets the one that is loaded already.
    fake = build(_ROOT / "tests" / "transfer_engine" / "fakecuda.c", "-lpthread", "-Wl,-soname,libcuda.so.1")
    command = [sys.executable, "-m", __name__, str(fake)]
    done = subprocess.run(command, cwd=_ROOT, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _main(fake: str) -> None:
    import numpy as np

    from mooncake.engine import TransferEngine
    from tests.transfer_engine.gpu import Gpu

    gpu = Gpu(fake)
    assert cuda_driver.load("libcuda.so.1").device_of(0) is None
    engines = [TransferEngine() for _ in range(2)]
    memory = [gpu.allocate(_LENGTH, device) for device in (0, 1)]
    assert not sysio.is_mapped(memory[0], _LENGTH)
    for engine, address in zip(engines, memory, strict=True):
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        assert engine.batch_register_memory([address], [_LENGTH]) == 0
    gpu.fill(memory[0], content := np.random.default_rng(1).integers(0, 256, _LENGTH, dtype=np.uint8))
    target = f"127.0.0.1:{engines[1].get_rpc_port()}"
    assert engines[0].batch_transfer_sync_write(target, [memory[0]], [memory[1]], [_LENGTH]) == 0
    assert np.array_equal(gpu.read(memory[1], _LENGTH), content)
    for engine, address in zip(engines, memory, strict=True):
        assert engine.batch_unregister_memory([address]) == 0


if __name__ == "__main__":
    _main(sys.argv[1])
