"""The newest state that each part of a run knows, to reject a ledger that is lost, older, or of another run.

A server stores its run and the newest state that the scheduler acknowledged; a checkpoint has both in its head. Such a
note may lag the ledger but never leads it: a ledger behind a note has lost acknowledged state. A server that obeyed
such a ledger would delete data that the ledger does not know.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from staleflow.configs.durable_files import write_durably
from staleflow.configs.errors import ConfigError
from staleflow.protocols.consistency.ids import LeaseId, Lineage, Version
from staleflow.protocols.wire.messages import AttachReply
from staleflow.store.sealed_json import seal, unseal
from staleflow.trace.writer import RESTORE

FILE = "run"
"""Name of the note in the parameter server's folder; a trajectory server keeps its own in its store."""
CHECKPOINTS = "checkpoints"


class KnownState(msgspec.Struct, frozen=True, kw_only=True):
    """The newest state of a run that one part of it knows."""

    run: str = ""
    """Identity of the run; empty before the first attach."""
    lineage: Lineage = Lineage(0)
    version: Version = Version(-1)
    """Newest registered version of ``lineage``."""
    lease: LeaseId = LeaseId(0)
    """Highest lease whose push was registered."""


class _State(msgspec.Struct):
    lineage: Lineage
    version: Version


class _Checkpoint(msgspec.Struct):
    """The part of a checkpoint's head that names its place in the run."""

    run: str
    state: _State


def check(recorded: KnownState, attached: AttachReply, path: Path) -> None:
    """Raise ``ConfigError`` if the scheduler's ledger differs from the one ``path`` was written under, or is behind
    it."""
    check_ledger(path, recorded, run=attached.run, lineage=attached.lineage, version=attached.version)
    if recorded.lease > attached.leases:
        raise _behind(path, f"it knows lease {recorded.lease}, but the ledger has granted {attached.leases} leases")


def check_ledger(path: Path, recorded: KnownState, *, run: str, lineage: int, version: int) -> None:
    """Like ``check``, for a ledger given by its run, lineage and newest version."""
    if recorded.run not in ("", run):
        what = f"it is of run {recorded.run}, but scheduler/data.mdb is of run {run}, which may be new"
        raise ConfigError("run directory", str(path), f"{what}; {RESTORE}")
    # a rollback lowers the version and raises the lineage, so the pair never decreases
    if (recorded.lineage, recorded.version) > (lineage, version):
        theirs = f"it knows version {recorded.version} of lineage {recorded.lineage}"
        raise _behind(path, f"{theirs}, but the ledger ends at version {version} of lineage {lineage}")


def _behind(path: Path, what: str) -> ConfigError:
    return ConfigError("run directory", str(path), f"{what}: scheduler/data.mdb is an older copy; {RESTORE}")


def of_run(run_dir: Path) -> Iterator[tuple[Path, KnownState]]:
    """Yield the states that checkpoints and the parameter server's folder record in a run directory."""
    yield from of_checkpoints(run_dir)
    yield run_dir / "parameters", read(run_dir / "parameters")


def of_checkpoints(run_dir: Path) -> Iterator[tuple[Path, KnownState]]:
    """Yield the state of each checkpoint. An unreadable head is skipped: the trainer reports that damage.

    A directory that a trainer was writing is no checkpoint: its version may never have been published.
    """
    for path in sorted((run_dir / CHECKPOINTS).glob("*/checkpoint.json")):
        if path.parent.suffix == ".part":
            continue
        try:
            checkpoint = msgspec.convert(unseal(path.read_bytes()), _Checkpoint)
        except (OSError, ValueError):
            continue
        yield (
            path.parent,
            KnownState(run=checkpoint.run, lineage=checkpoint.state.lineage, version=checkpoint.state.version),
        )


def read(folder: Path) -> KnownState:
    """Return the note in a folder; an empty one if none can be read."""
    try:
        return msgspec.convert(unseal((folder / FILE).read_bytes()), KnownState)
    except (OSError, ValueError):
        return KnownState()


def write(folder: Path, recorded: KnownState, *, sync: bool) -> None:
    """Replace the note. Raises ``OSError``."""
    write_durably(folder / FILE, seal(recorded), sync=sync)
