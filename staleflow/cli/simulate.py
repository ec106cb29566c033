"""``staleflow simulate``: run a configuration with the real scheduler on a virtual clock."""

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from staleflow.cli import options
from staleflow.cli.progress import working
from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.extras import install

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from staleflow.sim.result import Result

WIDTH = 120
"""Line width in characters if stdout is not a terminal."""


def gather(results: "Iterable[Result]", total: int, quiet: bool) -> "list[Result]":
    """Return ``results`` as a list and show a progress bar of ``total`` meanwhile, unless ``quiet``."""
    from staleflow.cli.progress import bar

    finished: list[Result] = []
    with bar("simulating", quiet=quiet) as update:
        for result in results:
            finished.append(result)
            update(len(finished), total, f"last {result.name}: {result.steps_per_min:.3f} steps/min")
    return finished


def show(results: "list[Result]", title: str) -> None:
    """Print the table, a legend and a conclusion. On a narrow terminal some columns follow below the others."""
    from rich.console import Console
    from rich.text import Text

    from staleflow.sim.peers.compare import COLUMNS
    from staleflow.sim.peers.conclusion import LEGEND, conclusion

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    columns = [(name, [Text(text(result), style=_style(name, result)) for result in results]) for name, text in COLUMNS]
    names = [result.name for result in results]
    console.print(Text(title, style="italic"), soft_wrap=True)
    wide = console.options.update(width=10 * WIDTH)
    while columns:
        fitting = len(columns)
        while fitting > 1 and console.measure(_table(names, columns[:fitting]), options=wide).maximum > console.width:
            fitting -= 1
        console.print(_table(names, columns[:fitting]))
        columns = columns[fitting:]
        console.print()
    for line in LEGEND:
        console.print(Text(line, style="dim"))
    console.print()
    for sentence in conclusion(results):
        console.print(Text(sentence))


