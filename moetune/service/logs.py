"""The service's log: one line a record, as text or JSON."""

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]
LOGGERS = ("moetune", "uvicorn", "asyncio")
_REQUEST = "{method} {path} {status} {seconds} s {client} {request_id}"


def start_logging(kind: LogFormat, *, level: int) -> None:
    """Configure the log of this process to go to stderr; `serve` calls it once."""
    # None of these is logged, and finding them takes a tenth of the time of a stored plan's answer.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines(kind))
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


class Lines(logging.Formatter):
    """A line for each record: an object of JSON, or time, level and words.

    A record's `fields` are keys next to its message, or the words in its place.
    """

    def __init__(self, kind: LogFormat) -> None:
        super().__init__()
        self._kind = kind

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields: Mapping[str, object] = getattr(record, "fields", {})
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        time, level = moment.replace("+00:00", "Z"), record.levelname.lower()
        traceback = self.formatException(record.exc_info) if record.exc_info else ""
        if self._kind == "json":
            names = {"time": time, "level": level, "logger": record.name}
            more = {"traceback": traceback} if traceback else {}
            return json.dumps({**names, "message": record.getMessage(), **fields, **more})
        words = _REQUEST.format_map(fields) if fields else record.getMessage()
        return f"{time} {level:7} {words}" + (f"\n{traceback}" if traceback else "")
