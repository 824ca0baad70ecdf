"""Rendering and tokenizing off the event loop, in processes: neither a long prompt nor a bad template may delay other requests' chunks.

Each slot is a process of its own, so that one that dies (or hangs, and is killed) takes no other with it; its jobs are tried once more.
Knows: processes, queues, deadlines. Does not know: templates and tokens (render.py, which runs inside) or HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for_connection
from typing import Any, TypeVar

from mooncake.common.errors import BadRequest, Overloaded
from mooncake.gateway.conversation import NoKVInformation
from mooncake.gateway.metrics import GatewayMetrics
from mooncake.gateway.render import BadPrompt, ModelRenderer, PromptTooLong, Rendered, RenderJob, checked_ids, keys_of

_log = logging.getLogger(__name__)
T = TypeVar("T")
LOAD_TIMEOUT_S = 120.0
MODELS_KEPT = 8


# --- inside of a pool process ----------------------------------------------------------------------------------------

_renderers: dict[str, ModelRenderer | NoKVInformation] = {}


def _start(parent_path: list[str]) -> None:
    sys.path[:] = parent_path
    # Tokenizers need no torch; importing it would cost seconds and hundreds of MB a process.
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the gateway's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A gateway that was killed cannot end its processes."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for_connection([parent.sentinel])
        os._exit(1)


def _renderer(model_path: str) -> ModelRenderer:
    found = _renderers.get(model_path)
    if found is None:
        try:
            found = ModelRenderer(model_path)
        except NoKVInformation as error:
            found = error
        except Exception as error:  # whatever a model directory may hold: its requests are then served without us
            found = NoKVInformation(f"the tokenizer does not load: {error}")
        while len(_renderers) >= MODELS_KEPT:
            del _renderers[next(iter(_renderers))]
        _renderers[model_path] = found
    if isinstance(found, NoKVInformation):
        raise found
    return found


def _load(model_path: str) -> int:
    try:
        _renderer(model_path)
    except NoKVInformation as error:
        _log.debug("no renderer: %s", error)
    return os.getpid()


def _render(job: RenderJob) -> Rendered:
    try:
        if isinstance(job.prompt, list) and job.body.get("truncate_prompt_tokens") is None:
            return keys_of(checked_ids(job.prompt, job.max_model_len), job)
        return keys_of(_renderer(job.model_path).token_ids(job), job)
    except (NoKVInformation, PromptTooLong, BadPrompt):
        raise
    except Exception as error:  # the outermost of this process: the worker will word what is wrong with the request
        raise NoKVInformation(f"{type(error).__name__} while rendering") from None


def _pack(token_ids: list[int], job: RenderJob) -> Rendered:
    return keys_of(token_ids, job)


# --- in the gateway --------------------------------------------------------------------------------------------------


class _Slot:
    """One process and what waits for it."""

    def __init__(self) -> None:
        self.executor = self._new()
        self.jobs = 0
        self.load = 0  # characters (or tokens) of the jobs that it has
        self.loaded: set[str] = set()  # models; the first job of another one also loads it

    @staticmethod
    def _new() -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), initializer=_start, initargs=(list(sys.path),)
        )

    def replace(self, broken: ProcessPoolExecutor) -> None:
        """Starts a new process unless somebody has done it already; the old one is killed."""
        if self.executor is not broken:
            return
        self.executor = self._new()
        self.loaded.clear()
        kill(broken)

    def pids(self) -> list[int]:
        return list(self.executor._processes or ())


def kill(executor: ProcessPoolExecutor) -> None:
    """Ends an executor whose process may hang (there is no public way to do that); its jobs end with BrokenProcessPool."""
    for process in list((executor._processes or {}).values()):
        process.kill()
    # Not `cancel_futures`: a cancelled job would look like a cancelled request to whoever waits for it.
    executor.shutdown(wait=False)


class TokenizerPool:
    """Bounded; `Overloaded` is raised when too much waits."""

    def __init__(
        self, metrics: GatewayMetrics, *, processes: int = 2, max_waiting: int = 1024, timeout_s: float = 20.0
    ) -> None:
        self._metrics = metrics
        self._slots = [_Slot() for _ in range(processes)]
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s

    async def load(self, model_path: str) -> None:
        """Loads a model in every process, before its first request waits for that."""
        await asyncio.gather(*(self._run(slot, _load, (model_path,), 0, model_path) for slot in self._slots))
        for slot in self._slots:
            slot.loaded.add(model_path)

    async def render(self, job: RenderJob) -> Rendered:
        """Raises NoKVInformation, BadRequest (too long, bad ids), Overloaded."""
        return await self._submit(_render, (job,), _size(job), job)

    async def pack(self, token_ids: list[int], job: RenderJob) -> Rendered:
        """Keys of token ids that a worker has made (when its own differ from ours)."""
        return await self._submit(_pack, (token_ids, job), len(token_ids), job)

    async def _submit(
        self, function: Callable[..., Rendered], arguments: tuple[Any, ...], size: int, job: RenderJob
    ) -> Rendered:
        waiting = sum(slot.jobs for slot in self._slots)
        if waiting >= self._max_waiting:
            raise Overloaded("Too many requests wait for tokenization.", retry_after_s=1.0)
        slot = min(self._slots, key=lambda each: (each.load, each.jobs))
        with self._metrics.tokenizing():
            try:
                rendered = await self._run(slot, function, arguments, size, job.model_path)
            except PromptTooLong as error:
                raise too_long(*error.args) from None
            except BadPrompt as error:
                raise BadRequest(str(error), param="prompt") from None
        if not isinstance(job.prompt, list):
            slot.loaded.add(job.model_path)
        return rendered

    async def _run(
        self, slot: _Slot, function: Callable[..., T], arguments: tuple[Any, ...], size: int, model_path: str
    ) -> T:
        slot.jobs += 1
        slot.load += size
        try:
            for attempt in (1, 2):
                executor = slot.executor
                limit_s = self._timeout_s if model_path in slot.loaded else LOAD_TIMEOUT_S
                try:
                    # A job waits behind others of its slot, so its limit counts them too.
                    async with asyncio.timeout(limit_s * max(1, slot.jobs)):
                        return await asyncio.get_running_loop().run_in_executor(executor, function, *arguments)
                except TimeoutError:
                    _log.error("a tokenizer process hangs and is replaced")
                    self._metrics.tokenizer_restarts.inc()
                    slot.replace(executor)
                    raise NoKVInformation("rendering took too long") from None
                except RuntimeError as error:  # BrokenProcessPool is one; so is "shut down" when somebody was faster
                    if slot.executor is executor and not isinstance(error, BrokenProcessPool):
                        raise
                    if slot.executor is executor:
                        _log.error("a tokenizer process died and is replaced")
                        self._metrics.tokenizer_restarts.inc()
                    slot.replace(executor)
                    if attempt == 2:
                        raise NoKVInformation("the tokenizer process died") from None
            raise AssertionError("unreachable")
        finally:
            slot.jobs -= 1
            slot.load -= size

    def pids(self) -> list[int]:
        """Of the living processes (a process starts with its first job)."""
        return [pid for slot in self._slots for pid in slot.pids()]

    def close(self) -> None:
        """Returns when the processes are gone (soon: they are killed)."""
        for slot in self._slots:
            kill(slot.executor)
        for slot in self._slots:
            slot.executor.shutdown(wait=True)


def too_long(tokens: int, limit: int) -> BadRequest:
    return BadRequest(
        f"This model's maximum context length is {limit} tokens. However, your prompt contains at least {tokens} input tokens. "
        "Please reduce the length of the input prompt.",
        param="input_tokens",
        error_code="context_length_exceeded",
    )


def _size(job: RenderJob) -> int:
    if not job.chat:
        return len(job.prompt or ())
    contents = (message.get("content") for message in job.body.get("messages", ()))
    return sum(len(c) if isinstance(c, str) else 100 for c in contents if c)
