"""Plain pictures of boxes, arrows and words, in colours for light and dark pages."""

import math
from collections.abc import Iterable
from xml.sax.saxutils import escape

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #222 }
.small { font-size: 11px; fill: #666 }
.bold { font-weight: 600 }
.middle { text-anchor: middle }
.end { text-anchor: end }
.line { stroke: #888; fill: none; stroke-width: 1.3 }
.dotted { stroke: #888; fill: none; stroke-width: 1.6; stroke-dasharray: 2 4 }
.empty { fill: none; stroke: #bbb; stroke-dasharray: 3 3 }
.box { fill: #f4f4f6; stroke: #999 }
.leased { fill: #fff; stroke: #3b6ea5; stroke-width: 1.6 }
.occupied { fill: #3b6ea5; stroke: #3b6ea5 }
.pinned { fill: #fff; stroke: #c0392b; stroke-width: 2.4 }
.sealed { fill: #8a8f98; stroke: #8a8f98 }
.on { fill: #fff }
.v0 { fill: #3b6ea5 } .v1 { fill: #c77f2a } .v2 { fill: #4d8b57 } .v3 { fill: #8e5ea2 } .v4 { fill: #b5495b }
@media (prefers-color-scheme: dark) {
  text { fill: #ddd } .small { fill: #aaa } .box { fill: #2b2d33; stroke: #777 }
  .leased, .pinned { fill: #1e2029 } .empty { stroke: #555 }
}
"""


def picture(width: int, height: int, parts: Iterable[str], title: str) -> str:
    """Return a whole SVG file; screen readers read ``title`` aloud."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
    return "\n".join((head, f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", *parts, "</svg>")) + "\n"


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"/>'


def words(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path class="line" d="M{x1:g} {y1:g}L{x2:g} {y2:g}"/>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """Return a straight arrow, horizontal or downwards."""
    dx, dy = (6, 4) if y1 == y2 else (4, 6)
    wings = f"M{x2 - dx:g} {y2 - dy:g}L{x2:g} {y2:g}"
    wings += f"L{x2 - dx:g} {y2 + dy:g}" if y1 == y2 else f"L{x2 + dx:g} {y2 - dy:g}"
    return f'<path class="line" d="M{x1:g} {y1:g}L{x2:g} {y2:g}{wings}"/>'


def pointer(x1: float, y1: float, x2: float, y2: float, kind: str = "line") -> str:
    """An arrow in any direction; ``kind`` is the style of its shaft."""
    angle = math.atan2(y2 - y1, x2 - x1)
    wings = [(x2 - 8 * math.cos(angle + turn), y2 - 8 * math.sin(angle + turn)) for turn in (0.5, -0.5)]
    head = "L".join((f"{wings[0][0]:.1f} {wings[0][1]:.1f}", f"{x2:g} {y2:g}", f"{wings[1][0]:.1f} {wings[1][1]:.1f}"))
    shaft = f'<path class="{kind}" d="M{x1:g} {y1:g}L{x2:g} {y2:g}"/>'
    return f'{shaft}<path class="line" d="M{head}"/>'
