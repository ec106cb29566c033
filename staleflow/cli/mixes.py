"""``staleflow plan`` with a target or a budget: the search over mixes of engine kinds, and its table."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from staleflow.cli import options
from staleflow.configs.errors import ConfigError

if TYPE_CHECKING:
    from staleflow.configs.schema import Config
    from staleflow.sim.mixes import Found, Goal, Point

MIX_OPTIONS = ("most",)
"""Options that apply to this search only."""
SHOWN = 8
"""Rows of the table."""


def goal_of(config: "Config", per_min: float | None, hours: float | None, budget: float | None) -> "Goal | None":
    """Return the goal that one of the options sets; None without any. Raise ``ConfigError`` for two of them."""
    from staleflow.sim.mixes import Goal

    given = {"--target-steps-per-min": per_min, "--target-hours": hours, "--budget": budget}
    chosen = [name for name, value in given.items() if value is not None]
    if len(chosen) > 1:
        raise ConfigError(chosen[1], given[chosen[1]], f"one goal: leave it out, or {chosen[0]}")
    steps = config.trainer.steps
    if hours is not None:
        return Goal(steps=steps, steps_per_min=steps / (60.0 * hours))
    if per_min is not None:
        return Goal(steps=steps, steps_per_min=per_min)
    return None if budget is None else Goal(steps=steps, budget=budget)


def maximum(most: Sequence[str]) -> dict[str, int]:
    """Parse ``KIND=N`` options."""
    counts: dict[str, int] = {}
    for text in most:
        kind, equals, count = text.partition("=")
        if not (equals and count.isascii() and count.isdigit()):
            raise ConfigError("--max", text, "must be KIND=N, for example h20=16")
        counts[kind] = int(count)
    return counts


def run(config: "Config", goal: "Goal", most: Sequence[str], jobs: int, *, as_json: bool) -> int:
    """Search, and print the mixes that were simulated."""
    from staleflow.cli.progress import bar
    from staleflow.sim.mixes import MAX_SIMULATIONS, search

    with bar("simulating", quiet=as_json) as update:
        found = search(
            config,
            goal,
            maximum(most),
            jobs=jobs,
            on_progress=lambda simulated: update(simulated, MAX_SIMULATIONS, f"{simulated} mixes simulated"),
        )
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(found).decode())
    else:
        show(found, config)
    return 0


def show(found: "Found", config: "Config") -> None:
    """Print the best mixes and what they cost."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from staleflow.sim.mixes import MAX_SIMULATIONS, fleet_override, named

    goal = found.goal
    wanted = f"at most {goal.budget:g}" if goal.budget else f"at least {goal.steps_per_min:.4g} steps/min"
    table = Table(box=box.ROUNDED, title=f"{config.name}: {goal.steps:,} steps, {wanted}")
    for name in ("engines", "steps/min", "hours", "cost/step", "cost", ""):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for point in found.simulated[:SHOWN]:
        table.add_row(named(found.kinds, point.counts), *_cells(point, goal), _remark(point, found))
    console = Console(highlight=False)
    console.print(table)
    ruled_out = found.mixes - len(found.simulated)
    console.print(f"{len(found.simulated)} of {found.mixes:,} mixes simulated; bounds rule the other {ruled_out:,} out")
    if not found.complete:
        console.print(f"the search ended after {MAX_SIMULATIONS} simulations: a better mix may exist")
    console.print(f"\n{fleet_override(found.kinds, found.best.counts)}", soft_wrap=True, markup=False)


def _cells(point: "Point", goal: "Goal") -> tuple[str, str, str, str]:
    if not point.steps_per_min:
        return "stalls", "-", "-", "-"
    hours = goal.steps / point.steps_per_min / 60.0
    cost = point.cost_per_step
    return f"{point.steps_per_min:.3f}", f"{hours:,.2f}", f"{cost:,.4g}", f"{cost * goal.steps:,.4g}"


def _remark(point: "Point", found: "Found") -> str:
    if point is found.best:
        return "fastest" if found.goal.budget else "cheapest"
    return "" if found.goal.met(point) else "too dear" if found.goal.budget else "too slow"


def refuse_search_options() -> None:
    """Raise ``ConfigError`` for options of the other searches."""
    options.refuse(
        "a target or a budget searches mixes of engines under the configuration's bound: leave it out", "etas"
    )
    options.refuse(
        "a target or a budget takes the kinds of simulation.fleet: leave it out; --max limits them", "devices"
    )
