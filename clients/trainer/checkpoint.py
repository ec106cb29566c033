"""Checkpoints as directories: complete or absent, checked when read, the oldest removed.

``checkpoints/<version>/`` holds the backend's files and ``checkpoint.json``: the trainer's scalars and the size and
sha256 of every file. It is written under a name that no reader looks at and no other writer has, synced, and renamed; a
trainer killed at any instant leaves its older checkpoints as they were.

Nothing fences a disk: a trainer whose successor has joined may still write here. So what the run counts on stays: older
checkpoints go once the run has taken a newer one, and what a later lineage wrote is neither removed nor replaced.
"""

import hashlib
import logging
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from staleflow.configs.durable_files import make_folder, sync_path, sync_tree
from staleflow.protocols.consistency.ids import BatchId, Lineage, Version
from staleflow.store.sealed_json import seal, unseal

log = logging.getLogger(__name__)

SCHEMA = 2
HEAD = "checkpoint.json"
_PART = ".part"
_DAMAGED = ".damaged"
_CHUNK = 1 << 20


class TrainerState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The scalars of a trainer: where it is, and what it counted."""

    lineage: Lineage = Lineage(0)
    version: Version = Version(0)
    last_batch: BatchId = BatchId(0)
    """The batch that made ``version``; 0 for none."""
    last_digest: str = ""
    tokens_trained: int = 0
    bad_steps: int = 0
    """Steps whose loss or gradient was not finite."""
    bad_in_a_row: int = 0
    evaluated: int = -1
    """Version of the last evaluation; -1 for none."""


class StoredFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    nbytes: int
    sha: str


class Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``checkpoint.json`` says."""

    schema: int
    run: str
    state: TrainerState
    files: dict[str, StoredFile]


class DamagedCheckpoint(Exception):
    """A directory that is no complete checkpoint; the text says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A damaged checkpoint, what is wrong with it, and where it lies."""

    path: Path
    why: str


class Overtaken(Exception):
    """A later lineage has saved this version, or has removed what was being written; the text says which."""


