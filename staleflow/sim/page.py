"""One page of HTML about simulated runs, in a single file: the table, a conclusion, a legend and the picture."""

from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from staleflow.sim.compare import COLUMNS
from staleflow.sim.conclusion import LEGEND, conclusion
from staleflow.sim.result import Result


def page(results: Sequence[Result], picture: str) -> str:
    """Return the page. ``picture``: an svg element, inserted unescaped."""
    environment = Environment(loader=PackageLoader("staleflow.sim", "."), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("page.html").render(
        title="Simulated runs" if len(results) > 1 else f"{results[0].name}, simulated",
        columns=[name for name, _ in COLUMNS],
        rows=[(result, [text(result) for _, text in COLUMNS]) for result in results],
        conclusion=conclusion(results) if len(results) > 1 else [],
        legend=LEGEND,
        picture=Markup(picture),
    )
