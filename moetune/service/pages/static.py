"""Stylesheet, script, icon and plotly.js: files that a browser keeps until they change."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse

from moetune.domain.errors import NotFoundError
from moetune.report.html import STATIC, plotly_script

_FOR_EVER = "public, max-age=31536000, immutable"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where a page finds its files; an address changes with the file.

    Args:
        injected_styles: ids of elements that keep plotly.js from adding inline styles.
    """

    style: str
    script: str
    icon: str
    plotly: str
    injected_styles: tuple[str, ...]


def static_router() -> tuple[APIRouter, Addresses]:
    """Return the routes of the files, and their addresses.

    Raises:
        MoetuneError: plotly is not installed.
    """
    plotly = plotly_script()
    own = {name: STATIC / name for name in ("moetune.css", "moetune.js", "moetune.svg")}
    files = {**own, "plotly.min.js": plotly.file}
    marks = {name: _mark(path) for name, path in own.items()}

    def address(name: str) -> str:
        return f"/static/{name}?v={marks.get(name, plotly.version)}"

    addresses = Addresses(
        style=address("moetune.css"),
        script=address("moetune.js"),
        icon=address("moetune.svg"),
        plotly=address("plotly.min.js"),
        injected_styles=plotly.injected_styles,
    )
    return _router(files), addresses


def _router(files: Mapping[str, Path]) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get("/static/{name}")
    def static_file(name: str, v: str = "") -> FileResponse:
        if name not in files:
            raise NotFoundError(f"there is no file {name!r} of the page")
        path = files[name]
        keep = _FOR_EVER if v else "no-cache"
        return FileResponse(path, media_type=_TYPES[path.suffix], headers={"Cache-Control": keep})

    return router


def _mark(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
