"""A pytest plugin that runs marked tests in another process, where RDMA devices are, and reports them as if they ran here.

    pytestmark = [pytest.mark.slow, pytest.mark.elsewhere("vm")]    in the virtual machine with soft-RoCE NICs (vm.py)
    pytestmark = pytest.mark.elsewhere("fake")                      in a process with the verbs provider of fakeverbs.c

All selected tests of one place run in ONE pytest there, when the first of them is due; each keeps its name, its text of
failure and its duration, and -k, -m and node ids select as ever. Where a place cannot be had its tests are skipped with the reason.

Knows: pytest's hooks, carrying reports over. Does not know: what the places are (places.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rdma.places import PLACES, Ended

_PLACE, _REPORTS = "MOONCAKE_TEST_PLACE", "MOONCAKE_TEST_REPORTS"

_Results = dict[str, list[pytest.TestReport]]
_results_key = pytest.StashKey[dict[str, "_Run"]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "elsewhere(place): runs where RDMA devices are: 'vm' or 'fake' (tests/rdma)")
    config.stash[_results_key] = {}


def _place_of(item: pytest.Item) -> str:
    mark = item.get_closest_marker("elsewhere")
    return mark.args[0] if mark is not None else ""


class _Run:
    """What one place said. `why_not`: it could not be had; `ended`: how it ended, and its last words."""

    def __init__(self, place: str, items: list[pytest.Item]) -> None:
        self.results: _Results = {}
        self.why_not = PLACES[place].unavailable()
        self.ended = Ended(0, "")
        if not self.why_not:
            self._config = items[0].config
            names = [item.nodeid for item in items]
            environment = {_PLACE: place}
            self.ended = PLACES[place].run(names, environment, _REPORTS, self._take)

    def _take(self, line: str) -> None:
        data = json.loads(line)
        report = self._config.hook.pytest_report_from_serializable(config=self._config, data=data)
        if isinstance(report.longrepr, list):  # a skip's (file, line, reason): JSON knows no tuples
            report.longrepr = tuple(report.longrepr)
        self.results.setdefault(report.nodeid, []).append(report)


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    place = _place_of(item)
    if not place or os.environ.get(_PLACE) == place:
        return None
    runs = item.config.stash[_results_key]
    if place not in runs:
        runs[place] = _Run(place, [other for other in item.session.items if _place_of(other) == place])
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports(item, runs[place]):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # The test before this one kept what the two share (their module's fixtures); what comes next may not share it.
    item.session._setupstate.teardown_exact(nextitem)
    return True


def _reports(item: pytest.Item, run: _Run) -> list[pytest.TestReport]:
    if run.why_not:
        return [_made(item, "skipped", (str(item.path), 0, f"Skipped: {run.why_not}"))]
    found = run.results.get(item.nodeid, [])
    if [report.when for report in found][-1:] == ["teardown"]:
        return found
    tail, run.ended = run.ended.tail, run.ended._replace(tail="(its last words stand at the first such test)")
    return [*found, _made(item, "failed", f"no end of this test was reported: status {run.ended.status}\n{tail}")]


def _made(item: pytest.Item, outcome: Any, text: Any) -> pytest.TestReport:
    return pytest.TestReport(item.nodeid, item.location, dict.fromkeys(item.keywords, 1), outcome, text, "call")


# --- on the other side ----------------------------------------------------------------------------------------------


class Reporter:
    """Writes every report as a line of JSON, at once: what was said before a crash counts."""

    def __init__(self, config: pytest.Config, write: Callable[[str], object]) -> None:
        self._config, self._write = config, write

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._write(json.dumps(data) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    path = os.environ.get(_REPORTS)
    if path:
        stream = Path(path).open("a", buffering=1)  # noqa: SIM115
        session.config.pluginmanager.register(Reporter(session.config, stream.write))
