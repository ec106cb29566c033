"""To the parameter server: versions in and out."""

from staleflow.protocols.consistency.ids import BatchId, Lineage, TrainerTerm, Version, WorkerId
from staleflow.protocols.wire.messages.base import Message, Part


class TensorEntry(Part, frozen=True, kw_only=True):
    """One tensor inside a version's bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    sha: str


class Manifest(Part, frozen=True, kw_only=True):
    """What a version is made of. ``sha`` is the hex sha256 over the tensors' entries, and so over every byte."""

    tensors: list[TensorEntry]
    nbytes: int
    sha: str


class BeginPublish(Message, frozen=True, kw_only=True):
    """The trainer is about to publish (lineage, version). -> PublishTo"""

    trainer_term: TrainerTerm
    lineage: Lineage
    version: Version
    batch: BatchId | None
    manifest: Manifest


class PublishTo(Message, frozen=True, kw_only=True):
    """Where the bytes go: into the file at ``path`` when it is on the publisher's host, else in chunks."""

    upload: int
    path: str
    host: str
    """Boot id of the server's host."""


class PublishChunk(Message, frozen=True, kw_only=True):
    """One frame of bytes at ``offset``. -> Done"""

    upload: int
    offset: int


class CommitPublish(Message, frozen=True, kw_only=True):
    """Every byte is there: verify, make visible, register with the scheduler. -> Registered"""

    upload: int


class GetManifest(Message, frozen=True, kw_only=True):
    """What is in a version, and where; pins it for the worker until ``Unpin`` or its end. -> ManifestOf"""

    worker: WorkerId
    lineage: Lineage
    version: Version


class ManifestOf(Message, frozen=True, kw_only=True):
    manifest: Manifest
    path: str
    host: str


class GetChunk(Message, frozen=True, kw_only=True):
    """Bytes of a pinned version; the reader keeps a few of these under way (credit). -> Chunk and one frame"""

    lineage: Lineage
    version: Version
    offset: int
    nbytes: int


class Chunk(Message, frozen=True, kw_only=True):
    offset: int


class Unpin(Message, frozen=True, kw_only=True):
    """-> Done"""

    worker: WorkerId
    lineage: Lineage
    version: Version
