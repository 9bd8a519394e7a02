"""Log lines on stderr: for people, or one JSON object each."""

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]
LOGGERS = ("moetune", "uvicorn")


def start_logging(kind: LogFormat, *, level: int) -> None:
    """Send this process's log to stderr; called once, by the process's owner."""
    # Nothing of these is shown, and to find them takes a tenth of a known plan's answer.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if kind == "json" else TextLines())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


class JsonLines(logging.Formatter):
    """One JSON object a line; what a record carries in `fields` stands beside its message."""

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
    """The time, the level and the message; a request in one line."""

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
