"""Worker side of the store: moves store blocks between the pool and the engine's own KV blocks, on threads of its own.

An object is, for each layer in registration order, its engine blocks in order (docs/protocol.md §6). Loads scatter straight into
the blocks; what did not arrive is reported as bad and recomputed. Saves read the blocks in place, which are held meanwhile; the
backlog is bounded and what does not fit, or meets a store that is down, is dropped. Knows: layouts and deadlines. Does not know: keys.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from mooncake.common.errors import MooncakeError
from mooncake.vllm.connector_config import StoreConfig
from mooncake.vllm.host_link import LoadSample
from mooncake.vllm.kv_layout import KVLayout, block_ranges
from mooncake.vllm.step_plan import StoreLoad, StoreSave
from mooncake.vllm.worker_runtime import WorkerRuntime
from store.client import GetItem, PutItem

_log = logging.getLogger(__name__)
_BATCH_BYTES = 32 << 20
_GRACE_S = 5.0
"""A put that ends later than so long after its deadline is an error."""
Range = tuple[int, int]


class Client(Protocol):
    """What of `StoreClient` is used: blocking, thread-safe, no byte moves after it returned."""

    def batch_put(self, items: Sequence[PutItem], deadline_s: float) -> list[int]: ...
    def batch_get(self, items: Sequence[GetItem], deadline_s: float) -> list[int]: ...
    def close(self) -> None: ...


def object_ranges(layout: KVLayout, block_ids: Sequence[int | None], scratch: int) -> list[Range]:
    """Where the bytes of one object are; blocks that are None go to the scratch address, one after the other."""
    ranges: list[Range] = []
    for layer in layout.layers:
        for block in block_ids:
            if block is None:
                ranges.append((scratch, layer.block_bytes))
                scratch += layer.block_bytes
            else:
                (one,) = block_ranges(layer, (block,))
                if ranges and ranges[-1][0] + ranges[-1][1] == one[0]:
                    ranges[-1] = (ranges[-1][0], ranges[-1][1] + one[1])
                else:
                    ranges.append(one)
    return ranges


class StoreIO:
    """`load`, `abort`, `save` and `preempt` are called by vLLM's thread; only `preempt` may wait."""

    def __init__(self, runtime: WorkerRuntime, config: StoreConfig, client: Client) -> None:
        self._rt, self._config, self._client = runtime, config, client
        self._each = config.block_tokens // runtime.layout.block_size
        self._object_bytes = runtime.layout.bytes_per_block * self._each
        self._scratch = bytearray(self._object_bytes)
        """Gets the blocks of an object that are in the local prefix already; nobody reads it."""
        self._scratch_address = runtime.store_engine.register_buffer(self._scratch)
        self._loaders = ThreadPoolExecutor(4, thread_name_prefix="mooncake-load")
        self._aborted: set[str] = set()
        self._backlog: collections.deque[tuple[StoreSave, Callable[[], None]]] = collections.deque()
        self._writing: list[StoreSave] = []
        self._changed = threading.Condition()
        self._closing = False
        self._unavailable = False
        """The last put found no store: said once, not for every batch of an outage."""
        self._saver = threading.Thread(target=self._run_saver, name="mooncake-save", daemon=True)
        self._saver.start()

    # --- loads ---

    def load(self, load: StoreLoad) -> None:
        """Starts a load; it is reported when it ends, at the latest soon after its deadline."""
        self._rt.reports.load_began(load.req_id)
        self._rt.in_pool(self._loaders, lambda: self._run_load(load))

    def abort(self, req_id: str) -> None:
        """vLLM dropped the request: a load that has not begun need not."""
        self._aborted.add(req_id)
        if not self._rt.reports.loading(req_id):
            self._aborted.discard(req_id)

    def _run_load(self, load: StoreLoad) -> None:
        """On a pool thread."""
        arrived, began = 0, time.monotonic()
        try:
            if load.req_id not in self._aborted:
                arrived = self._get(load)
        except MooncakeError as error:
            _log.warning("load of %s from the store failed: %s", load.req_id, error)
        finally:
            self._report(load, arrived, time.monotonic() - began)

    def _get(self, load: StoreLoad) -> int:
        """Leading objects that arrived whole."""
        blocks: list[int | None] = [None] * load.skip_blocks + list(load.block_ids)
        items = [
            GetItem(
                key,
                object_ranges(self._rt.layout, blocks[i * self._each : (i + 1) * self._each], self._scratch_address),
            )
            for i, key in enumerate(load.keys)
        ]
        left_s = load.deadline - time.monotonic()
        if left_s <= 0:
            return 0
        results = self._client.batch_get(items, left_s)
        if lost := sorted({result for result in results if result < 0}):
            _log.warning("load of %s from the store: codes %s", load.req_id, lost)
        good = [result == self._object_bytes for result in results]
        return good.index(False) if False in good else len(good)

    def _report(self, load: StoreLoad, arrived: int, took_s: float) -> None:
        first_bad = max(0, arrived * self._each - load.skip_blocks)
        bad = load.block_ids[first_bad:] if arrived < len(load.keys) else []
        aborted = load.req_id in self._aborted
        self._aborted.discard(load.req_id)
        result = "aborted" if aborted else "ok" if not bad else "partial" if arrived else "failed"
        counters = self._rt.counters
        counters.add("loads_total", source="store", result=result)
        counters.add("store_loaded_bytes_total", arrived * self._object_bytes)
        counters.add("store_load_seconds_total", took_s)
        if arrived and not aborted:
            tokens = (arrived * self._each - load.skip_blocks) * self._rt.layout.block_size
            self._rt.link.send(LoadSample(tokens, took_s))
        if bad and not aborted:
            counters.add("recomputed_tokens_total", len(bad) * self._rt.layout.block_size, reason="store_load_failed")
        self._rt.reports.load_ended(load.req_id, bad_blocks=bad)

    # --- saves ---

    def save(self, saves: Sequence[StoreSave], computed: Callable[[], None]) -> None:
        """Queues store blocks that the last step completed; `computed` blocks until the device has written them."""
        with self._changed:
            for save in saves:
                if len(self._backlog) >= self._config.max_pending_saves:
                    self._rt.counters.add("store_dropped_saves_total", reason="backlog")
                    continue
                self._rt.reports.hold(save.req_id)
                self._backlog.append((save, computed))
            self._changed.notify_all()
        self._gauge()

    def preempt(self, req_ids: Sequence[str]) -> None:
        """Returns when the blocks of these requests are not read any more: queued saves are dropped, a running one is awaited."""
        gone = set(req_ids)
        wait_s = self._config.save_deadline_s + _GRACE_S
        with self._changed:
            dropped = [entry for entry in self._backlog if entry[0].req_id in gone]
            self._backlog = collections.deque(entry for entry in self._backlog if entry[0].req_id not in gone)
            idle = self._changed.wait_for(
                lambda: not any(save.req_id in gone for save in self._writing), timeout=wait_s
            )
        if not idle:
            _log.error("a save still reads blocks that were preempted")
            self._rt.counters.add("errors_total")
        for save, _ in dropped:
            self._rt.counters.add("store_dropped_saves_total", reason="preempted")
            self._rt.reports.unhold(save.req_id)

    def _run_saver(self) -> None:
        while not self._closing:
            try:
                batch, computed = self._next_batch()
                for wait in computed:
                    wait()
                if batch:
                    self._put(batch)
            except Exception:
                self._rt.counters.add("errors_total")
                _log.exception("saving to the store failed")
            finally:
                self._end_batch()

    def _next_batch(self) -> tuple[list[StoreSave], list[Callable[[], None]]]:
        with self._changed:
            self._changed.wait_for(lambda: self._backlog or self._closing)
            most = max(1, _BATCH_BYTES // self._object_bytes)
            entries = [self._backlog.popleft() for _ in range(min(most, len(self._backlog)))]
            self._writing = [save for save, _ in entries]
            return self._writing, [computed for _, computed in entries]

    def _put(self, batch: Sequence[StoreSave]) -> None:
        unique = list({save.key: save for save in batch}.values())
        items = [PutItem(save.key, object_ranges(self._rt.layout, save.block_ids, 0)) for save in unique]
        try:
            results = self._client.batch_put(items, self._config.save_deadline_s)
        except MooncakeError as error:
            level, self._unavailable = logging.DEBUG if self._unavailable else logging.WARNING, True
            _log.log(level, "blocks are not saved from now on: %s", error)
            self._rt.counters.add("store_dropped_saves_total", len(items), reason="unavailable")
            return
        self._unavailable = False
        saved = sum(result >= 0 for result in results)  # also those that were there already: their bytes do not move
        self._rt.counters.add("store_saved_blocks_total", saved)
        if failed := len(results) - saved:
            self._rt.counters.add("store_dropped_saves_total", failed, reason="refused")

    def _end_batch(self) -> None:
        with self._changed:
            batch, self._writing = self._writing, []
            self._changed.notify_all()
        for save in batch:
            self._rt.reports.unhold(save.req_id)
        self._gauge()

    def _gauge(self) -> None:
        self._rt.counters.gauge("pending_saves", len(self._backlog) + len(self._writing))

    def close(self) -> None:
        """Lets a running put end; what is queued is lost."""
        with self._changed:
            self._closing = True
            self._backlog.clear()
            self._changed.notify_all()
        self._saver.join(2.0)
        self._loaders.shutdown(wait=False, cancel_futures=True)
        self._client.close()
