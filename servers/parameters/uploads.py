"""Uploads of versions in progress, with fencing of old publishers.

- A publisher with an older trainer term than the newest one seen is fenced: it can neither begin nor commit. Terms are
  issued by the scheduler, and the caller must have verified a newer one there.
- Beginning the same upload again resumes it. Any other uncommitted upload of the trainer is discarded.
- A connection that is lost for seconds costs no upload: an abandoned upload stays for ``ABANDONED_TIMEOUT_S``.
"""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import TrainerTerm
from staleflow.protocols.wire.messages import BeginPublish, Manifest, RegisterVersionReply, WrittenSpan
from staleflow.servers.parameters.versions import About, Staged, Versions

MAX_REMEMBERED = 16
"""Maximum number of finished uploads whose result can be returned again."""
ABANDONED_TIMEOUT_S = 60.0
"""Time in which a lost publisher may resume its upload."""


@dataclass(slots=True, kw_only=True)
class Upload:
    """One upload, in progress or finished."""

    number: int
    peer: str
    announced: BeginPublish
    staged: Staged
    about: About | None = None
    """Description of the version; None until it is committed."""
    spans: Sequence[WrittenSpan] | None = None
    """Spans of the commit, if several ranks wrote the version."""
    committing: "asyncio.Task[RegisterVersionReply] | None" = None
    left_s: float | None = None
    """Time at which its publisher was lost; None while it is connected."""

    def commit(self, manifest: Manifest, spans: Sequence[WrittenSpan] | None = None) -> About:
        """Return the description of the version that ``manifest`` commits; without digests, if it has ``spans``.

        Raise ``Refused`` if the manifest contradicts the announcement, or an earlier commit of this upload.
        """
        announced = self.announced
        if manifest.nbytes != announced.nbytes:
            detail = f"the manifest has {manifest.nbytes} bytes; {announced.nbytes} were announced"
            raise Refused(Code.MALFORMED, detail)
        about = About(
            lineage=announced.lineage,
            version=announced.version,
            trainer_term=announced.trainer_term,
            batch=announced.batch,
            manifest=manifest,
        )
        if self.committing is not None and (self.about, self.spans) != (about, spans):
            raise Refused(Code.CONFLICT, f"upload {self.number} is already committed with another manifest")
        self.about, self.spans = about, spans
        return about


class Uploads:
    """All uploads of this process, by number."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._uploads: dict[int, Upload] = {}
        self._term = max((s.about.trainer_term for s in versions.stored.values()), default=TrainerTerm(0))

    def __len__(self) -> int:
        return sum(1 for upload in self._uploads.values() if upload.committing is None)

    def is_newest(self, term: TrainerTerm) -> bool:
        """Return True if this term is newer than every term seen."""
        return term > self._term

    @property
    def nbytes(self) -> int:
        """Bytes of the uncommitted uploads."""
        return sum(upload.announced.nbytes for upload in self._uploads.values() if upload.committing is None)

    async def resume(self, peer: str, announced: BeginPublish) -> Upload | None:
        """Return the upload to resume, or None; discard every other uncommitted upload. Raise ``Refused`` if fenced."""
        self.check_term(announced.trainer_term)
        self._term = announced.trainer_term
        for upload in list(self._uploads.values()):
            if upload.committing is not None:
                continue
            if upload.announced == announced:
                upload.peer, upload.left_s = peer, None
                return upload
            await self._forget(upload)
        return None

    def add(self, peer: str, announced: BeginPublish, staged: Staged) -> Upload:
        """Add an upload that writes to ``staged``."""
        number = secrets.randbits(48)
        self._uploads[number] = upload = Upload(number=number, peer=peer, announced=announced, staged=staged)
        return upload

    def find(self, number: int, peer: str) -> Upload:
        """Return an upload for ``peer``, one of the ranks that write it. Its publisher is thereby connected.

        Raise ``Refused``: ``STALE`` if the upload is unknown (any more), ``FENCED`` if its trainer was replaced.
        """
        if (upload := self._uploads.get(number)) is None:
            raise Refused(Code.STALE, f"unknown upload: {number}; begin again")
        self.check_term(upload.announced.trainer_term)
        if peer == upload.peer:
            upload.left_s = None
        return upload

    def check_term(self, term: TrainerTerm) -> None:
        """Raise ``Refused`` with ``FENCED`` if a newer trainer has published since."""
        if term < self._term:
            raise Refused(Code.FENCED, f"trainer term {term} is over; the current one is {self._term}")

    def leave(self, peer: str) -> None:
        """Mark the uploads of a lost publisher as abandoned."""
        for upload in self._uploads.values():
            if upload.peer == peer:
                upload.left_s = asyncio.get_running_loop().time()

    async def forget_left(self) -> None:
        """Discard uncommitted uploads, failed commits included, whose publisher was lost ``ABANDONED_TIMEOUT_S``
        ago."""
        before_s = asyncio.get_running_loop().time() - ABANDONED_TIMEOUT_S
        for upload in list(self._uploads.values()):
            if upload.committing is None and upload.left_s is not None and upload.left_s < before_s:
                await self._forget(upload)

    def forget_finished(self) -> None:
        """Forget all finished uploads but the newest ``MAX_REMEMBERED``."""
        finished = [u for u in self._uploads.values() if u.committing is not None and u.committing.done()]
        for upload in finished[:-MAX_REMEMBERED]:
            del self._uploads[upload.number]

    async def _forget(self, upload: Upload) -> None:
        self._uploads.pop(upload.number, None)
        await asyncio.to_thread(self._versions.discard, upload.staged)
