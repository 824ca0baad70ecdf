"""Peers that are killed, frozen or replaced at a random point of a transfer: one seed, one scenario, one verdict.

The victim is the initiator or the target of a transfer over tcp, TLS or shared memory, and stops in the middle of a system
call, after a number of bytes, or when some byte has arrived. All memory is a pattern in which every byte is either the old or the new
one of its place, so a byte that went astray is seen. Meanwhile a third engine's transfers must go on.

    python -m tests.transfer_engine.chaos --seeds 5000 [--first N]
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mooncake.common.errors import MooncakeError, PeerUnavailable, TransferTimeout
from tests.transfer_engine.certs import member
from tests.transfer_engine.shim import SIGNAL_AFTER, SIGNAL_BEFORE
from tests.transfer_engine.zygote import Rows, Victim, Zygote
from transfer_engine import EngineConfig, Opcode, TransferEngine, TransferRequest, TransferState, TransferStatus

WAYS = ("tcp", "tcp-tls", "shm-mapped", "shm-cma")
REGION = 2 << 20
MARGIN_S = 2.0
"""More than the 0.5 s that the engine may take beyond a deadline, because test machines are busy."""
BYSTANDER_S = 6.0
"""A transfer of 64 KiB between two who have nothing to do with the victim; milliseconds where processors are free."""
TOKEN = b"chaos"
_OLD = np.random.default_rng(1).integers(0, 256, REGION, np.uint8)
_NEW = _OLD ^ np.uint8(0x55)


def config(way: str, **more: Any) -> EngineConfig:
    files = member("chaos") if way == "tcp-tls" else {}
    fields = {"transports": (way.split("-")[0],), "shm_mapping": way != "shm-cma", "slice_min_bytes": 64 << 10}
    return EngineConfig(**(fields | {"cluster_token": TOKEN, "peer_rest_s": 0.1} | files | more))  # type: ignore[arg-type]


@dataclass
class Plan:
    """What a seed stands for."""

    seed: int
    way: str
    victim_initiates: bool
    opcode: Opcode
    event: str
    """kill, restart (another instance on the same port), stop (for good), pause (and go on)."""
    trigger: str
    """call, bytes, or seen (from outside, when a byte of the target has changed)."""
    rows: list[tuple[int, int]]
    """(offset, length), the same on both sides"""
    cold: bool
    """The connections are not made yet."""
    chance: random.Random = field(repr=False)

    @classmethod
    def of(cls, seed: int) -> Plan:
        chance = random.Random(seed)
        way = chance.choice(WAYS)
        initiates, opcode = chance.random() < 0.5, chance.choice(list(Opcode))
        event = chance.choices(("kill", "restart", "pause", "stop"), (5, 3, 3, 1))[0]
        triggers = ["seen"]
        if way.startswith("tcp"):
            triggers = ["call", "call", "bytes", "bytes", "bytes", "seen"]
        elif way == "shm-cma" and initiates:
            triggers = ["call", "bytes", "seen"]
        trigger = chance.choice(triggers)
        shape = chance.choice(("scattered", "large") if trigger == "seen" else ("small", "scattered", "large"))
        if shape == "scattered":
            sizes = [chance.randrange(1, 60_000) for _ in range(40)]
        else:
            sizes = [chance.randrange(1, 5000)] if shape == "small" else [chance.randrange(1 << 20, 15 << 17)]
        rows, at = [], chance.randrange(1, 4096)
        for size in sizes:
            rows.append((at, size))
            at += size + chance.randrange(0, 3) * chance.randrange(1, 5000)
        return cls(seed, way, initiates, opcode, event, trigger, rows, chance.random() < 0.3, chance)

    @property
    def deadline_s(self) -> float:
        return {"stop": 0.3, "pause": 5.0}.get(self.event, 4.0)

    @property
    def signal(self) -> int:
        return signal.SIGSTOP if self.event in ("stop", "pause") else signal.SIGKILL

    @property
    def expected(self) -> np.ndarray:
        """The receiving memory when all bytes have arrived; the sending one is all new."""
        whole = _OLD.copy()
        for at, size in self.rows:
            whole[at : at + size] = _NEW[at : at + size]
        return whole


class Wrong(AssertionError):
    """The seed's verdict when it is bad."""


def check(good: bool, text: str) -> None:
    if not good:
        raise Wrong(text)


