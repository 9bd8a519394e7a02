"""A figure as an SVG file of its own, in the light colours of the theme."""

import re
from html import escape

from moetune.report.html import STATIC
from moetune.report.section import Figure
from moetune.report.svg import drawing_of, legend

_WIDTH, _ROW, _MARGIN = 720, 18, 12
_LIGHT = re.compile(r"(--\w+): light-dark\((#\w+),")
_LOOKS = """\
text { font: 12px sans-serif }
.tick { fill: var(--muted) }
.head { fill: var(--ink); font-weight: 600 }
.name { fill: var(--ink) }
.grid { stroke: var(--grid) }
.lines { overflow: visible }
.line { fill: none; stroke-linejoin: round; vector-effect: non-scaling-stroke }
.mark { font-size: 11px }
"""


def svg_file(figure: Figure) -> str:
    """Return the figure with its title, legend and drawing as the text of an SVG file.

    Raises:
        ValueError: a colour is no role of the theme.
    """
    colors = dict(_LIGHT.findall((STATIC / "moetune.css").read_text(encoding="utf-8")))
    drawing, names = drawing_of(figure), legend(figure)
    down, parts = 2 * _ROW, []
    for name, swatch in names.items():
        parts.append(f'<svg x="{_MARGIN}" y="{down - 10}" width="18" height="12">{swatch}</svg>')
        parts.append(f'<text x="{_MARGIN + 24}" y="{down}" class="name">{escape(name)}</text>')
        down += _ROW
    left, height = drawing.left + _MARGIN, drawing.height
    area = _WIDTH - left - 2 * _MARGIN
    text = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" '
        f'height="{down + height + _ROW:g}">'
        f"<title>{escape(figure.words)}</title>"
        f"<style>{_LOOKS}</style>"
        f'<rect width="100%" height="100%" fill="var(--surface)"/>'
        f'<text x="{_MARGIN}" y="{_ROW}" class="head">{escape(figure.title)}</text>{"".join(parts)}'
        f'<text x="{_MARGIN}" y="{down}" class="tick">{escape(figure.panels[0].y.title)}</text>'
        f'<svg x="{_MARGIN}" y="{down}" width="{drawing.left:g}" height="{height:g}" '
        f'overflow="visible">{drawing.labels}</svg>'
        f'<svg x="{left:g}" y="{down}" width="{area:g}" height="{height:g}" overflow="visible">'
        f"{drawing.area}</svg></svg>\n"
    )
    return re.sub(r"var\((--\w+)\)", lambda match: colors[match[1]], text)
