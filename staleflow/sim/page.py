"""One HTML page about simulated runs: the table and the picture, in a single file."""

from collections.abc import Sequence
from html import escape

from staleflow.sim.compare import COLUMNS, NOTE
from staleflow.sim.result import Result

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 14px/1.4 system-ui, sans-serif; margin: 1.5rem; color: #222; background: #fff; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; }}
th, td {{ padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: right; }}
td {{ font-variant-numeric: tabular-nums; }}
th:first-child, td:first-child {{ text-align: left; white-space: nowrap; }}
th {{ vertical-align: bottom; }}
.bad {{ color: #b00; font-weight: bold; }}
svg {{ width: 100%; height: auto; max-width: 1300px; }}
</style>
</head>
<body>
<h1>{title}</h1>
<div class="wide"><table>
<tr>{head}</tr>
{rows}
</table></div>
<p>{note}</p>
{picture}
</body>
</html>
"""


def page(results: Sequence[Result], picture: str) -> str:
    """Return the page. ``picture`` is an svg element, inserted unchanged."""
    title = "Simulated runs" if len(results) > 1 else f"{results[0].name}, simulated"
    return _PAGE.format(
        title=escape(title),
        head="".join(f"<th>{escape(name)}</th>" for name in ("", *(name for name, _ in COLUMNS))),
        rows="\n".join(_row(result) for result in results),
        note=escape(NOTE),
        picture=picture,
    )


def _row(result: Result) -> str:
    cells = "".join(_cell(name, text(result), result) for name, text in COLUMNS)
    return f"<tr><td>{escape(result.name)}</td>{cells}</tr>"


def _cell(name: str, text: str, result: Result) -> str:
    bad = ' class="bad"' if name == "violations" and result.violations else ""
    return f"<td{bad}>{escape(text)}</td>"
