"""One line a record, `key=value` (logfmt), so that files of many roles can be merged, grepped and parsed."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

from mooncake.common.errors import ConfigError

_LEVELS = ("debug", "info", "warning", "error")
_NEEDS_QUOTES = (" ", '"', "=", "\n", "\\")


def _value(value: object) -> str:
    text = str(value)
    if text and not any(c in text for c in _NEEDS_QUOTES):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


class LogfmtFormatter(logging.Formatter):
    """`extra={"fields": {...}}` of a logging call is appended as further keys; a traceback becomes one escaped
    value.
    """

    def __init__(self, role: str, name: str) -> None:
        super().__init__()
        self._role = role
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        pairs: list[tuple[str, object]] = [
            ("t", time),
            ("level", record.levelname.lower()),
            ("role", self._role),
            ("name", self._name),
            ("logger", record.name),
            ("msg", record.getMessage()),
        ]
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict):
            pairs.extend(fields.items())
        if record.exc_info:
            pairs.append(("exc", self.formatException(record.exc_info)))
        return " ".join(f"{key}={_value(value)}" for key, value in pairs)


def setup_logging(role: str, name: str, level: str = "info") -> None:
    """Sends every logger of this process to stderr in one format. Raises ConfigError for an unknown level."""
    if level.lower() not in _LEVELS:
        raise ConfigError(f"log_level {level!r}: choose one of {', '.join(_LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogfmtFormatter(role, name))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("etcd3aio", "httpx", "httpcore", "aiohttp.access", "asyncio"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))
    logging.getLogger("etcd3aio").setLevel(logging.ERROR)  # registry.py says once that etcd is gone
