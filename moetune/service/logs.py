"""The service's log: one line a record, as text or JSON, and repeats of a warning counted."""

import json
import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]
LOGGERS = ("moetune", "uvicorn", "asyncio")


def start_logging(kind: LogFormat, *, level: int) -> None:
    """Configure the log of this process to go to stderr; `serve` calls it once."""
    # None of these is logged, and finding them takes a tenth of the time of a stored plan's answer.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if kind == "json" else TextLines())
    handler.addFilter(RepeatFilter())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


class JsonLines(logging.Formatter):
    """One JSON object per line; a record's `fields` are keys next to its message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class TextLines(logging.Formatter):
    """Time, level and message; a request's fields in one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = _fields(record)
        words = _request(fields) if fields else record.getMessage()
        line = f"{_time(record)} {record.levelname.lower():7} {words}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _request(fields: Mapping[str, object]) -> str:
    return "{method} {path} {status} {seconds} s {client} {request_id}".format_map(fields)


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields: Mapping[str, object] = getattr(record, "fields", {})
    return fields


_SHOWN = 5
_PERIOD_SECONDS = 10.0


@dataclass(slots=True)
class _Count:
    since: float
    number: int = 0


@dataclass(slots=True, eq=False)
class RepeatFilter(logging.Filter):
    """Lets the first five warnings or errors of one place pass in ten seconds.

    The next one behind the period says how many were left out. Requests are not counted.
    """

    _counts: dict[tuple[str, str], _Count] = field(default_factory=dict)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written."""
        if record.levelno < logging.WARNING:
            return True
        place, now = (record.name, str(record.msg)), time.monotonic()
        count = self._counts.setdefault(place, _Count(since=now))
        if now - count.since >= _PERIOD_SECONDS:
            left_out = count.number - _SHOWN
            count.since, count.number = now, 0
            if left_out > 0:
                record.msg = f"{record.getMessage()} (and {left_out:,} more like it)"
                record.args = None
        count.number += 1
        return count.number <= _SHOWN
