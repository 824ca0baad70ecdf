"""vLLM's `MooncakeTransfer` (encoder cache) as a caller: its own code on our engine, tensors as it registers them."""

from __future__ import annotations

import threading

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_encoder_caches_transfers() -> None:
    import torch
    from vllm.distributed.ec_transfer.ec_connector.mooncake.transfer import MooncakeTransfer, ensure_mooncake_available

    ensure_mooncake_available()
    source, target = MooncakeTransfer("127.0.0.1", "tcp"), MooncakeTransfer("127.0.0.1", "tcp")
    target.ensure_ready()
    received = torch.zeros(3001, dtype=torch.bfloat16)
    assert target.register_memory(received) == 0
    storage = torch.randn(6000, dtype=torch.bfloat16)
    views = [storage[1:1000], storage[1000:1001], storage[1001:4001]]  # siblings of one storage, nothing page-aligned
    acquired = source.acquire_sources(views)
    again = source.acquire_sources(views[:1])

    def push(n: int) -> None:
        view, at = views[n], [0, 999, 1000][n] * 2
        source.write(
            target.local_session(), [view.data_ptr()], [received.data_ptr() + at], [min(view.nbytes, 6002 - at)]
        )

    threads = [threading.Thread(target=push, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert torch.equal(received, storage[1:3002])
    with pytest.raises(RuntimeError, match="failed with status"):
        source.write(target.local_session(), [views[0].data_ptr()], [received.data_ptr() + 6000], [64])
    assert source.release_sources(again)
    assert source.release_sources(acquired)
    with pytest.raises(RuntimeError, match="failed with status"):
        source.write(target.local_session(), [views[0].data_ptr()], [received.data_ptr()], [64])
    assert target.unregister_memory(received)
    assert not target.unregister_memory(received)
    source.close()
    target.close()
