"""``staleflow launch``: a run on several machines, started through ssh, Slurm, Kubernetes or Ray."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from staleflow.cli import options
from staleflow.configs.errors import ConfigError

if TYPE_CHECKING:
    from staleflow.configs.schema import Config
    from staleflow.supervisor.roles import Role

ENGINES = ("ssh", "slurm", "kubernetes", "ray")
HERE, FIRST = "THIS-MACHINE", "FIRST-TRAINER-MACHINE"
"""Placeholders for addresses in a dry run, which resolves no host names."""


@click.command("launch", short_help="Start a run on several machines: ssh, Slurm, Kubernetes, Ray.")
@click.option("--on", "engine", type=click.Choice(ENGINES), required=True, help="Launcher.")
@click.argument("arguments", nargs=-1, metavar="CONFIG [KEY=VALUE]...", shell_complete=options.complete_run)
@click.option("--run-dir", type=options.DIRECTORY, metavar="DIR", help="Default: runs/NAME-TIMESTAMP.")
@click.option("--resume", is_flag=True, help="Continue in the run directory, on other machines if necessary.")
@click.option("--dry-run", is_flag=True, help="Print what would be created and started; change nothing.")
@click.option(
    "--out", type=options.DIRECTORY, metavar="DIR", help="slurm, kubernetes: write the files to DIR and start nothing."
)
@click.option("--plain", is_flag=True, help="ssh, ray: print a line every few seconds instead of the live view.")
@click.option("--json", "as_json", is_flag=True, help="ssh, ray: print the summary as JSON; progress goes to stderr.")
def command(
    engine: str,
    arguments: tuple[str, ...],
    run_dir: Path | None,
    resume: bool,
    dry_run: bool,
    out: Path | None,
    plain: bool,
    as_json: bool,
) -> int:
    """Start every role of CONFIG on the machines that its [launch] table names.

    With ssh and ray, the servers run on this machine and the command lasts as long as the run. With slurm and
    kubernetes, the command submits a job and exits. Missing keys are created; each machine receives only the keys that
    it needs.

    \b
    Examples:
      staleflow launch --on ssh configs/cluster.toml launch.hosts='["gpu-1", "gpu-2", "gpu-3"]'
      staleflow launch --on slurm configs/cluster.toml --dry-run
      staleflow launch --on kubernetes configs/cluster.toml launch.image=registry/staleflow:1 --out deploy
      staleflow launch --on ray configs/cluster.toml
    """
    from staleflow.configs.loading.load import load
    from staleflow.launch import placement

    _check_options(engine, dry_run, out)
    if not arguments or "=" in arguments[0]:
        raise click.UsageError("no configuration given; for example: staleflow launch --on slurm configs/cluster.toml")
    config = load(arguments[0], arguments[1:])
    placement.check(config)
    match engine:
        case "slurm":
            return _slurm(config, run_dir, out, resume=resume, dry_run=dry_run)
        case "kubernetes":
            return _kubernetes(config, out or run_dir, hand_over=out is None, dry_run=dry_run)
        case _:
            return _here(engine, config, run_dir, resume=resume, dry_run=dry_run, plain=plain, as_json=as_json)


def _check_options(engine: str, dry_run: bool, out: Path | None) -> None:
    """Raise ``ConfigError`` for options that have no effect together."""
    if engine in ("slurm", "kubernetes"):
        options.refuse(f"--on {engine} submits a job and shows no progress: leave it out", "plain", "as_json")
    else:
        options.refuse(f"--on {engine} writes no files; --dry-run prints what it would start", "out")
    if engine == "kubernetes":
        options.refuse("--on kubernetes always resumes: runs of one name are one run; leave it out", "resume")
    if dry_run:
        options.refuse("a dry run shows no progress: leave it out", "plain", "as_json")
    if out is not None:
        options.refuse(f"--out {out} is the run directory: give only one of them", "run_dir")


def _here(
    engine: str, config: "Config", run_dir: Path | None, *, resume: bool, dry_run: bool, plain: bool, as_json: bool
) -> int:
    """Run the servers in this process tree and the workers on other machines, until the run ends."""
    from staleflow.cli.run import report_finished, view_of
    from staleflow.launch import ray_machines, ssh
    from staleflow.launch.keys import ensure_keys
    from staleflow.launch.placement import head_stages
    from staleflow.supervisor import rundir
    from staleflow.supervisor.addresses import check_free
    from staleflow.supervisor.summary import finished
    from staleflow.supervisor.supervisor import Supervisor

    if engine == "ssh":
        ssh.check(config.launch)
    elif not dry_run:
        ray_machines.check()
    folder = _folder(config, run_dir, resume=resume)
    run = _resolved(config, engine, folder, dry_run=dry_run)
    machines = _machines(engine, config, run, folder)
    if dry_run:
        _print_dry_run(engine, config, run, folder, machines)
        return 0
    rundir.choose(run, folder, resume=resume)
    if resume and (ended := finished(folder, run.trainer.steps)) is not None:
        return report_finished(ended, run, as_json, f"staleflow launch --on {engine}")
    check_free(run, folder)
    hint = f"staleflow launch --on {engine} CONFIG --run-dir {folder} --resume"
    with rundir.claim(run, folder, resume=resume, command=hint):
        ensure_keys(run, folder)
        workers = [*head_stages(run, folder, config.launch.gpus_per_node), *machines]
        return Supervisor(run, folder, view_of(run, folder, plain, as_json), hint, workers).run()


def _folder(config: "Config", run_dir: Path | None, *, resume: bool) -> Path:
    """Return the absolute path of the run directory, which other machines may share."""
    from staleflow.supervisor import rundir

    if resume and run_dir is None:
        raise ConfigError("--resume", True, "no run given: add --run-dir")
    return (run_dir or rundir.fresh(config.name)).resolve()


def _resolved(config: "Config", engine: str, folder: Path, *, dry_run: bool = False) -> "Config":
    """Return the configuration with the addresses that the run's processes use.

    With ssh, servers bind to the local address that reaches the first host; a dry run uses a placeholder instead.
    """
    from staleflow.launch.network import own_address
    from staleflow.launch.servers import EVERY_INTERFACE, resolved

    if engine != "ssh":
        return resolved(config, folder, EVERY_INTERFACE)
    return resolved(config, folder, HERE if dry_run else own_address(config.launch.hosts[0]))


def _machines(engine: str, config: "Config", run: "Config", folder: Path) -> "list[Role]":
    import msgspec

    from staleflow.launch import ray_machines, ssh

    if engine == "ssh":
        return ssh.machines(run, config.launch, folder, run.scheduler.bind)
    return [ray_machines.machines(ray_machines.fleet(msgspec.structs.replace(run, launch=config.launch)))]


def _print_dry_run(engine: str, config: "Config", run: "Config", folder: Path, machines: "list[Role]") -> None:
    """Print which processes would start where, as shell commands."""
    from staleflow.configs.launch import price
    from staleflow.launch.placement import head_stages

    reached = f"as seen from {config.launch.hosts[0]}" if engine == "ssh" else "in the Ray cluster"
    click.echo(f"run directory  {folder}")
    click.echo(f"keys           {run.security.keys or 'none: security.insecure'}")
    if hour := price(config.launch):
        click.echo(
            f"price          {hour:g} an hour for {config.launch.trainer_nodes + config.launch.rollout_nodes} machines"
        )
    click.echo(f"{HERE}   its address {reached}")
    click.echo("\nhere")
    addresses = (run.scheduler.bind, *run.trajectories.bind, run.parameters.bind)
    names = ("scheduler", *(f"trajectories-{shard}" for shard in range(len(run.trajectories.bind))), "parameters")
    for name, address in zip(names, addresses, strict=True):
        click.echo(f"  {name}  {address}")
    for role in head_stages(run, folder, config.launch.gpus_per_node):
        click.echo(f"  {role.name}")
    for where, line in _over_ssh(config, machines) if engine == "ssh" else _in_ray(config, run):
        click.echo(f"\n{where}\n  {line}")


def _over_ssh(config: "Config", machines: "list[Role]") -> Iterator[tuple[str, str]]:
    """Yield (title, command) for each host; ``$keys`` in a command is the folder with the host's keys."""
    import msgspec

    from staleflow.launch.placement import names_on, places
    from staleflow.launch.ssh import Reach

    for place, role in zip(places(config), machines, strict=True):
        reach = msgspec.json.decode(role.command[-1], type=Reach)
        keys = ", ".join(Path(path).name for path in reach.key_files)
        title = f"{role.name} at {reach.host}: {', '.join(names_on(config, place))}"
        title += f"; in $keys there: {keys}" if keys else ""
        yield title, shlex.join((*reach.through, reach.host, reach.command))


