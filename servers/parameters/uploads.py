"""Versions on their way in: who may publish, which upload is which, and what became of it.

A publisher with an older trainer term than the newest one seen is fenced: it can neither begin nor commit. Who asks
here has made sure that a newer one than that has begun: terms are the scheduler's to give. Beginning the same again
continues the same upload; anything else that the same trainer had begun is forgotten. A link that is lost for seconds
costs no upload: one whose publisher is gone stays for ``LEFT_S``.
"""

import asyncio
import secrets
from dataclasses import dataclass

from staleflow.net.errors import Refused
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import TrainerTerm
from staleflow.protocols.wire.messages import BeginPublish, Manifest, RegisterVersionReply
from staleflow.servers.parameters.versions import About, Staged, Versions

REMEMBERED = 16
"""Finished uploads whose answer can be given again."""
LEFT_S = 60.0
"""In which a publisher that is gone may go on where it was."""


@dataclass(slots=True, kw_only=True)
class Upload:
    """One version that a trainer is writing, or has written."""

    number: int
    peer: str
    announced: BeginPublish
    staged: Staged
    about: About | None = None
    """What it turned out to be, once it is committed."""
    committing: "asyncio.Task[RegisterVersionReply] | None" = None
    left_s: float | None = None
    """When its publisher was gone; None while it is there."""

    def commit(self, manifest: Manifest) -> About:
        """What is in it. ``Refused`` if that is not what was announced, or not what was committed before."""
        announced = self.announced
        if manifest.nbytes != announced.nbytes:
            detail = f"a version of {announced.nbytes} bytes was announced; the manifest says {manifest.nbytes}"
            raise Refused(Code.MALFORMED, detail)
        about = About(
            lineage=announced.lineage,
            version=announced.version,
            trainer_term=announced.trainer_term,
            batch=announced.batch,
            manifest=manifest,
        )
        if self.committing is not None and self.about != about:
            raise Refused(Code.CONFLICT, f"upload {self.number} is committed with another manifest")
        self.about = about
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
        """Whether no publisher with that term has been here yet, nor one with a newer."""
        return term > self._term

    @property
    def nbytes(self) -> int:
        """What those take that are not committed."""
        return sum(upload.announced.nbytes for upload in self._uploads.values() if upload.committing is None)

    async def again(self, peer: str, announced: BeginPublish) -> Upload | None:
        """The upload that goes on, or None; any other that is not committed is forgotten. ``Refused`` fenced."""
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
        """A new upload, and where its bytes go."""
        number = secrets.randbits(48)
        self._uploads[number] = upload = Upload(number=number, peer=peer, announced=announced, staged=staged)
        return upload

    def find(self, number: int) -> Upload:
        """The upload, for its publisher, which is there. ``Refused`` stale if it is not known (any more), fenced if its
        trainer was replaced."""
        if (upload := self._uploads.get(number)) is None:
            raise Refused(Code.STALE, f"upload {number} is not known; begin again")
        self.check_term(upload.announced.trainer_term)
        upload.left_s = None
        return upload

    def check_term(self, term: TrainerTerm) -> None:
        """``Refused`` fenced when a newer trainer has published since."""
        if term < self._term:
            raise Refused(Code.FENCED, f"trainer term {term} is over; the present one is {self._term}")

    def leave(self, peer: str) -> None:
        """Nothing is heard of a publisher any more."""
        for upload in self._uploads.values():
            if upload.peer == peer:
                upload.left_s = asyncio.get_running_loop().time()

    async def forget_left(self) -> None:
        """What is not committed, or cannot be committed now, goes when its publisher has been gone for long."""
        before_s = asyncio.get_running_loop().time() - LEFT_S
        for upload in list(self._uploads.values()):
            if upload.committing is None and upload.left_s is not None and upload.left_s < before_s:
                await self._forget(upload)

    def forget_finished(self) -> None:
        """Keep the newest answers only."""
        finished = [u for u in self._uploads.values() if u.committing is not None and u.committing.done()]
        for upload in finished[:-REMEMBERED]:
            del self._uploads[upload.number]

    async def _forget(self, upload: Upload) -> None:
        self._uploads.pop(upload.number, None)
        await asyncio.to_thread(self._versions.discard, upload.staged)
