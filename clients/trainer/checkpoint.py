"""Checkpoints as directories: complete or absent, verified when read, the oldest removed.

``checkpoints/<version>/`` holds the backend's files and ``checkpoint.json``: the trainer's scalars and the size and
sha256 of every file. It is written under a unique name that readers ignore, synced, and renamed; a trainer killed at
any instant leaves its older checkpoints intact.

A disk has no fencing: a trainer whose successor has joined may still write here. Therefore the checkpoints that the run
relies on stay: older ones are removed only after the run has accepted a newer one, and those of a later lineage are
neither removed nor replaced. Unfinished ones carry the term of their trainer, and only a later trainer removes them.
"""

import hashlib
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from staleflow.configs.durable_files import make_folder, sync_path, sync_tree
from staleflow.configs.loading.presence import ADAPTER
from staleflow.protocols.consistency.ids import BatchId, Lineage, TrainerTerm, Version
from staleflow.store.sealed_json import seal, unseal

log = logging.getLogger(__name__)

SCHEMA = 3
HEAD = "checkpoint.json"
_PART = ".part"
_DAMAGED = ".damaged"
_CHUNK = 1 << 20
MAX_HASHERS = 8
"""Maximum number of files that are hashed at once, on as many cores."""


class TrainerState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The scalars of a trainer: its position and its counters."""

    lineage: Lineage = Lineage(0)
    version: Version = Version(0)
    last_batch: BatchId = BatchId(0)
    """The batch that produced ``version``; 0 for none."""
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
    """The content of ``checkpoint.json``."""

    schema: int
    run: str
    state: TrainerState
    files: dict[str, StoredFile]


class DamagedCheckpoint(Exception):
    """The directory is not a complete checkpoint; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A damaged checkpoint, its location and the reason."""

    path: Path
    why: str


class Overtaken(Exception):
    """A later trainer has saved this version, or removed the directory being written; the text gives the cause."""


class Checkpoints:
    """The checkpoints of one run, in ``folder``. Only one writer is valid, but fenced trainers may still write."""

    def __init__(self, folder: Path, *, run: str, keep: int) -> None:
        self.folder = folder
        self._run = run
        self.keep = keep
        self.term = TrainerTerm(0)
        """The term of the trainer that writes here, once it has joined."""
        self.damaged: list[Damage] = []
        """The checkpoints that ``newest`` found damaged, newest first."""

    def save(
        self, state: TrainerState, write: Callable[[Path], None], published: Callable[[], object] = lambda: None
    ) -> Path:
        """Write a durable checkpoint with the files that ``write`` puts into the given directory.

        Older checkpoints stay until ``tidy``. ``Overtaken``: nothing was changed. ``published`` as in ``finish``.
        """
        part = self.begin(state)
        return self.finish(state, part, lambda: write(part), published)

    def begin(self, state: TrainerState) -> Path:
        """Return a new directory for the files of a checkpoint. It is no checkpoint before ``finish``."""
        part = self._temporary_name(state.version)
        make_folder(self.folder)
        part.mkdir()
        return part

    def finish(
        self,
        state: TrainerState,
        part: Path,
        write: Callable[[], None],
        published: Callable[[], object] = lambda: None,
    ) -> Path:
        """Let ``write`` fill the directory of ``begin``, and make it a durable checkpoint. May run in another thread.

        It is a checkpoint only after ``published``, which waits until the version is. If that raises, the directory is
        removed. ``Overtaken`` as ``save``.
        """
        final = self.folder / str(state.version)
        with self.writing(part):
            write()
            head = Head(schema=SCHEMA, run=self._run, state=state, files=_stored_files(part, _names(part)))
            (part / HEAD).write_bytes(seal(head))
            sync_tree(part)
        try:
            published()
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        with self.writing(part):
            self._replace(part, final, state.lineage)
        return final

    @contextmanager
    def writing(self, part: Path) -> Generator[None]:
        """Raise ``Overtaken`` in place of an error in the block if the directory of ``begin`` is gone."""
        try:
            yield
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a missing folder
            if part.exists():
                raise
            raise Overtaken(f"a later trainer has removed {part}") from error

    def tidy(self, state: TrainerState, oldest: Version) -> None:
        """Delete the oldest checkpoints, and those of fenced trainers after ``state``, which the run has registered.

        The run can still roll back to ``oldest``, so that one stays, regardless of the number of later ones.
        """
        for path in [path for path in self.paths() if int(path.name) <= state.version][self.keep :]:
            if int(path.name) < oldest:
                shutil.rmtree(path, ignore_errors=True)
        self.drop_after(state)

    def newest(self) -> Iterator[tuple[Path, TrainerState]]:
        """Yield the complete checkpoints of this run, newest first; collect damaged ones in ``damaged``."""
        self.damaged.clear()
        for path in self.paths():
            try:
                yield path, self.read(path)
            except DamagedCheckpoint as damage:
                self.damaged.append(Damage(path, str(damage)))

    def set_aside(self, state: TrainerState) -> list[Damage]:
        """Rename the damaged checkpoints, so that readers ignore them and an operator can inspect them.

        A checkpoint that a later lineage than that of ``state`` has replaced meanwhile stays.
        """

        def older(other: TrainerState | None) -> bool:
            return other is None or other.lineage <= state.lineage

        renamed: list[Damage] = []
        for damage in self.damaged:
            aside = damage.path.with_name(f"{damage.path.name}.{secrets.token_hex(4)}{_DAMAGED}")
            if self._move_if(damage.path, aside, older) is not None:
                renamed.append(Damage(aside, damage.why))
        self.damaged.clear()
        return renamed

    def newest_model(self) -> Path | None:
        """Return the newest directory whose model is intact, regardless of its other files."""
        return next((path for path in self.paths() if self._holds_model(path)), None)

    def read(self, path: Path) -> TrainerState:
        """Verify every file of a checkpoint and return its scalars. ``DamagedCheckpoint`` gives the reason."""
        head = self._head(path)
        _check(path, head.files)
        return head.state

    def drop_after(self, state: TrainerState, refused: Collection[TrainerState] = ()) -> None:
        """Remove later versions of earlier lineages, and those that the run has ``refused``.

        They belong to an abandoned history. What earlier trainers left unfinished is removed as well.
        """

        def obsolete(other: TrainerState | None) -> bool:
            return other is None or other.lineage < state.lineage or other in refused

        for path in self.paths():
            aside = self._temporary_name(Version(int(path.name)))
            if int(path.name) > state.version and self._move_if(path, aside, obsolete) is not None:
                log.warning("checkpoint %s removed: its history was abandoned", path)
                shutil.rmtree(aside, ignore_errors=True)
        for path in self.folder.glob(f"*{_PART}"):
            _, term, *_ = path.name.split(".")
            if term.isdecimal() and int(term) < self.term:
                shutil.rmtree(path, ignore_errors=True)

    def _head(self, path: Path) -> Head:
        """Read ``checkpoint.json``. ``DamagedCheckpoint`` unless the checkpoint belongs to this run."""
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
        return "config.json" in files or ADAPTER in files

    def _is_foreign(self, path: Path) -> bool:
        """Return whether another run wrote the checkpoint."""
        try:
            return self._read_head(path).run != self._run
        except DamagedCheckpoint:
            return False

    def _state_of(self, path: Path) -> TrainerState | None:
        """Return the writer's state, or None if it is unreadable."""
        try:
            return self._head(path).state
        except DamagedCheckpoint:
            return None

    def _temporary_name(self, version: Version) -> Path:
        """Return a unique name that readers ignore."""
        return self.folder / f"{version}.{self.term}.{secrets.token_hex(4)}{_PART}"

    def paths(self) -> list[Path]:
        """Return checkpoints, complete or damaged, newest first. Those of other runs are neither used nor removed."""
        if not self.folder.is_dir():
            return []
        candidates = [path for path in self.folder.iterdir() if path.name.isdecimal() and path.is_dir()]
        candidates = [path for path in candidates if not self._is_foreign(path)]
        return sorted(candidates, key=lambda path: -int(path.name))

    def _replace(self, part: Path, final: Path, lineage: Lineage) -> None:
        """Rename ``part`` to ``final``, first moving a fenced trainer's directory away: a rename cannot replace one."""
        temporary = self._temporary_name(Version(int(final.name)))
        aside = self._move_if(final, temporary, lambda other: other is None or other.lineage <= lineage)
        try:
            part.rename(final)
        except OSError as error:
            other = self._state_of(final)
            if other is None or other.lineage <= lineage:
                raise
            shutil.rmtree(part, ignore_errors=True)
            raise Overtaken(f"version {other.version} of lineage {other.lineage} lies at {final}") from error
        sync_path(self.folder)
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)

    def _move_if(self, path: Path, aside: Path, obsolete: Callable[[TrainerState | None], bool]) -> Path | None:
        """Rename ``path`` to ``aside`` if ``obsolete`` is true of its state; return ``aside``, or None if not moved."""
        if not path.exists() or self._is_foreign(path) or not obsolete(self._state_of(path)):
            return None
        try:
            path.rename(aside)
        except FileNotFoundError:
            return None
        if obsolete(self._state_of(aside)):
            return aside
        aside.rename(path)  # a successor replaced it between the check and the rename: undo
        return None


