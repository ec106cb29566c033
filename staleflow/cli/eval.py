"""``staleflow eval``: play the evaluation sets of a configuration with a checkpoint, without a run."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from staleflow.cli import options
from staleflow.cli.progress import bar
from staleflow.configs.errors import ConfigError

if TYPE_CHECKING:
    from staleflow.clients.evaluation.standalone import SetResult
    from staleflow.configs.schema import Config


@click.command("eval", short_help="Evaluate a checkpoint.")
@click.argument("checkpoint", type=options.DIRECTORY, metavar="CHECKPOINT")
@click.argument("arguments", nargs=-1, metavar="[CONFIG] [KEY=VALUE]...", shell_complete=options.complete_override)
@click.option("--set", "names", multiple=True, metavar="NAME", help="Play this [[eval]] set only; may be repeated.")
@click.option("--scores", type=options.FILE, metavar="FILE", help="Write a JSON line with the rewards of each prompt.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON line for each set instead of the table.")
def command(
    checkpoint: Path, arguments: tuple[str, ...], names: tuple[str, ...], scores: Path | None, as_json: bool
) -> int:
    """Play the [[eval]] sets of CONFIG with the model in CHECKPOINT, a checkpoint of a run or any directory of
    save_pretrained, and print their metrics. Engine, environment, reward and stages are those of CONFIG.

    Default of CONFIG: the configuration of the run that CHECKPOINT belongs to. Without [[eval]], the held-out prompts
    of [prompts] are played.

    \b
    Examples:
      staleflow eval runs/quickstart-20261121-053000/checkpoints/150
      staleflow eval runs/mine/checkpoints/30 --set aime --json
      staleflow eval models/smollm2 my-task/config.toml rollout.max_inflight=16
    """
    from staleflow.clients.evaluation.standalone import chosen_sets, run, with_checkpoint
    from staleflow.clients.rollout.engines.base import EngineError

    config = with_checkpoint(_config(checkpoint, arguments), checkpoint)
    sets = chosen_sets(config, names)
    try:
        with bar("playing") as update:
            results = run(config, sets, lambda name, done, total: update(done, total, name))
    except EngineError as error:
        click.echo(f"staleflow: {error}", err=True)
        return 1
    if scores is not None:
        _write(scores, results)
    _show(results, checkpoint, as_json=as_json)
    return 0 if all(any(one.rewards for one in result.scores) for result in results) else 1


def _config(checkpoint: Path, arguments: tuple[str, ...]) -> "Config":
    """Return the given configuration, or that of the run of the checkpoint, with the overrides."""
    from staleflow.configs.loading.load import load

    if arguments and "=" not in arguments[0]:
        return load(Path(arguments[0]), arguments[1:])
    own = checkpoint.resolve().parent.parent / "config.toml"
    if not own.is_file():
        allowed = f"it must be given: {checkpoint} is not in the checkpoints of a run directory"
        raise ConfigError("CONFIG", "missing", allowed)
    return load(own, arguments)


def _write(path: Path, results: "list[SetResult]") -> None:
    import msgspec

    with path.open("wb") as file:
        for result in results:
            for one in result.scores:
                line = {"set": result.given.name, **msgspec.structs.asdict(one)}
                file.write(msgspec.json.encode(line) + b"\n")


def _show(results: "list[SetResult]", checkpoint: Path, *, as_json: bool) -> None:
    from staleflow.process.sanitize import json_line

    tables: dict[str, dict[str, str]] = {}
    for result in results:
        given, metrics = result.given, result.metrics()
        facts = {"prompts": len(result.scores), "samples": given.samples, "temperature": given.temperature}
        if as_json:
            click.echo(json_line({"set": given.name, "checkpoint": str(checkpoint), **facts, "metrics": metrics}))
        short = {name.removeprefix(f"eval/{given.name}/"): f"{value:.4g}" for name, value in metrics.items()}
        tables[given.name] = {name: f"{value:g}" for name, value in facts.items()} | short
    if not as_json:
        _table(tables)


def _table(sets: dict[str, dict[str, str]]) -> None:
    """Print one column for each set and one row for each number."""
    names = list(dict.fromkeys(name for values in sets.values() for name in values))
    rows = [["", *sets], *([name, *(values.get(name, "") for values in sets.values())] for name in names)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        click.echo("  ".join([first.ljust(widths[0]), *cells]).rstrip())
