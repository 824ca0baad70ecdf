"""Where built models live, and how one is built once.

Knows: the cache folder and the atomic build. Does not know: any model.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/mooncake/models`, by default under `~/.cache`. Not created here."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "mooncake" / "models"


def build_once(target: Path, build: Callable[[Path], object]) -> Path:
    """Return `target`, calling `build(empty_folder)` first if it is missing.

    The folder appears under its name only when complete, so a killed build leaves nothing that looks like a model, and
    of two processes that build at the same time the later one throws its copy away.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        build(scratch)
        scratch.chmod(0o755)
        scratch.rename(target)
    except OSError:
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target
