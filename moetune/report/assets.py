"""The files a browser needs: plotly.js from the installed package, and this project's own."""

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from moetune.domain.errors import MoetuneError

FOLDER = Path(__file__).resolve().parent
STATIC = FOLDER / "static"
_VERSION = re.compile(r"plotly\.js v([0-9.]+)")
_INJECTED = re.compile(
    r'getElementById\("([0-9a-f]{64})"\)\)\{var \w+=document\.createElement\("style"\)'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotlyScript:
    """plotly.js of the installed package.

    Args:
        injected_styles: ids of elements that keep it from adding an inline `<style>` when it is
            loaded, which a Content-Security-Policy forbids: of maps, which are not drawn here.
    """

    file: Path
    version: str
    injected_styles: tuple[str, ...]


def plotly_script() -> PlotlyScript:
    """Return where plotly.js is; Python's part of the package is not loaded.

    Raises:
        MoetuneError: plotly is not installed.
    """
    found = find_spec("plotly")
    places = (found.submodule_search_locations or []) if found else []
    files = [Path(place) / "package_data" / "plotly.min.js" for place in places]
    file = next((one for one in files if one.is_file()), None)
    if file is None:
        raise MoetuneError(
            "figures need plotly, which is not installed", "pip install 'moetune[report]'"
        )
    text = file.read_text(encoding="utf-8")
    version = _VERSION.search(text[:200])
    return PlotlyScript(
        file=file,
        version=version[1] if version else "0",
        injected_styles=tuple(dict.fromkeys(_INJECTED.findall(text))),
    )
