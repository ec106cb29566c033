"""``staleflow plan``: which bound, policy and split of devices suit a workload."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from staleflow.cli import options
from staleflow.configs.errors import ConfigError

if TYPE_CHECKING:
    from staleflow.configs.schema import Config
    from staleflow.sim.plan import Choice

TRACE = "trace.jsonl"
SEARCHING = ("etas", "devices", "jobs", "as_json")
"""What only the search takes."""
NOT_PASTED = ("trainer.simulated_step_s",)
"""Overrides of a simulation that a real run has no use for."""


@click.command("plan", short_help="Search the simulator for a bound, a policy, a split of devices.")
@click.argument("source", type=options.FILE, metavar="CONFIG|RUN_DIR")
@options.overrides
@click.option("--etas", default="0,1,2,3,4", show_default=True, metavar="LIST", help="Values of max_staleness to try.")
@click.option("--devices", type=click.IntRange(min=2), metavar="N", help="Also try splits of N devices.")
@click.option("--graph", is_flag=True, help="Draw the stages of CONFIG instead, and search nothing.")
@click.option("--mermaid", is_flag=True, help="As --graph, in the notation of mermaid.")
@click.option(
    "--jobs", default=os.cpu_count() or 1, show_default="one a processor", type=click.IntRange(min=1), metavar="J"
)
@options.as_json
def command(
    source: Path,
    overrides: tuple[str, ...],
    etas: str,
    devices: int | None,
    graph: bool,
    mermaid: bool,
    jobs: int,
    as_json: bool,
) -> int:
    """Simulate CONFIG, or what RUN_DIR's trace says of a real run, under many choices; print the best ones.

    Printed is the Pareto front: nothing else that was tried is at once faster, fresher and less wasteful. Below it the
    lines to paste, and three to pick from: the freshest, the knee and the fastest. Searched are max_staleness, the
    bound, the overdue policy, composition, admission, redundancy and, with --devices, engines against trainer ranks.

    \b
    Examples:
      staleflow plan configs/skewed.toml --etas 0,1,2
      staleflow plan runs/quickstart-20261121-053000 --devices 8
      staleflow plan configs/stages.toml --graph
    """
    if graph or mermaid:
        options.refuse("a drawing searches nothing: leave it out, or --graph and --mermaid", *SEARCHING)
        return _draw(source, overrides, mermaid)
    import tempfile

    from staleflow.cli.progress import bar
    from staleflow.sim.plan import front, plan

    wanted = _etas(etas)
    with tempfile.TemporaryDirectory(prefix="staleflow-plan-") as place:
        config = _config(source, overrides, Path(place))
        with bar("simulating", quiet=as_json) as tell:
            search = plan(config, wanted, devices=devices, jobs=jobs, on_progress=lambda done, of: tell(done, of, ""))
            found = front(list(search))
    if not found:
        raise click.ClickException(
            "nothing that was tried trains a step: see staleflow simulate for one choice's reason"
        )
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(found).decode())
    else:
        show(found, config, devices)
    return 0


def _draw(source: Path, overrides: tuple[str, ...], mermaid: bool) -> int:
    from staleflow.cli import graph
    from staleflow.configs.loading.load import load, read_run

    if source.is_dir() and overrides:
        raise ConfigError("override", overrides[0], "a run has its configuration already")
    config = read_run(source) if source.is_dir() else load(source, overrides)
    click.echo(graph.mermaid(config) if mermaid else graph.text(config))
    return 0


def _etas(text: str) -> list[int]:
    try:
        wanted = [int(part) for part in text.split(",")]
    except ValueError:
        wanted = [-1]
    if min(wanted) < 0:
        raise ConfigError("--etas", text, "whole numbers from 0 on, with commas between them")
    return wanted


def _config(source: Path, overrides: tuple[str, ...], place: Path) -> "Config":
    """The configuration to be searched round; of a run directory with what its trace says."""
    from staleflow.configs.loading.load import load, read_run

    if not source.is_dir():
        return load(source, overrides)
    from staleflow.sim.compare import changed
    from staleflow.sim.measured import LENGTHS, measure

    run = read_run(source)
    return changed(run, (*measure(source / TRACE).overrides(place / LENGTHS), *overrides))


def show(found: "list[Choice]", config: "Config", devices: int | None) -> None:
    """Print the front, the overrides of each choice, and three to pick from."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from staleflow.sim.plan import picks

    table = Table(box=box.ROUNDED, title=f"{config.name}: {len(found)} choices that nothing else beats")
    for name in ("", "steps/min", "of the trainer", "staleness mean / max", "tokens wasted", "length bias", "pick"):
        table.add_column(name, justify="left" if name == "pick" else "right", no_wrap=name in ("", "steps/min", "pick"))
    chosen = picks(found)
    for number, one in enumerate(found, start=1):
        table.add_row(
            str(number),
            f"{one.steps_per_min:.3f}",
            f"{one.of_limit:.1%}" if one.of_limit else "-",
            f"{one.staleness_mean:.2f} / {one.staleness_max}",
            f"{one.waste:.1%}",
            f"{one.length_bias:.3f}",
            ", ".join(name for name, pick in chosen.items() if pick is one),
        )
    console = Console(highlight=False)
    console.print(table)
    for number, one in enumerate(found, start=1):
        console.print(f"{number}:  {'  '.join(_pasted(one, config, devices))}", soft_wrap=True, markup=False)
    for name, one in chosen.items():
        console.print(f"\n{name} ({found.index(one) + 1}): {_why(name)}", style="bold", markup=False)
        for line in _pasted(one, config, devices):
            console.print(f"  {line}", soft_wrap=True, markup=False)
    console.print("\nstaleflow run CONFIG takes each as it is, KEY=VALUE by KEY=VALUE", style="dim")


def _why(name: str) -> str:
    """Who should take it."""
    return {
        "freshest": "the data is nearest to on-policy",
        "knee": "nearest to fast, fresh and thrifty at once; take this if in doubt",
        "fastest": "most steps a minute",
    }[name]


def _pasted(one: "Choice", config: "Config", devices: int | None) -> list[str]:
    """The overrides that change something in a real run."""
    import msgspec

    table = msgspec.to_builtins(config)
    lines = [override for override in one.overrides if not override.startswith(NOT_PASTED) and _new(override, table)]
    engines = dict(override.split("=", 1) for override in one.overrides).get("rollout.workers")
    lines += [f"trainer.nproc={devices - int(engines)}"] if devices and engines else []
    return lines or ["as it is"]


def _new(override: str, table: Any) -> bool:
    key, _, value = override.partition("=")
    for part in key.split("."):
        table = table[part]
    return str(table) != value
