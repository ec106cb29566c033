"""Versions on their way in: who may publish, which upload is which, and what became of it.

A publisher with an older trainer term than the newest one seen is fenced: it can neither begin nor commit. Beginning
again with the same manifest continues the same upload; anything else that the same trainer had begun is forgotten.
"""

import asyncio
import secrets
from dataclasses import dataclass

from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.consistency.ids import TrainerTerm
from staleflow.protocols.wire.messages import Registered
from staleflow.runtime.errors import Refused
from staleflow.servers.parameters.versions import About, Staged, Versions

REMEMBERED = 16
"""Finished uploads whose answer can be given again."""


@dataclass(slots=True, kw_only=True)
class Upload:
    """One version that a trainer is writing, or has written."""

    number: int
    peer: str
    staged: Staged
    committing: "asyncio.Task[Registered] | None" = None

    @property
    def about(self) -> About:
        return self.staged.about


class Uploads:
    """All uploads of this process, by number."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._uploads: dict[int, Upload] = {}
        self._term = max((s.about.trainer_term for s in versions.stored.values()), default=TrainerTerm(0))

    def __len__(self) -> int:
        return sum(1 for upload in self._uploads.values() if upload.committing is None)

    def begin(self, peer: str, about: About) -> Upload:
        """An upload for this version. ``Refused`` fenced; ``NoRoom``."""
        self.check_term(about)
        self._term = about.trainer_term
        for upload in list(self._uploads.values()):
            if upload.committing is not None:
                continue
            if upload.about == about:
                upload.peer = peer
                return upload
            self._forget(upload)
        number = secrets.randbits(48)
        upload = Upload(number=number, peer=peer, staged=self._versions.stage(about, number))
        self._uploads[number] = upload
        return upload

    def find(self, number: int) -> Upload:
        """The upload. ``Refused`` stale if it is not known (any more), fenced if its trainer was replaced."""
        if (upload := self._uploads.get(number)) is None:
            raise Refused(Code.STALE, f"upload {number} is not known; begin again")
        self.check_term(upload.about)
        return upload

    def check_term(self, about: About) -> None:
        """``Refused`` fenced when a newer trainer has published since."""
        if about.trainer_term < self._term:
            raise Refused(Code.FENCED, f"trainer term {about.trainer_term} is over; the present one is {self._term}")

    def forget_peer(self, peer: str) -> None:
        """A publisher is gone: what it had not committed goes too."""
        for upload in list(self._uploads.values()):
            if upload.peer == peer and upload.committing is None:
                self._forget(upload)

    def forget_finished(self) -> None:
        """Keep the newest answers only."""
        finished = [u for u in self._uploads.values() if u.committing is not None and u.committing.done()]
        for upload in finished[:-REMEMBERED]:
            del self._uploads[upload.number]

    def _forget(self, upload: Upload) -> None:
        del self._uploads[upload.number]
        self._versions.discard(upload.staged)
