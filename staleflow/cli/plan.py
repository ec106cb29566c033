"""``staleflow plan``: search for the bound, policy and split of devices that suit a workload."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from staleflow.cli import mixes, options
from staleflow.configs.errors import ConfigError

if TYPE_CHECKING:
    from staleflow.configs.schema import Config
    from staleflow.sim.plan import Choice

TRACE = "trace.jsonl"
POSITIVE = click.FloatRange(min=0, min_open=True)
SEARCH_OPTIONS = ("etas", "devices", "jobs", "per_min", "hours", "budget", "most")
"""Options that apply to the search only."""
MEMORY_OPTIONS = ("gpus", "gpu_gib", "prompt_tokens")
"""Options that apply to the memory plan only."""
SIMULATION_ONLY = ("trainer.simulated_step_s",)
"""Overrides that matter to a simulation only and are left out of the lines to paste."""


@click.command("plan", short_help="Search for a bound and policy, or plan the memory.")
@click.argument("source", type=options.FILE, metavar="CONFIG|RUN_DIR")
@options.overrides
@click.option("--etas", default="0,1,2,3,4", show_default=True, metavar="LIST", help="Values of max_staleness to try.")
@click.option("--devices", type=click.IntRange(min=2), metavar="N", help="Also try splits of N devices.")
@click.option(
    "--target-steps-per-min",
    "per_min",
    type=POSITIVE,
    metavar="X",
    help="Find the cheapest mix of engine kinds that trains X steps a minute.",
)
@click.option(
    "--target-hours", "hours", type=POSITIVE, metavar="H", help="The same: one that trains trainer.steps in H hours."
)
@click.option(
    "--budget", type=POSITIVE, metavar="PRICE", help="Find the fastest mix that trains trainer.steps for PRICE."
)
@click.option(
    "--max",
    "most",
    multiple=True,
    metavar="KIND=N",
    help="Maximum number of engines of a kind. Default: its count in simulation.fleet.",
)
@click.option("--graph", is_flag=True, help="Print the stage graph of CONFIG instead of searching.")
@click.option("--mermaid", is_flag=True, help="Like --graph, as a mermaid diagram.")
@click.option("--memory", is_flag=True, help="Print the memory of each process of a run instead of searching.")
@click.option(
    "--gpus", type=click.IntRange(min=0), metavar="N", help="--memory: number of GPUs. Default: those of this machine."
)
@click.option("--gpu-gib", type=click.FloatRange(min=1), metavar="GIB", help="--memory: free memory of each GPU.")
@click.option(
    "--prompt-tokens",
    default=512,
    show_default=True,
    type=click.IntRange(min=1),
    metavar="N",
    help="--memory: length of a prompt.",
)
@click.option(
    "--jobs", default=os.cpu_count() or 1, show_default="one per processor", type=click.IntRange(min=1), metavar="J"
)
@options.as_json
def command(
    source: Path,
    overrides: tuple[str, ...],
    etas: str,
    devices: int | None,
    per_min: float | None,
    hours: float | None,
    budget: float | None,
    most: tuple[str, ...],
    graph: bool,
    mermaid: bool,
    memory: bool,
    gpus: int | None,
    gpu_gib: float | None,
    prompt_tokens: int,
    jobs: int,
    as_json: bool,
) -> int:
    """Simulate CONFIG, or a real run as measured by the trace in RUN_DIR, under many settings, and print the best ones.

    The result is the Pareto front of throughput, staleness and wasted work. The overrides of each setting follow, with
    three recommendations: lowest staleness, best trade-off (the knee of the curve), highest throughput. The search
    covers max_staleness, the bound, the overdue policy, composition, admission, redundancy and, with --devices, the
    split between engines and trainer ranks.

    With --target-steps-per-min, --target-hours or --budget, search instead for the mix of the engine kinds of
    [[simulation.fleet]] that costs least, or trains fastest for the money, by their prices, speeds and numbers.

    With --memory, print instead what each process needs on its GPU or in main memory, and whether it fits. The model
    is built without weights, so its config.json suffices. --gpus and --gpu-gib describe a machine other than this one.

    \b
    Examples:
      staleflow plan configs/skewed.toml --etas 0,1,2
      staleflow plan runs/quickstart-20261121-053000 --devices 8
      staleflow plan configs/prices.toml --target-steps-per-min 100
      staleflow plan configs/stages.toml --graph
      staleflow plan configs/gpu/one-gpu.toml --memory --gpus 1 --gpu-gib 79
    """
    if graph or mermaid or memory:
        chosen = "--memory" if memory else "--graph and --mermaid"
        options.refuse(f"it applies to the search: leave it out, or {chosen}", *SEARCH_OPTIONS)
    if not memory:
        options.refuse("it applies to the memory plan: add --memory, or leave it out", *MEMORY_OPTIONS)
    if memory:
        if graph or mermaid:
            raise ConfigError("--memory", True, "leave it out, or --graph and --mermaid")
        return _memory(source, overrides, gpus, gpu_gib, prompt_tokens, as_json=as_json)
    if graph or mermaid:
        options.refuse("it applies to the search: leave it out, or --graph and --mermaid", "as_json")
        return _draw(source, overrides, mermaid)
    if per_min is not None or hours is not None or budget is not None:
        return _mixes(source, overrides, (per_min, hours, budget), most, jobs, as_json=as_json)
    options.refuse("it limits the search of a target or a budget: add one, or leave it out", *mixes.MIX_OPTIONS)
    import tempfile

    from staleflow.cli.progress import bar
    from staleflow.sim.plan import front, plan

    wanted = _etas(etas)
    with tempfile.TemporaryDirectory(prefix="staleflow-plan-") as place:
        config = _config(source, overrides, Path(place))
        with bar("simulating", quiet=as_json) as update:
            search = plan(config, wanted, devices=devices, jobs=jobs, on_progress=lambda done, of: update(done, of, ""))
            choices = front(list(search))
    if not choices:
        raise click.ClickException("no setting trains a step: run staleflow simulate on one of them to see why")
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(choices).decode())
    else:
        show(choices, config, devices)
    return 0


def _mixes(
    source: Path,
    overrides: tuple[str, ...],
    goals: tuple[float | None, float | None, float | None],
    most: tuple[str, ...],
    jobs: int,
    *,
    as_json: bool,
) -> int:
    """Search the mixes of engine kinds for a target or a budget."""
    import tempfile

    mixes.refuse_search_options()
    with tempfile.TemporaryDirectory(prefix="staleflow-plan-") as place:
        config = _config(source, overrides, Path(place))
        goal = mixes.goal_of(config, *goals)
        assert goal is not None
        return mixes.run(config, goal, most, jobs, as_json=as_json)


def _memory(
    source: Path,
    overrides: tuple[str, ...],
    gpus: int | None,
    gpu_gib: float | None,
    prompt_tokens: int,
    *,
    as_json: bool,
) -> int:
    """Print the memory plan; return 1 if a device is too small."""
    from staleflow.cli.progress import working
    from staleflow.configs.loading.probe import count_gpus
    from staleflow.configs.rules.checks import needs_model
    from staleflow.supervisor.memory import ask, text

    config = _unchanged(source, overrides)
    if not needs_model(config):
        raise click.ClickException("no process of this run loads a model")
    directory = ask.model_directory(config, source if source.is_dir() else None)
    if directory is None:
        allowed = "the run has yet to build its model: plan its run directory later, or set model.path"
        raise ConfigError("model.build", config.model.build, allowed)
    with working("planning the memory"):
        plan = ask.plan_of(
            config,
            directory,
            count_gpus() if gpus is None else gpus,
            prompt_tokens=prompt_tokens,
            gpu_bytes=int((gpu_gib or 0) * 2**30),
        )
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(plan).decode())
    else:
        for line in text.lines(config, plan):
            click.echo(line)
    return 0 if all(device.fits for device in plan.devices) else 1


def _unchanged(source: Path, overrides: tuple[str, ...]) -> "Config":
    """Return the configuration of a file with overrides, or that of a run."""
    from staleflow.configs.loading.load import load, read_run

    if source.is_dir() and overrides:
        raise ConfigError("override", overrides[0], "a run directory keeps its configuration: leave it out")
    return read_run(source) if source.is_dir() else load(source, overrides)


def _draw(source: Path, overrides: tuple[str, ...], mermaid: bool) -> int:
    from staleflow.cli import graph

    config = _unchanged(source, overrides)
    click.echo(graph.mermaid(config) if mermaid else graph.text(config))
    return 0


def _etas(text: str) -> list[int]:
    try:
        wanted = [int(part) for part in text.split(",")]
    except ValueError:
        wanted = [-1]
    if min(wanted) < 0:
        raise ConfigError("--etas", text, "must be integers from 0, separated by commas")
    return wanted


def _config(source: Path, overrides: tuple[str, ...], place: Path) -> "Config":
    """Return the base configuration of the search; for a run directory, with values measured in its trace."""
    from staleflow.configs.loading.load import load, read_run

    if not source.is_dir():
        return load(source, overrides)
    from staleflow.sim.measured import LENGTHS, measure
    from staleflow.sim.peers.compare import changed

    run = read_run(source)
    return changed(run, (*measure(source / TRACE).overrides(place / LENGTHS), *overrides))


def show(choices: "list[Choice]", config: "Config", devices: int | None) -> None:
    """Print the Pareto front, the overrides of each choice, and the three recommendations."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from staleflow.sim.plan import picks

    table = Table(box=box.ROUNDED, title=f"{config.name}: {len(choices)} Pareto-optimal choices")
    for name in ("", "steps/min", "of the trainer", "staleness mean / max", "tokens wasted", "length bias", "pick"):
        table.add_column(name, justify="left" if name == "pick" else "right", no_wrap=name in ("", "steps/min", "pick"))
    chosen = picks(choices)
    for number, one in enumerate(choices, start=1):
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
    for number, one in enumerate(choices, start=1):
        console.print(f"{number}:  {'  '.join(_paste_lines(one, config, devices))}", soft_wrap=True, markup=False)
    for name, one in chosen.items():
        console.print(f"\n{name} ({choices.index(one) + 1}): {_why(name)}", style="bold", markup=False)
        for line in _paste_lines(one, config, devices):
            console.print(f"  {line}", soft_wrap=True, markup=False)
    console.print("\npaste the overrides of a choice after staleflow run CONFIG", style="dim")


def _why(name: str) -> str:
    """Return the reason to take the recommendation called ``name``."""
    return {
        "freshest": "the data is nearest to on-policy",
        "knee": "the best compromise of speed, freshness and waste; the default choice",
        "fastest": "most steps per minute",
    }[name]


def _paste_lines(one: "Choice", config: "Config", devices: int | None) -> list[str]:
    """Return the overrides that have an effect in a real run."""
    import msgspec

    table = msgspec.to_builtins(config)
    lines = [
        override for override in one.overrides if not override.startswith(SIMULATION_ONLY) and _changes(override, table)
    ]
    engines = dict(override.split("=", 1) for override in one.overrides).get("rollout.workers")
    lines += [f"trainer.nproc={devices - int(engines)}"] if devices and engines else []
    return lines or ["as it is"]


def _changes(override: str, table: Any) -> bool:
    key, _, value = override.partition("=")
    for part in key.split("."):
        table = table[part]
    return str(table) != value
