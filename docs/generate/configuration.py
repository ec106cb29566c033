"""The configuration reference: one row for each key."""

import re
from collections.abc import Iterator

from docs.generate.made import MADE
from staleflow.configs.costs import Costs
from staleflow.configs.loading.describe import Key, Table, tables
from staleflow.configs.section import MOST


def configuration() -> Iterator[str]:
    yield "# Configuration"
    yield ""
    yield MADE
    yield ""
    yield "All configuration keys, generated from the schema. `staleflow explain KEY` prints the same in a terminal."
    yield "For an unknown key or a value that is not allowed, staleflow prints one line with the allowed values, exits"
    yield f"with code 2 and starts nothing. The upper limit of numbers is {MOST} unless stated; strings are printable"
    yield "and of one line. Tables of `options`, which are passed to your own code, may contain any TOML value except"
    yield "dates."
    yield ""
    for table in tables():
        yield from _table(table)


SHIPPED = "bench/results/2026-11-2-cores-costs.toml"


def costs() -> Iterator[str]:
    """The reference of the cost file."""
    yield "# The cost file of the simulator"
    yield ""
    yield MADE
    yield ""
    yield "```sh"
    yield "python -m bench.costs costs.toml      # measures this machine, in some minutes; or use a file that is here:"
    yield f"staleflow simulate configs/skewed.toml simulation.costs={SHIPPED} simulation.model_gib=3.0"
    yield "```"
    yield ""
    yield "Without a cost file, the simulator charges the values of `[simulation]`, `[rollout.simulated]` and"
    yield "`trainer.simulated_step_s`; scheduler, trajectory servers, wire, publishing and checkpoints take no time."
    yield "With one, each of its tables is charged. Every table is optional; a value that is not given is 0. The rules"
    yield "of other systems (`--compare`) pay for engines, weights, rewards, trainer and checkpoints, but for no"
    yield "scheduler, trajectory server or wire, and never overlap publishing. Relays, and engines that share one link,"
    yield "are not modelled: each pull takes the same time."
    yield ""
    for table in tables(Costs):
        if table.name:
            yield from _table(table)


def _table(table: Table) -> Iterator[str]:
    name = table.name or "top of the file"
    yield f"## `[[{name}]]`" if table.many else f"## `[{name}]`" if table.name else f"## {name.capitalize()}"
    yield ""
    yield _markdown(table.description)
    yield ""
    if not table.keys:
        return
    yield "| key | allowed | default | |"
    yield "|---|---|---|---|"
    for key in table.keys:
        yield _row(key)
    yield ""


def _row(key: Key) -> str:
    default = f"`{key.default}`" if key.default else "must be set"
    allowed = re.sub(r'"([^"]*)"', r'`"\1"`', key.allowed)
    cells = (f"`{key.name}`", allowed, default, _markdown(key.description).replace("\n\n", " "))
    return f"| {' | '.join(cells)} |"


def _markdown(text: str) -> str:
    """Convert the double backquotes of docstrings to Markdown's single ones."""
    return text.replace("``", "`")
