"""Run the command line in this process, as the program does."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.documents import read_document


@dataclass(frozen=True, kw_only=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on stdout, of the form that its schema says."""
        found = read_document(self.out)
        assert isinstance(found, dict)
        return found


Cli = Callable[..., Result]
Planned = Callable[..., dict[str, Any]]
"""Takes a file and the flags of `moetune plan`: writes the plan, and returns its document."""