class Checkpoints:
    """The checkpoints of one run, in ``folder``. One writer that counts; those that it has fenced may still write."""

    def __init__(self, folder: Path, *, run: str, keep: int) -> None:
        self.folder = folder
        self._run = run
        self.keep = keep
        self.damaged: list[Damage] = []
        """The checkpoints that ``newest`` found damaged, the newest first."""

    def save(self, state: TrainerState, write: Callable[[Path], None]) -> Path:
        """Write a checkpoint with the files that ``write`` puts into the directory it is given; it is durable then.
        Older ones stay until ``tidy``. ``Overtaken``: nothing was changed."""
        final = self.folder / str(state.version)
        part = self._unnamed(state.version, state.lineage)
        make_folder(self.folder)
        part.mkdir()
        try:
            write(part)
            files = {name: _stored(part / name) for name in _names(part)}
            head = Head(schema=SCHEMA, run=self._run, state=state, files=files)
            (part / HEAD).write_bytes(seal(head))
            sync_tree(part)
            self._replace(part, final, state.lineage)
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a folder that is gone
            if part.exists():
                raise
            raise Overtaken(f"a trainer of a later lineage has removed {part}") from error
        return final

    def tidy(self, state: TrainerState, oldest: Version) -> None:
        """Delete the oldest checkpoints, and those of fenced trainers after ``state``, which the run has registered.

        The run can still go back to ``oldest``: that one stays, however many lie after it.
        """
        for path in [path for path in self.paths() if int(path.name) <= state.version][self.keep :]:
            if int(path.name) < oldest:
                shutil.rmtree(path, ignore_errors=True)
        self.drop_after(state)

    def newest(self) -> Iterator[tuple[Path, TrainerState]]:
        """Complete checkpoints of this run, the newest first; damaged ones are left out and put into ``damaged``."""
        self.damaged.clear()
        for path in self.paths():
            try:
                yield path, self.read(path)
            except DamagedCheckpoint as damage:
                self.damaged.append(Damage(path, str(damage)))

    def set_aside(self, state: TrainerState) -> list[Damage]:
        """Rename the damaged checkpoints, which no reader looks at then; a person decides what becomes of them.

        A later lineage than that of ``state`` may have replaced one meanwhile: that one stays.
        """

        def older(found: TrainerState | None) -> bool:
            return found is None or found.lineage <= state.lineage

        renamed: list[Damage] = []
        for damage in self.damaged:
            aside = damage.path.with_name(f"{damage.path.name}.{secrets.token_hex(4)}{_DAMAGED}")
            if self._taken(damage.path, aside, older) is not None:
                renamed.append(Damage(aside, damage.why))
        self.damaged.clear()
        return renamed

    def newest_model(self) -> Path | None:
        """The newest directory whose model is what was written, whatever happened to the other files there."""
        return next((path for path in self.paths() if self._holds_model(path)), None)

    def read(self, path: Path) -> TrainerState:
        """The scalars of a checkpoint, after every file of it was checked. ``DamagedCheckpoint`` says what is wrong."""
        head = self._head(path)
        _check(path, head.files)
        return head.state

    def drop_after(self, state: TrainerState, refused: Collection[TrainerState] = ()) -> None:
        """Remove the checkpoints of later versions whose lineage is earlier, or that the run has ``refused``: they
        belong to a history that is gone. With them what such a history had half written."""

        def gone(found: TrainerState | None) -> bool:
            return found is None or found.lineage < state.lineage or found in refused

        for path in self.paths():
            aside = self._unnamed(Version(int(path.name)), state.lineage)
            if int(path.name) > state.version and self._taken(path, aside, gone) is not None:
                log.warning("checkpoint %s belongs to a history that is gone: removed", path)
                shutil.rmtree(aside, ignore_errors=True)
        for path in self.folder.glob(f"*{_PART}"):
            _, lineage, *_ = path.name.split(".")
            if lineage.isdecimal() and int(lineage) < state.lineage:
                shutil.rmtree(path, ignore_errors=True)

    def _head(self, path: Path) -> Head:
        """``DamagedCheckpoint`` unless it is one of this run."""
        head = self._read_head(path)
        if head.run != self._run:
            raise DamagedCheckpoint(f"it belongs to run {head.run}, not to {self._run}")
        return head

    def _read_head(self, path: Path) -> Head:
        try:
            head = msgspec.convert(unseal((path / HEAD).read_bytes()), Head)
        except (OSError, ValueError) as error:  # msgspec.ValidationError is a ValueError
            raise DamagedCheckpoint(f"{HEAD}: {error}") from error
        if head.schema != SCHEMA:
            raise DamagedCheckpoint(f"schema is {head.schema}; it must be {SCHEMA}")
        return head

    def _holds_model(self, path: Path) -> bool:
        try:
            files = self._head(path).files
            _check(path, {name: stored for name, stored in files.items() if _is_model(name)})
        except DamagedCheckpoint:
            return False
        return "config.json" in files

    def _is_foreign(self, path: Path) -> bool:
        """Whether another run has written it."""
        try:
            return self._read_head(path).run != self._run
        except DamagedCheckpoint:
            return False

    def _found(self, path: Path) -> TrainerState | None:
        """Who wrote it, as far as that can be read."""
        try:
            return self._head(path).state
        except DamagedCheckpoint:
            return None

    def _unnamed(self, version: Version, lineage: Lineage) -> Path:
        """A name that no reader looks at, and nobody else has."""
        return self.folder / f"{version}.{lineage}.{secrets.token_hex(4)}{_PART}"

    def paths(self) -> list[Path]:
        """Checkpoints, whole or damaged, the newest first. Those of other runs are neither used nor removed."""
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if path.name.isdecimal() and path.is_dir()]
        found = [path for path in found if not self._is_foreign(path)]
        return sorted(found, key=lambda path: -int(path.name))

    def _replace(self, part: Path, final: Path, lineage: Lineage) -> None:
        """A directory cannot be renamed over another one: what a fenced trainer left there steps aside first."""
        unnamed = self._unnamed(Version(int(final.name)), lineage)
        aside = self._taken(final, unnamed, lambda found: found is None or found.lineage <= lineage)
        try:
            part.rename(final)
        except OSError as error:
            found = self._found(final)
            if found is None or found.lineage <= lineage:
                raise
            shutil.rmtree(part, ignore_errors=True)
            raise Overtaken(f"version {found.version} of lineage {found.lineage} lies at {final}") from error
        sync_path(self.folder)
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)

    def _taken(self, path: Path, aside: Path, gone: Callable[[TrainerState | None], bool]) -> Path | None:
        """Rename ``path`` to ``aside`` if it was ``gone``, and return that; None if it was not, or does not exist."""
        if not path.exists() or self._is_foreign(path) or not gone(self._found(path)):
            return None
        try:
            path.rename(aside)
        except FileNotFoundError:
            return None
        if gone(self._found(aside)):
            return aside
        aside.rename(path)  # a successor had put it there between the two lines
        return None


def _check(folder: Path, files: dict[str, StoredFile]) -> None:
    for name, stored in files.items():
        try:
            found = _stored(folder / name)
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{name} is missing") from None
        except OSError as error:  # a block of the disk that cannot be read
            raise DamagedCheckpoint(f"{name} cannot be read: {error.strerror}") from error
        if found != stored:
            raise DamagedCheckpoint(f"{name} is not what was written")


def _is_model(name: str) -> bool:
    """Whether ``from_pretrained`` reads this file; the other tensors are an optimizer's, or random states."""
    return name.startswith("model") or not name.endswith(".safetensors")


def _names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _stored(path: Path) -> StoredFile:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return StoredFile(nbytes=path.stat().st_size, sha=digest.hexdigest())
