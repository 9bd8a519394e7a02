"""The document of an error, as every command prints it with `--json`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from moetune.domain.document import UNLESS_DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorDocument:
    """An error for programs.

    Args:
        hint: the next step; empty where there is none.
        exit_code: of the command.
        plan: the document of a plan that does not fit; absent with other errors.
    """

    schema: Literal["moetune.error/1"] = "moetune.error/1"
    error: str
    hint: str
    exit_code: int
    plan: Mapping[str, object] | None = field(default=None, metadata=UNLESS_DEFAULT)
