"""Compare staleflow with the rules of other systems on the papers' workload shapes, with all costs charged.

    python -m bench.papers [--shapes staleflow-moe,mixed-7b] [--etas 1,2,3] [--seeds 3] [--ablate]
    python -m bench.papers --small                       what CI runs: tiny worlds, in seconds
    python -m bench.papers --ablate --report --plot docs/pictures/results-papers.svg --keep /tmp/papers.jsonl

Every row has the same engines, prompts, lengths, trainer, weights and seeds. The costs of engines, trainer and weights
are derived from data sheets, those of scheduler, trajectory servers and wire are measured (``bench/papers_gpu.py``);
only our own rows pay the latter. ``--keep`` continues an interrupted campaign.
"""

import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from bench import papers_tables as tables
from bench.papers_ablation import ablation
from bench.papers_points import OWN, Point
from bench.papers_runs import Campaign
from bench.papers_shapes import SHAPES, Shape, small
from bench.progress import tracked

RESULTS = Path(__file__).parent / "results"
PLOTTED = 2
"""The bound of the picture, where it is among the chosen ones."""


def heading(seeds: int, options: Sequence[str]) -> str:
    """Return hardware, date, command, and the meaning of the rows."""
    command = " ".join(["python -m bench.papers", *options])
    own = "; ".join(
        f"`{name}`: {', '.join(f'`{one}`' for one in given) or 'the defaults'}" for name, given in OWN.items()
    )
    return (
        f"# The papers' shapes, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"{time.strftime('%Y-%m-%d')}\n\n"
        f"`{command}`, load average {os.getloadavg()[0]:.0f}; all times are virtual. ± is half of a 95 % confidence "
        f"interval (Student's t, {seeds} seeds: 0 to {seeds - 1}). Ratios are formed seed by seed, of trained tokens a "
        "minute: masked tokens do not count, and a step counts less where long groups are discarded (net: the same "
        f"number as steps of full batches a minute). {own}. Age: step minus the oldest version among a group's trained "
        "tokens; bold beyond the bound. In the tables of systems each peer has the bound as its own setting. In the "
        "tables of ratios a peer has its largest setting whose groups never exceed the bound, and is left out where "
        "there is none.\n\n"
    )


def _options() -> list[str]:
    """Return the command line without the file of finished runs, which changes no number."""
    given = sys.argv[1:]
    if "--keep" in given:
        at = given.index("--keep")
        del given[at : at + 2]
    return given


def _names(_: click.Context, parameter: click.Parameter, value: str) -> list[str]:
    chosen = [part.strip() for part in value.split(",") if part.strip()]
    allowed = list(SHAPES) if parameter.name == "shapes" else ["1", "2", "3", "4", "5", "6", "7", "8"]
    for name in chosen:
        if name not in allowed:
            raise click.BadParameter(f"{name!r} is none of {', '.join(allowed)}")
    if not chosen:
        raise click.BadParameter(f"it is empty; it takes some of {', '.join(allowed)}")
    return chosen


@click.command(help=__doc__)
@click.option("--small", "tiny", is_flag=True, help="Tiny worlds, in seconds.")
@click.option("--shapes", default=",".join(SHAPES), show_default=True, callback=_names)
@click.option("--etas", default="1,2,3", show_default=True, callback=_names, help="Bounds.")
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1, 10))
@click.option("--ablate", is_flag=True, help="Also turn every strategy off alone.")
@click.option("--report", is_flag=True, help="Write the tables into bench/results.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw a picture (extra plot).")
@click.option("--keep", type=click.Path(path_type=Path, dir_okay=False), help="File of finished runs, to continue.")
def main(
    tiny: bool,
    shapes: list[str],
    etas: list[str],
    seeds: int,
    ablate: bool,
    report: bool,
    plot: Path | None,
    keep: Path | None,
) -> None:
    """Run and print; each table appears as soon as it is complete."""
    chosen = [SHAPES[name] for name in shapes]
    chosen = small(chosen) if tiny else chosen
    campaign = Campaign(keep)
    parts = [tables.shapes(chosen)]
    points: list[Point] = []
    for shape in tracked("shapes", chosen, lambda shape: shape.name):
        some = _points(campaign, shape, [int(eta) for eta in etas], seeds)
        points += some
        parts.append(tables.systems(some))
        click.echo(parts[-1] + "\n")
    parts[1:1] = [tables.ratios(points), tables.by_shape(points)]
    click.echo("\n\n".join(parts[1:3]) + "\n")
    if ablate:
        parts.insert(3, ablation(campaign, chosen, seeds))
        click.echo(parts[3] + "\n")
    if plot is not None:
        from bench.papers_plot import draw

        eta = PLOTTED if str(PLOTTED) in etas else int(etas[-1])
        draw([point for point in points if point.eta == eta], plot)
    if report:
        path = RESULTS / f"{time.strftime('%Y-%m')}-{os.cpu_count()}-cores-papers.md"
        path.write_text(heading(seeds, _options()) + "\n\n".join(parts) + "\n", encoding="utf-8")
        click.echo(f"written to {path}", err=True)


def _points(campaign: Campaign, shape: Shape, etas: Sequence[int], seeds: int) -> list[Point]:
    return [Point.of(campaign, shape, eta, seeds) for eta in etas]


if __name__ == "__main__":
    main()
