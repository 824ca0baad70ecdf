"""A node's manifest by events."""

from __future__ import annotations

import pytest

from store.extents import Extent
from store.node.manifest import BROKEN, BUSY, FULL, OK, REFUSED, Entry, Intervals, Manifest, OpenPut

BASE = 4096


def entry(version: int, *extents: tuple[int, int]) -> Entry:
    placed = tuple(Extent(BASE + at, n) for at, n in extents)
    return Entry(bytes([version]) * 16, version, sum(e.length for e in placed), placed)


def open_put(put_id: int, *objects: Entry, ends_s: float = 10.0) -> OpenPut:
    return OpenPut(put_id, 1000 + put_id, "w:1", "w-life", objects, ends_s)


@pytest.fixture
def manifest() -> Manifest:
    manifest = Manifest(BASE, 4096, put_grace_s=5.0, max_open_puts=4)
    manifest.report(0.0, 1)
    return manifest


def write(manifest: Manifest, put_id: int, *objects: Entry) -> None:
    assert manifest.begin(0.0, manifest.mount, open_put(put_id, *objects)) == (OK, [])
    assert manifest.end(manifest.mount, put_id, [True] * len(objects), quiesced=True) == OK


def test_written_objects_are_held(manifest: Manifest) -> None:
    put = open_put(1, entry(1, (0, 100)), entry(2, (256, 100), (1024, 50)))
    assert manifest.begin(0.0, 1, put) == (OK, [])
    assert manifest.report(0.0, 1) == ([], [((*put.objects[0].extents, *put.objects[1].extents), 10.0)])
    assert manifest.end(1, 1, [False, True], quiesced=True) == OK
    assert manifest.report(0.0, 1) == ([put.objects[1]], [])


def test_begin_forgets_what_it_overwrites(manifest: Manifest) -> None:
    write(manifest, 1, entry(1, (0, 256)), entry(2, (256, 256)), entry(3, (512, 256)))
    assert manifest.begin(0.0, 1, open_put(2, entry(4, (300, 10)), entry(5, (767, 10)))) == (OK, [])
    assert list(manifest.entries) == [1]
    assert manifest.end(1, 2, [False, False], quiesced=True) == OK
    assert list(manifest.entries) == [1], "what was overwritten does not come back"


def test_an_older_report_counts_no_more(manifest: Manifest) -> None:
    assert manifest.begin(0.0, 1, open_put(1, entry(1, (0, 256))))[0] == OK
    assert manifest.report(4.0, 2) == ([], [((Extent(BASE, 256),), 6.0)])
    assert manifest.begin(4.0, 1, open_put(2, entry(2, (512, 256))))[0] == REFUSED
    assert manifest.end(1, 1, [True], quiesced=True) == REFUSED
    assert manifest.report(4.0, 3) == ([], []), "but its writer has stopped"


def test_an_older_writer_is_fenced_first(manifest: Manifest) -> None:
    first = open_put(1, entry(1, (0, 256)))
    assert manifest.begin(0.0, 1, first)[0] == OK
    second = open_put(2, entry(2, (0, 128), (512, 8)))
    assert manifest.begin(14.0, 1, second) == (BUSY, [first])
    manifest.forget_open(1)
    assert manifest.begin(14.0, 1, second) == (OK, [])
    assert manifest.end(1, 1, [True], quiesced=True) == REFUSED


def test_a_silent_writer_is_forgotten_after_its_grace(manifest: Manifest) -> None:
    manifest.begin(0.0, 1, open_put(1, entry(1, (0, 256))))
    assert manifest.report(14.9, 1)[1][0][1] == pytest.approx(-4.9)
    assert manifest.begin(15.1, 1, open_put(2, entry(2, (0, 256))))[0] == OK


def test_not_quiesced(manifest: Manifest) -> None:
    put = open_put(1, entry(1, (0, 256)), entry(2, (256, 256)))
    manifest.begin(0.0, 1, put)
    assert manifest.end(1, 1, [True, False], quiesced=False) == OK
    assert list(manifest.entries) == [1]
    assert manifest.begin(0.0, 1, open_put(2, entry(3, (256, 8))))[0] == BUSY


@pytest.mark.parametrize(
    "objects",
    [
        (Entry(b"k" * 16, 9, 7, (Extent(BASE, 8),)),),
        (entry(9, (4090, 10)),),
        (entry(9, (-1, 10)),),
        (entry(9, (0, 10), (5, 10)),),
        (entry(8, (0, 10)), entry(9, (9, 1))),
        (entry(9),),
        (entry(9, (0, 0)),),
        (entry(7, (0, 10)),),
    ],
)
def test_nonsense_is_refused(manifest: Manifest, objects: tuple[Entry, ...]) -> None:
    write(manifest, 1, entry(7, (2048, 8)))
    assert manifest.begin(0.0, 1, open_put(2, *objects)) == (BROKEN, [])
    assert list(manifest.entries) == [7] and not manifest.open_puts


def test_bounded(manifest: Manifest) -> None:
    for n in range(4):
        assert manifest.begin(0.0, 1, open_put(n, entry(n + 1, (n * 256, 1))))[0] == OK
    assert manifest.begin(0.0, 1, open_put(9, entry(9, (2048, 1))))[0] == FULL


def test_intervals() -> None:
    intervals = Intervals()
    for start, length, owner in ((0, 10, 1), (10, 5, 2), (20, 5, 1)):
        intervals.add(Extent(start, length), owner)
    assert intervals.owners(Extent(9, 2)) == {1, 2}
    assert intervals.owners(Extent(15, 5)) == set()
    assert intervals.owners(Extent(19, 100)) == {1}
    intervals.remove(Extent(10, 5))
    assert intervals.owners(Extent(0, 100)) == {1}
