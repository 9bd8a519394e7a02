"""`moetune serve`: the HTTP service for a team."""

import logging
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from moetune.cli.session import Json, example, session_of
from moetune.domain.spelling import read_flag
from moetune.domain.units import parse_bytes, parse_seconds

EPILOG = example("moetune serve --port 8642")


def serve(
    context: typer.Context,
    host: Annotated[
        str, typer.Option(help="Address to listen on; without a token only loopback.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for a free one.")] = 8642,
    read_token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Token for reading, in a file that only you can read."),
    ] = None,
    write_token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Token for reading and writing, in such a file."),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Also accept this Host name; can be repeated."),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate chain, for https.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its key.")] = None,
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="Of the log on stderr.")
    ] = "text",
    max_body: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest body of a request.")
    ] = "4MiB",
    deadline: Annotated[
        str, typer.Option(metavar="TIME", help="Longest that one question is solved for.")
    ] = "20s",
    plans_per_hour: Annotated[
        int, typer.Option(min=1, help="New plans that one client may add in an hour.")
    ] = 1_000,
    observations_per_hour: Annotated[
        int, typer.Option(min=1, help="Observed steps that one client may add in an hour.")
    ] = 200_000,
    max_store: Annotated[
        str, typer.Option(metavar="SIZE", help="Size of the store from which nothing is added.")
    ] = "10GiB",
    json: Json = False,
) -> None:
    """Serve the store to a team: API and pages."""
    session = session_of(context)
    from moetune.service import server
    from moetune.service.quotas import QuotaLimits

    options = server.ServerOptions(
        host=host, port=port,
        read_token_file=read_token_file, write_token_file=write_token_file,
        allow_hosts=tuple(allow_host or ()),
        tls_cert=tls_cert, tls_key=tls_key,
        log_format=log_format,
        level=logging.WARNING if session.quiet else logging.INFO,
        max_body_bytes=read_flag(max_body, parse_bytes, "max_body"),
        deadline_seconds=read_flag(deadline, parse_seconds, "deadline"),
        quotas=QuotaLimits(
            plans=plans_per_hour,
            observations=observations_per_hour,
            store_bytes=read_flag(max_store, parse_bytes, "max_store"),
        ),
    )  # fmt: skip

    def ready(url: str, location: str) -> None:
        if json:
            document = {"schema": "moetune.serve/1", "url": url, "location": location}
            session.screen.document(document)
            sys.stdout.flush()
        session.screen.note(f"moetune serves {url} (database {location})")

    server.serve(session.settings, options, ready=ready)