def _table(names: "list[str]", columns: "list[tuple[str, list[Text]]]") -> "Table":
    """Return a table of all rows and the given columns. Columns never wrap, so that no number is cut."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 2))
    table.add_column("", no_wrap=True)
    for title, _ in columns:
        table.add_column(title.replace(" ", "\n"), justify="right", no_wrap=True)
    for name, *cells in zip(names, *(cells for _, cells in columns), strict=True):
        table.add_row(name, *cells)
    return table


def _style(name: str, result: "Result") -> str:
    return "bold red" if name == "violations" and result.violations else ""


if TYPE_CHECKING:
    from staleflow.configs.schema import Config
    from staleflow.sim.result import Result


@click.command("simulate", short_help="Simulate a configuration in virtual time.")
@click.argument("file", type=options.FILE, metavar="CONFIG")
@options.overrides
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Train steps (default: trainer.steps).")
@click.option("--seed", type=click.IntRange(min=0), metavar="S", help="Overrides the seed of the configuration.")
@click.option("--trace", type=options.DIRECTORY, metavar="DIR", help="Write trace.jsonl and metrics.jsonl to DIR.")
@click.option("--compare", "beside", is_flag=True, help="Compare with other bounds and other systems' rules.")
@click.option("--peers", metavar="A,B", help="With --compare: systems such as areal,verl (default: all; none: '').")
@click.option("--plot", "stem", type=options.FILE, metavar="STEM", help="Write the plots STEM.png and STEM.html.")
@options.as_json
def command(
    file: Path,
    overrides: tuple[str, ...],
    steps: int | None,
    seed: int | None,
    trace: Path | None,
    beside: bool,
    peers: str | None,
    stem: Path | None,
    as_json: bool,
) -> int:
    """Run CONFIG with simulated engines and a simulated trainer: the real scheduler, strategies and rollout workers,
    without a model and without waiting.

    Engines follow [rollout.simulated] and [simulation]; a train step takes trainer.simulated_step_s. The trace is
    audited; the exit code is 1 if it violates a rule. With --compare, every bound and overdue policy of staleflow and
    the rules of other systems run with the same engines, prompts, lengths and trainer.

    \b
    Examples:
      staleflow simulate configs/skewed.toml
      staleflow simulate configs/skewed.toml staleness.bound=token --steps 100
      staleflow simulate configs/skewed.toml --compare --peers areal,verl --plot skewed
    """
    from staleflow.configs.loading.load import load
    from staleflow.sim.asking import Stalled

    _check_options(trace, beside, peers, stem)
    config = load(file, overrides if seed is None else (*overrides, f"seed={seed}"))
    try:
        results = _compared(config, peers, steps, as_json) if beside else [_simulated(config, steps, trace)]
    except Stalled as error:
        click.echo(f"staleflow: {error}", err=True)
        return 1
    drawn = _drawn(results, config, stem)
    if as_json:
        import msgspec

        summaries = [result.summary() for result in results]
        click.echo(msgspec.json.encode(summaries if beside else summaries[0]).decode())
    else:
        _show(results, config, beside)
        click.echo("".join(f"{path}\n" for path in drawn), nl=False)
    own = results if not beside else [result for result in results if result.trace_hash]
    return 0 if not any(result.violations for result in own) else 1


def _check_options(trace: Path | None, beside: bool, peers: str | None, stem: Path | None) -> None:
    """Raise ``ConfigError`` for options that have no effect together, and for a plot without matplotlib."""
    if beside and trace is not None:
        raise ConfigError("--trace", str(trace), "it writes the trace of one run: leave out --trace or --compare")
    if peers is not None and not beside:
        raise ConfigError("--peers", peers, "it needs --compare")
    if stem is not None and find_spec("matplotlib") is None:
        raise ConfigError("--plot", str(stem), f"it needs matplotlib: {install('plot')}")


def _simulated(config: "Config", steps: int | None, trace: Path | None) -> "Result":
    from staleflow.sim.simulate import simulate

    with working("simulating"):
        return simulate(config, steps=steps, run_dir=trace)


def _compared(config: "Config", peers: str | None, steps: int | None, quiet: bool) -> "list[Result]":
    from staleflow.sim.peers.compare import OWN, compare
    from staleflow.sim.peers.presets import PEERS

    names = list(PEERS) if peers is None else [name.strip() for name in peers.split(",") if name.strip()]
    return gather(compare(config, names, steps=steps), len(OWN) + len(names), quiet)


def _drawn(results: "list[Result]", config: "Config", stem: Path | None) -> list[Path]:
    if stem is None:
        return []
    from staleflow.sim.plot import plot

    return plot(results, config.staleness.max_staleness, stem)


def _show(results: "list[Result]", config: "Config", beside: bool) -> None:
    if not beside:
        return _print(results[0])

    return show(results, f"{config.name}: max_staleness {config.staleness.max_staleness}, seed {config.seed}")


def _print(result: "Result") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    title = f"{result.name}: {len(result.steps):,} steps in {result.seconds:,.1f} s of virtual time"
    table = Table(box=box.ROUNDED, title=title)
    table.add_column("measure")
    table.add_column("value", justify="right", no_wrap=True)
    for name, value in (
        ("steps a minute", f"{result.steps_per_min:.3f}"),
        ("of the trainer's limit", _of_limit(result.steps_per_min, result.trainer_limit)),
        ("of the engines' limit", _of_limit(result.steps_per_min, result.rollout_limit)),
        ("staleness, mean and max", f"{result.staleness_mean:.2f}, {result.staleness_max}"),
        ("violations of the audit", f"{result.violations:,}"),
        ("tokens thrown away", f"{result.discarded:.1%}"),
        ("tokens filtered away", f"{result.filtered:.1%}"),
        ("tokens masked", f"{result.masked:.1%}"),
        ("length trained / drawn", f"{result.length_bias:.3f}"),
        ("engines idle", f"{result.engine_idle:.1%}"),
        ("trainer idle", f"{result.trainer_idle:.1%}"),
        *_costs(result),
    ):
        table.add_row(name, value)
    Console(highlight=False).print(table)


def _costs(result: "Result") -> list[tuple[str, str]]:
    """Return the rows of the cost, if prices are given."""
    if not result.cost_per_step:
        return []
    return [
        ("cost of a step", f"{result.cost_per_step:,.4g}"),
        ("cost of 1,000 trained trajectories", f"{result.cost_per_1000:,.4g}"),
    ]


def _of_limit(speed: float, limit: float) -> str:
    return f"{speed / limit:.1%} of {limit:.3f}" if limit else "-"