class Bystander:
    """A third engine whose transfers with the survivor never stop."""

    def __init__(self, survivor: TransferEngine, zygote: Zygote, way: str) -> None:
        self._engine = survivor
        self._other = zygote.fork(config(way))
        self._base, self._there = self._other.memory(1 << 16, way == "shm-mapped")
        self._here = np.zeros(1 << 16, np.uint8)
        self._at = survivor.register_buffer(self._here)
        self._segment = survivor.open_segment(self._other.address)
        self._go, self._over = threading.Event(), False
        self.count = 0
        self.problem = ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over:
            self._go.wait()
            value = self.count % 250 + 1
            self._here[:] = value
            began = time.monotonic()
            try:
                request = TransferRequest(Opcode.WRITE, self._at, self._segment, self._base, len(self._here))
                self._engine.transfer_sync([request], 10.0)
                took = time.monotonic() - began
                if took > BYSTANDER_S:
                    self.problem = f"took {took:.2f} s"
                if not (self._there == value).all():
                    self.problem = "wrong bytes"
            except MooncakeError as error:
                self.problem = repr(error)
            self.count += 1
            time.sleep(0.002)

    def __enter__(self) -> Bystander:
        self.problem, self._began = "", self.count
        self._go.set()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            until = time.monotonic() + BYSTANDER_S
            while self.count == self._began and time.monotonic() < until:
                time.sleep(0.001)
            check(
                self.count > self._began and not self.problem,
                f"the bystander suffered: {self.problem or 'no progress'}",
            )
        self._go.clear()

    def close(self) -> None:
        self._over = True
        self._go.set()
        self._thread.join(15)
        self._other.kill()


class Survivor:
    """Our engine of one way, its memory, and the bystander; reused by all seeds."""

    def __init__(self, way: str, zygote: Zygote) -> None:
        self.way = way
        self.engine = TransferEngine(config(way))
        if way == "shm-mapped":
            self._shared = self.engine.allocate_shared(REGION)
            self.at, self.memory = self._shared.address, np.frombuffer(self._shared.view, np.uint8)
        else:
            self.memory = np.zeros(REGION, np.uint8)
            self.at = self.engine.register_buffer(self.memory)
        self.bystander = Bystander(self.engine, zygote, way)

    def close(self) -> None:
        self.bystander.close()
        self.engine.close()


