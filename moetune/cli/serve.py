"""`moetune serve`: the HTTP service for a team."""

import logging
import sys
from pathlib import Path
from typing import Any

from moetune.cli.commands import Between, command, option
from moetune.cli.session import Session
from moetune.domain.units import parse_bytes, parse_seconds


@command(
    "moetune serve --port 8642",
    option("--host", "Address to listen on; without a token only loopback.", default="127.0.0.1"),
    option("--port", "0 for a free port.", Between(0, 65535), default=8642),
    option("--read-token-file", "Token for reading, in a file that only you can read.", Path),
    option("--write-token-file", "Token for reading and writing, in such a file.", Path),
    option(
        "--allow-host allow_hosts",
        "Also accept this Host name; can be repeated.",
        form="NAME",
        multiple=True,
    ),
    option("--tls-cert", "Certificate chain, for https.", Path),
    option("--tls-key", "Its key.", Path),
    option("--log-format", "Of the log on stderr.", ("text", "json"), default="text"),
    option("--max-body max_body_bytes", "Largest body of a request.", parse_bytes, default="4MiB"),
    option(
        "--deadline deadline_seconds",
        "Longest that one question is solved for.",
        parse_seconds,
        default="20s",
    ),
)
def serve(
    session: Session,
    **options: Any,  # noqa: ANN401 - of `ServerOptions`, which have several types
) -> None:
    """Serve the store to a team: API and pages."""
    from moetune.service import server

    level = logging.WARNING if session.quiet else logging.INFO

    def ready(url: str, location: str) -> None:
        session.screen.result({"schema": "moetune.serve/1", "url": url, "location": location})
        sys.stdout.flush()
        session.screen.note(f"moetune serves {url} (database {location})")

    server.serve(session.settings, server.ServerOptions(level=level, **options), ready=ready)