def _check(folder: Path, files: dict[str, StoredFile]) -> None:
    with ThreadPoolExecutor(_hashers()) as pool:
        hashed = {name: pool.submit(_stored, folder / name) for name in files}
    for name, stored in files.items():
        try:
            actual = hashed[name].result()
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{name} is missing") from None
        except OSError as error:  # for example an unreadable disk block
            raise DamagedCheckpoint(f"{name} cannot be read: {error.strerror}") from error
        if actual != stored:
            raise DamagedCheckpoint(f"{name} does not match its checksum")


def _is_model(name: str) -> bool:
    """Return whether ``from_pretrained`` reads this file; other tensors are optimizer or random states."""
    return name.startswith(("model", "adapter_model")) or not name.endswith(".safetensors")


def _names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _stored_files(folder: Path, names: list[str]) -> dict[str, StoredFile]:
    """Hash files in parallel: sha256 releases the interpreter's lock."""
    with ThreadPoolExecutor(_hashers()) as pool:
        return dict(zip(names, pool.map(_stored, [folder / name for name in names]), strict=True))


def _hashers() -> int:
    return min(MAX_HASHERS, len(os.sched_getaffinity(0)))


def _stored(path: Path) -> StoredFile:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return StoredFile(nbytes=path.stat().st_size, sha=digest.hexdigest())