class Chaos:
    """Runs seeds. `outcomes` counts how they ended, `fired` those whose victim was hit before the end of the transfer."""

    def __init__(self) -> None:
        self.zygote = Zygote()
        self._survivors: dict[str, Survivor] = {}
        self.outcomes: Counter[str] = Counter()
        self.fired = 0

    def run(self, seed: int) -> None:
        """Raises Wrong."""
        plan = Plan.of(seed)
        if plan.way not in self._survivors:
            self._survivors[plan.way] = Survivor(plan.way, self.zygote)
        _Scenario(self, plan, self._survivors[plan.way]).run()

    def close(self) -> None:
        for survivor in self._survivors.values():
            survivor.close()
        self.zygote.close()

    def __enter__(self) -> Chaos:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Scenario:
    def __init__(self, chaos: Chaos, plan: Plan, survivor: Survivor) -> None:
        self.chaos, self.plan, self.survivor = chaos, plan, survivor
        self.engine = survivor.engine
        self.victims: list[Victim] = []
        self.victim, self.base, self.there = self._victim(0)
        # Who writes into whose memory:
        local, remote = (self.there, survivor.memory) if plan.victim_initiates else (survivor.memory, self.there)
        self.sink, self.source = (remote, local) if plan.opcode is Opcode.WRITE else (local, remote)
        self.thawed = False
        self.deadline_s = 15.0  # of the untouched transfer before
        self.over = threading.Event()

    def _victim(self, port: int) -> tuple[Victim, int, np.ndarray]:
        victim = self._fork(config(self.plan.way, port=port))
        self.victims.append(victim)
        base, there = victim.memory(REGION, self.plan.way == "shm-mapped")
        there[:] = _OLD
        return victim, base, there

    def _fork(self, wanted: EngineConfig) -> Victim:
        """On the port of a process that was just killed, whose last thread may still hold it."""
        until = time.monotonic() + MARGIN_S
        while True:
            try:
                return self.chaos.zygote.fork(wanted)
            except OSError:
                if not wanted.port or time.monotonic() > until:
                    raise
                time.sleep(0.001)

    def run(self) -> None:
        if self.plan.event == "pause":
            threading.Thread(target=self._keep_thawing, daemon=True).start()
        try:
            with self.survivor.bystander:
                self._fill()
                if not self.plan.cold:
                    status = self._transfer(self._counting())
                    check(status is not None and status.ok, f"untouched, but {status}")
                    self._fill()
                self.deadline_s = self.plan.deadline_s
                status = self._transfer(self._armed())
                self._judge(status)
                self._afterwards()
        finally:
            self.over.set()
            for victim in self.victims:
                victim.kill()
        self._settled()

    def _fill(self) -> None:
        self.sink[:] = _OLD
        self.source[:] = _NEW

    # --- arming -------------------------------------------------------------------------------------------------------

    def _counting(self) -> tuple[Any, ...]:
        self.kind = self.plan.chance.choice(("send", "recv", "poll", "vm_read", "vm_write")[slice(*self._kinds())])
        return (self.kind, SIGNAL_BEFORE, 0, 0, 1, True)

    def _kinds(self) -> tuple[int, int]:
        if self.plan.way.startswith("tcp"):
            return (0, 2) if self.plan.trigger == "bytes" else (0, 3)
        return (3, 4) if self.plan.opcode is Opcode.READ else (4, 5)

    def _armed(self) -> tuple[Any, ...] | None:
        """Somewhere between the first and the last call, or byte, that the same transfer took before."""
        plan, chance = self.plan, self.plan.chance
        if plan.trigger == "seen":
            return None
        calls, moved = {}, 0
        if plan.cold:
            self._counting()
        else:
            calls, moved, _ = self.victim.call("counts")
        if plan.trigger == "bytes":
            last = moved or sum(size for _, size in plan.rows)
            return (self.kind, SIGNAL_AFTER, plan.signal, chance.randrange(1, last + 2), 1, True)
        last = calls.get(self.kind, 0) or 25
        return (self.kind, chance.choice((SIGNAL_BEFORE, SIGNAL_AFTER)), plan.signal, chance.randrange(1, last + 2))

    # --- the transfer -------------------------------------------------------------------------------------------------

    def _transfer(self, arm: tuple[Any, ...] | None) -> TransferStatus | None:
        """The initiator's view of the end; None when the initiator was the victim and cannot tell any more."""
        self.struck = False
        self.began = time.monotonic()
        return self._by_victim(arm) if self.plan.victim_initiates else self._by_us(arm)

    def _by_us(self, arm: tuple[Any, ...] | None) -> TransferStatus:
        plan, engine = self.plan, self.engine
        if arm is not None:
            self.victim.call("arm", *arm)
        try:
            segment = engine.open_segment(
                self.victim.address, instance_id=self.victim.instance_id, timeout_s=self.deadline_s
            )
        except MooncakeError as error:
            return TransferStatus(TransferState.FAILED, 0, error)
        requests = [
            TransferRequest(plan.opcode, self.survivor.at + at, segment, self.base + at, size) for at, size in plan.rows
        ]
        batch = engine.allocate_batch_id(len(requests))
        self.began = time.monotonic()
        engine.submit_transfer(batch, requests, deadline_s=self.deadline_s)
        while not (status := engine.wait(batch, 0.0005)).state.terminal:
            check(time.monotonic() < self.began + self.deadline_s + MARGIN_S, f"hangs past its deadline: {status}")
            self._meddle(arm)
        engine.free_batch_id(batch)
        engine.close_segment(segment)
        return status

    def _by_victim(self, arm: tuple[Any, ...] | None) -> TransferStatus | None:
        plan, engine = self.plan, self.engine
        rows: Rows = [(self.base + at, self.survivor.at + at, size) for at, size in plan.rows]
        victim = self.victim
        try:
            victim.send("submit", plan.opcode, engine.address, engine.instance_id, rows, self.deadline_s, arm)
            self._await(arm)
            victim.receive()
            victim.send("result", self.deadline_s + MARGIN_S)
            self._await(arm)
            status: TransferStatus = victim.receive()
        except EOFError:
            return None
        except MooncakeError as error:
            return TransferStatus(TransferState.FAILED, 0, error)
        check(status.state.terminal, f"hangs past its deadline: {status}")
        return status

    def _await(self, arm: tuple[Any, ...] | None) -> None:
        """Until the victim has answered or died; a victim stopped for good is as good as dead."""
        until = time.monotonic() + self.deadline_s + 2 * MARGIN_S
        while not self.victim.answered(0.0005):
            self._meddle(arm)
            if self.plan.event == "stop" and self.victim.state() == "T" and time.monotonic() > self.began + 0.3:
                raise EOFError
            check(time.monotonic() < until, "the victim hangs past its deadline")

    def _meddle(self, arm: tuple[Any, ...] | None) -> None:
        """What happens from outside while the transfer runs."""
        plan = self.plan
        if plan.trigger == "seen" and arm is None and not self.struck:
            at, size = plan.rows[plan.chance.randrange(len(plan.rows))]
            if self.sink[at + plan.chance.randrange(size)] != _OLD[at] and self.sink[at] == _NEW[at]:
                self.victim.signal(plan.signal)
                self.struck = True

    def _keep_thawing(self) -> None:
        """A pause ends after a moment, wherever it began."""
        while not self.over.wait(0.001):
            if self.victim.state() == "T":
                self.over.wait(self.plan.seed % 50 / 1000)
                self._thaw()

    def _thaw(self) -> None:
        self.thawed = True
        self.victim.signal(signal.SIGCONT)

    # --- the verdict --------------------------------------------------------------------------------------------------

    def _judge(self, status: TransferStatus | None) -> None:
        plan = self.plan
        took = time.monotonic() - self.began
        hit = status is None or not status.ok or self.thawed or self.victim.state() in ("", "T")
        self.chaos.fired += hit
        self.chaos.outcomes[f"{plan.event}: {'gone' if status is None else status.state.value}"] += 1
        check(took < self.deadline_s + 2 * MARGIN_S, f"took {took:.2f} s")
        self._bytes(status)
        if status is not None and not status.ok:
            check(isinstance(status.error, MooncakeError), f"untyped: {status.error!r}")
            if plan.event != "pause":
                allowed = (PeerUnavailable, TransferTimeout)
                check(isinstance(status.error, allowed), f"not what is to be told of a dead peer: {status.error!r}")
        if status is not None and (status.quiesced or plan.opcode is Opcode.READ) and not plan.victim_initiates:
            self._stays_quiet()

    def _bytes(self, status: TransferStatus | None) -> None:
        """No byte is anything but the old or the new one of its place; after COMPLETED all are new; the source is as it was."""
        expected = self.plan.expected
        wrong = np.flatnonzero((self.sink != _OLD) & (self.sink != expected))
        check(not len(wrong), f"{len(wrong)} wrong bytes, first at {wrong[:1]}")
        check(bool((self.source == _NEW).all()), "the source has changed")
        if status is not None and status.ok:
            check(bool((self.sink == expected).all()), "COMPLETED without all bytes")

    def _stays_quiet(self) -> None:
        """After the end, a frozen target that thaws changes nothing any more (its quiesced status said so)."""
        before = self.sink.copy()
        self._thaw()
        time.sleep(0.005)
        check(bool((self.sink == before).all()), "bytes moved after the end")

    def _afterwards(self) -> None:
        """The survivor works on: with the victim when it lives, with the next instance on its port when not."""
        if self.plan.event == "pause" and not self.plan.victim_initiates:
            self.victim.call("counts")  # disarms
            time.sleep(0.1)  # peer_rest_s
            self._again(self.victim, self.base, self.there)
        if self.plan.event == "restart":
            self.victim.kill()
            port = int(self.victim.address.rsplit(":", 1)[1])
            heir, base, there = self._victim(port)
            time.sleep(0.01)
            check(bool((there == _OLD).all()), "the next instance was written to")
            self._again(heir, base, there)

    def _again(self, victim: Victim, base: int, there: np.ndarray) -> None:
        there[:4096] = 0
        self.survivor.memory[:4096] = 77
        segment = self.engine.open_segment(victim.address, instance_id=victim.instance_id)
        self.engine.transfer_sync([TransferRequest(Opcode.WRITE, self.survivor.at, segment, base, 4096)], 5.0)
        check(bool((there[:4096] == 77).all()), "wrong bytes afterwards")
        self.engine.close_segment(segment)

    def _settled(self) -> None:
        """The dead hold nothing of ours: no connection, no region."""
        region = next(r for r in self.engine.memory.regions() if r.address == self.survivor.at)
        until = time.monotonic() + 3.0
        while time.monotonic() < until and (region.uses or self.engine.stats()["open_connections"] > 1):
            time.sleep(0.001)
        check(region.uses == 0, "memory is still held for a dead peer")
        check(self.engine.stats()["open_connections"] <= 1, "connections of a dead peer are still open")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--keep-going", action="store_true", help="report bad seeds and go on")
    parser.add_argument("--slower-than-s", type=float, default=0.0, help="name seeds that take longer")
    options = parser.parse_args(argv)
    bad = 0
    began = time.monotonic()
    with Chaos() as chaos:
        for seed in range(options.first, options.first + options.seeds):
            started = time.monotonic()
            try:
                chaos.run(seed)
                if options.slower_than_s and time.monotonic() - started > options.slower_than_s:
                    print(f"seed {seed}: {time.monotonic() - started:.2f} s: {Plan.of(seed)}"[:200], flush=True)
            except Exception as error:
                bad += 1
                print(f"seed {seed}: {error!r}\n  {Plan.of(seed)}", flush=True)
                if not options.keep_going:
                    raise
        took = time.monotonic() - began
        print(
            f"{options.seeds} seeds in {took:.1f} s, {chaos.fired} hit in the middle, {bad} bad: {dict(chaos.outcomes)}"
        )
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
