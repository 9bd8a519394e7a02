"""Run the command line in this process, as the program does."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on stdout."""
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


Cli = Callable[..., Result]
Planned = Callable[..., dict[str, Any]]
"""Takes a file and the flags of `moetune plan`: writes the plan, and returns its document."""