def _in_ray(config: "Config", run: "Config") -> Iterator[tuple[str, str]]:
    """Yield (title, command) for each Ray actor: its resources and processes, and the command that it runs."""
    import msgspec

    from staleflow.launch.network import host_of
    from staleflow.launch.placement import RENDEZVOUS_PORT_OFFSET, machine_words, names_on
    from staleflow.launch.ray_machines import fleet
    from staleflow.launch.servers import EVERY_INTERFACE

    connect = run.scheduler.bind
    if host_of(connect) == EVERY_INTERFACE:
        connect = connect.replace(EVERY_INTERFACE, HERE)
    fleet_spec = fleet(msgspec.structs.replace(run, launch=config.launch))
    for at, bundle in enumerate(fleet_spec.bundles):
        place = fleet_spec.places[at]
        keys = ", ".join(Path(path).name for path in fleet_spec.key_files[at])
        wanted = ", ".join(f"{what} {count:g}" for what, count in bundle.items())
        title = f"{place.name} on a node of its own, {wanted}: {', '.join(names_on(config, place))}"
        title += f"; with the keys {keys}" if keys else ""
        words = machine_words(place, connect, f"{FIRST}:{config.launch.port + RENDEZVOUS_PORT_OFFSET}")
        yield title, shlex.join(("python", *words))


