"""Turn the formulas of a page into MathML, which browsers draw without a script or a font."""

import html
import re

from latex2mathml.converter import convert

_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
_DISPLAY = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)


def on_page_content(content: str, **_: object) -> str:
    """Replace the formulas that arithmatex has marked."""
    content = _INLINE.sub(lambda found: convert(html.unescape(found[1])), content)
    return _DISPLAY.sub(
        lambda found: (
            f'<div class="formula">{convert(html.unescape(found[1]), display="block")}</div>'
        ),
        content,
    )
