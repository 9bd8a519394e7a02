"""Named facts: what cannot be read is "unknown" with a note, never a crash."""

from collections.abc import Callable

UNKNOWN = "unknown"


class Facts:
    """Facts under names, and notes on those that could not be read."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.notes: list[str] = []

    def read(self, name: str, reader: Callable[[], object]) -> str:
        """Record what `reader` returns under `name`; None or an error is "unknown".

        The readers reach into drivers, files and libraries of many versions: whatever one of
        them raises says only that this fact is not to be had here.
        """
        try:
            value = reader()
        except Exception as error:  # noqa: BLE001 - see above
            return self._unknown(name, f"{type(error).__name__}: {_first_line(error)}")
        if value is None:
            return self._unknown(name, "not reported here")
        self.values[name] = str(value)
        return self.values[name]

    def _unknown(self, name: str, reason: str) -> str:
        self.values[name] = UNKNOWN
        self.notes.append(f"{name} could not be read ({reason})")
        return UNKNOWN


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else "no message"
