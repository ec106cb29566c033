"""``staleflow weights``: versions of a run from its mirror, without a connection to the run."""

from pathlib import Path

import click

from staleflow.cli import options
from staleflow.cli.progress import working
from staleflow.configs.errors import ConfigError
from staleflow.process.sanitize import printable


@click.group("weights", short_help="Fetch versions of a run from its mirror.")
def command() -> None:
    """Fetch versions of a run from its mirror (parameters.mirror), without a connection to the run."""


@command.command("fetch", short_help="Write a version to a directory.")
@click.argument("url", metavar="URL")
@click.option("--to", "folder", type=options.DIRECTORY, required=True, metavar="DIR", help="Directory to write.")
@click.option("--version", type=click.IntRange(min=0), metavar="N", help="Fetch exactly version N.")
@click.option("--min-version", type=click.IntRange(min=0), default=0, metavar="N", help="Fetch the newest, at least N.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0), default=0.0, metavar="S", help="Wait S seconds for it."
)
@options.as_json
def fetch(url: str, folder: Path, version: int | None, min_version: int, timeout_s: float, as_json: bool) -> int:
    """Fetch the newest version from URL, verify it and write it to DIR: model.safetensors with the weights, and
    staleflow.json with run, lineage, version and digest.

    URL is parameters.mirror of the run, then the id of the run. Endpoint and credentials come from the environment, as
    in AWS_ENDPOINT_URL. The exit code is 1, and DIR is unchanged, if the version does not arrive within S seconds
    (default 0), was deleted or skipped, or is damaged.

    \b
    Examples:
      staleflow weights fetch s3://bucket/weights/quickstart-8322f32e --to latest
      staleflow weights fetch s3://bucket/weights/quickstart-8322f32e --min-version 10 --timeout 600 --to serving
      staleflow weights fetch file:///shared/weights/quickstart-8322f32e --version 12 --to step-12 --json
    """
    from staleflow.clients.weights.download import NotMirrored, save_weights
    from staleflow.clients.weights.remote import CorruptWeights
    from staleflow.store.objects import StoreError

    if version is not None and min_version:
        raise ConfigError("--min-version", min_version, "with --version only one of the two")
    try:
        with working("fetching"):
            about = save_weights(url, folder, version=version, min_version=min_version, timeout_s=timeout_s)
    except (NotMirrored, StoreError, CorruptWeights) as error:
        click.echo(f"staleflow: {printable(str(error))}", err=True)
        return 1
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(about).decode())
    else:
        click.echo(f"{folder}: version {about.version} of lineage {about.lineage}, run {printable(about.run)}")
    return 0