def _slurm(config: "Config", run_dir: Path | None, out: Path | None, *, resume: bool, dry_run: bool) -> int:
    from staleflow.configs.loading.load import write_resolved
    from staleflow.launch import slurm
    from staleflow.launch.keys import ensure_keys
    from staleflow.supervisor import rundir

    folder = _folder(config, out or run_dir, resume=resume)
    run = _resolved(config, "slurm", folder)
    text = slurm.script(config, folder, run.security.keys)
    if dry_run:
        click.echo(text, nl=False)
        return 0
    rundir.choose(run, folder, resume=resume)
    if resume:
        rundir.adopt(run, folder)
    else:
        write_resolved(run, folder)
    ensure_keys(run, folder)
    (folder / "logs").mkdir(exist_ok=True)
    path = folder / slurm.SCRIPT
    path.write_text(text)
    click.echo(f"sbatch {path}" if out is not None else slurm.submit(path))
    click.echo(f"staleflow status {folder} --why        # once it runs; logs are in {folder}/logs")
    return 0


def _kubernetes(config: "Config", folder: Path | None, *, hand_over: bool, dry_run: bool) -> int:
    from staleflow.launch import kubernetes
    from staleflow.launch.keys import FOLDER, ensure_folder
    from staleflow.supervisor import rundir

    kubernetes.check(config)
    files = kubernetes.files(config)
    for path in kubernetes.outside(config):
        click.echo(f"staleflow: {path} is not under /data: the image {config.launch.image} must contain it", err=True)
    if dry_run:
        for name, text in files.items():
            click.echo(f"# {name}\n{text}---")
        return 0
    folder = (folder or rundir.fresh(config.name)).resolve()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    ensure_folder(folder / FOLDER)
    for name, text in files.items():
        (folder / name).write_text(text)
    click.echo(kubernetes.apply(folder) if hand_over else f"kubectl apply -k {folder}")
    name, state = kubernetes.dns_name(config.name), kubernetes.STATE
    pod = f"statefulset/{name}-servers -c scheduler"
    click.echo(f"kubectl exec {pod} -- staleflow status {state}/{name} --why")
    click.echo(f"kubectl delete -k {folder}        # stops the run; the servers' volume stays")
    return 0
