"""Packages that only some commands need, and the extra of moetune that brings each."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from moetune.domain.errors import MissingPackageError

EXTRAS: Mapping[str, str] = {
    "torch": "train",
    "transformers": "transformers",
    "accelerate": "transformers",
    "safetensors": "transformers",
    "fastapi": "serve",
    "httptools": "serve",
    "prometheus_client": "serve",
    "uvicorn": "serve",
    "jinja2": "report",
    "psycopg": "postgres",
}
"""Extra by the name that Python imports; `pyproject.toml` lists the distributions."""


@contextmanager
def needed_by(what: str) -> Iterator[None]:
    """Turn a missing package into an error with the line that installs it.

    Args:
        what: the subject of the message, such as "the service".

    Raises:
        MissingPackageError: a package of an extra cannot be imported.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        raise MissingPackageError(
            f"{what} needs {package}, which is not installed",
            f"run `pip install 'moetune[{EXTRAS[package]}]'`",
        ) from None
