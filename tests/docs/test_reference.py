"""The documentation says what the code says: the generated reference, links between pages, no path of a machine."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+\s+(.*)$", re.MULTILINE)
# Folders where this project's machines keep things. `/models/…` and the like are examples and fine.
_MACHINE = re.compile(r"(?<![\w.~])/(?:work|root|home|mnt|private|Users|usr/local/lib|opt|tmp/[a-z0-9_]{6,})/[\w.-]+")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """As GitHub makes them: lower case, spaces to hyphens, punctuation dropped."""
    headings = (heading.lower().replace("`", "") for heading in _HEADING.findall(prose(page)))
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in headings}


def relative_links(page: Path) -> Iterator[tuple[str, Path, str]]:
    for link in _LINK.findall(prose(page)):
        if not re.match(r"[a-z]+:", link):
            path, _, anchor = link.partition("#")
            yield link, (page.parent / path).resolve() if path else page, anchor


def test_reference_is_what_the_code_says() -> None:
    """Fails for an option or a metric that was added, changed or left without a help text: `make docs` tells which."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "gen_reference.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_connector_metric_without_a_text_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("gen_reference", ROOT / "scripts" / "gen_reference.py")
    assert spec is not None and spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    generator.connector_lines()
    monkeypatch.setattr(generator, "ROOT", tmp_path)
    (tmp_path / "prefill").mkdir()
    for call, complaint in (('add("typo_total")', "typo_total is missing in METRICS"), ("add(name)", "literal")):
        (tmp_path / "prefill" / "new.py").write_text(f"self._rt.counters.{call}\n")
        with pytest.raises(generator.MissingHelp, match=complaint):
            generator.connector_lines()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_relative_links_resolve(page: Path) -> None:
    broken = []
    for link, target, anchor in relative_links(page):
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert not broken, f"{name(page)} links to nothing with {broken}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_path_of_a_machine(page: Path) -> None:
    text = page.read_text()
    assert str(ROOT) not in text
    assert not _MACHINE.findall(text)


def test_the_checks_see_what_they_look_for(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Über `x`: a-b, c\n[here](other.md#far) ![no](image.png)\n```\n[not](a-link.md)\n```\n")
    assert [link for link, _, _ in relative_links(page)] == ["other.md#far"]
    assert anchors(page) == {"über-x-a-b-c"}
    assert _MACHINE.findall("see /home/me/x and /usr/bin/python, docs/work/x, ~/work/x") == ["/home/me"]
