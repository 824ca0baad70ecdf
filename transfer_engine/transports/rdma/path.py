"""Which NIC of ours and which of the peer's carry a slice: the paths to one peer and how they are (paper 3.2.2).

Knows: rails (which NIC faces which), preferred and secondary NICs, a path's rest after a failure with exponential back-off,
when it is worth another try. Does not know: verbs, clocks it was not given, slices. Not thread-safe: its owner guards it.

A path carries data only when a probe has come through (READY). One that breaks is probed again at once, while its slices
go elsewhere; only if that fails too, or if no slice got through in between, does it rest: half a second, then twice that, and so on.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Tiers = Sequence[Sequence[int]]
"""Local NICs in groups of falling preference."""


class PathState(enum.Enum):
    IDLE = "idle"
    OPENING = "opening"
    READY = "ready"
    RESTING = "resting"


@dataclass(slots=True, eq=False)
class Path:
    """One pair of NICs. `strikes`: failures in a row; `proved`: data has come through since it was opened."""

    local: int
    remote: int
    state: PathState = PathState.IDLE
    strikes: int = 0
    rest_until: float = 0.0
    proved: bool = False


@dataclass(slots=True)
class Plan:
    """What to do with a slice now: the paths that may carry it, those to open first, and whether any may become ready soon."""

    ready: list[Path] = field(default_factory=list)
    open: list[Path] = field(default_factory=list)
    pending: bool = False
    hope: bool = False
    """A path without failures is on its way."""

    @property
    def hopeless(self) -> bool:
        return not self.ready and not self.open and not self.pending


class PathTable:
    """All paths between our NICs and those of one peer. `gids` in eight groups, in the order of the NIC lists."""

    def __init__(self, local_gids: Sequence[str], remote_gids: Sequence[str], rest_s: float, rest_max_s: float) -> None:
        self._rest_s, self._rest_max_s = rest_s, rest_max_s
        self._usable = [True] * len(local_gids)
        self._ranked = [
            [Path(local, remote) for remote in rank(local, local_gids[local], remote_gids)]
            for local in range(len(local_gids))
        ]

    def all(self) -> Iterable[Path]:
        return (path for paths in self._ranked for path in paths)

    def plan(self, tiers: Tiers, now: float) -> Plan:
        """Paths of the first group that has, or may soon have, a ready one; failed paths of groups before it are probed again
        in passing. A NIC listed nowhere is not used."""
        plan = Plan()
        for tier in tiers:
            for local in tier:
                if self._usable[local]:
                    plan.hope |= self._plan_nic(local, now, plan)
            if plan.ready or plan.hope:
                return plan
        return plan

    def _plan_nic(self, local: int, now: float, plan: Plan) -> bool:
        """One NIC of ours uses one path at a time: the best that works. True when a path without failures is on its way."""
        for path in self._ranked[local]:
            match path.state:
                case PathState.READY:
                    plan.ready.append(path)
                    return False
                case PathState.OPENING:
                    plan.pending = True
                case PathState.IDLE | PathState.RESTING:
                    if path.rest_until > now:
                        continue
                    plan.open.append(path)
            if not path.strikes:
                return True
        return False

    def opening(self, path: Path) -> None:
        path.state, path.proved = PathState.OPENING, False

    def ready(self, path: Path) -> None:
        path.state = PathState.READY

    def carried(self, path: Path) -> None:
        """A slice came through."""
        path.proved, path.strikes = True, 0

    def dropped(self, path: Path) -> None:
        """Its endpoint is gone, and the network is not to blame."""
        path.state = PathState.IDLE

    def failed(self, path: Path, now: float) -> None:
        """It broke, or could not be opened."""
        path.strikes += 1
        again_at_once = path.state is PathState.READY and path.proved
        path.state = PathState.RESTING
        path.rest_until = now if again_at_once else now + self._rest_of(path.strikes)

    def _rest_of(self, strikes: int) -> float:
        return float(min(self._rest_max_s, self._rest_s * 2 ** min(strikes - 1, 30)))

    def port(self, local: int, usable: bool) -> None:
        """A NIC of ours lost or got back its link; with the link back, its paths need rest no more."""
        self._usable[local] = usable
        if usable:
            self.wake(self._ranked[local])

    def wake(self, paths: Iterable[Path] | None = None) -> None:
        """Let resting paths (all of them) be tried now."""
        for path in self.all() if paths is None else paths:
            path.rest_until = 0.0


def rank(local: int, gid: str, remote_gids: Sequence[str]) -> list[int]:
    """The peer's NICs in the order in which one of ours should use them: same subnet first (rails are often subnets of their
    own), then the one at the same place in the list, then the following ones."""
    count = len(remote_gids)
    return sorted(
        range(count), key=lambda remote: (not same_subnet(gid, remote_gids[remote]), (remote - local) % count)
    )


def same_subnet(one: str, other: str) -> bool:
    """/24 for IPv4-mapped addresses, /64 else."""
    a, b = one.split(":"), other.split(":")
    if len(a) != 8 or len(b) != 8:
        return one == other
    mapped = a[5] == b[5] == "ffff" and not any(int(group or "0", 16) for group in a[:5] + b[:5])
    return a[:7] == b[:7] and a[7][:2] == b[7][:2] if mapped else a[:4] == b[:4]
