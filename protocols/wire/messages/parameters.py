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
    digest: str
    """Hex xxh3-128 of its bytes: it tells damage, not malice."""


class Manifest(Part, frozen=True, kw_only=True):
    """What a version is made of. ``sha`` is the hex sha256 over the tensors' entries, their digests included."""

    tensors: list[TensorEntry]
    nbytes: int
    sha: str


class BeginPublish(Message, frozen=True, kw_only=True):
    """The trainer is about to publish (lineage, version). -> BeginPublishReply"""

    trainer_term: TrainerTerm
    lineage: Lineage
    version: Version
    batch: BatchId | None
    nbytes: int


class BeginPublishReply(Message, frozen=True, kw_only=True):
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
    """Every byte is there: verify, make visible, register with the scheduler. -> RegisterVersionReply"""

    upload: int
    manifest: Manifest
    in_place: bool = False
    """The publisher wrote the file itself, in the pass that made the digests: it need not be read once more."""
    direct: str = ""
    """Where readers may have the same bytes from the publisher itself, ``tcp://host:port``; empty: nowhere."""


class GetManifest(Message, frozen=True, kw_only=True):
    """What is in a version, and where; pins it for the worker until ``Unpin`` or its end. -> ManifestReply"""

    worker: WorkerId
    lineage: Lineage
    version: Version
    doubted: bool = False
    """The worker found other bytes than these: look at every one of them before the answer."""
    host: str = ""
    """Boot id of the reader's host. A relay on the same one answers when the file may be mapped, or after a while."""


class ManifestReply(Message, frozen=True, kw_only=True):
    manifest: Manifest
    path: str
    """Empty at a relay that does not have all of the version yet."""
    host: str
    direct: str = ""
    """Where the trainer gives these bytes to readers itself; empty: nowhere, or not any more."""


class GetChunk(Message, frozen=True, kw_only=True):
    """Bytes of a pinned version; the reader keeps a few of these under way (credit). -> Chunk and one frame"""

    lineage: Lineage
    version: Version
    offset: int
    nbytes: int


class GetDelta(Message, frozen=True, kw_only=True):
    """What changed in one span of a pinned version since ``base``, which the reader holds. -> Chunk and one frame"""

    lineage: Lineage
    version: Version
    base_lineage: Lineage
    base_version: Version
    offset: int
    nbytes: int
    width: int


class Chunk(Message, frozen=True, kw_only=True):
    offset: int


class Unpin(Message, frozen=True, kw_only=True):
    """Nobody looks at the version any more. -> Done"""

    worker: WorkerId
    lineage: Lineage
    version: Version
    base: bool = False
    """The worker has its bytes and would like the next version as what changed since: kept while there is room."""


class JoinRelays(Message, frozen=True, kw_only=True):
    """A relay is there; said again and again, so that it is told when its source has left. -> Sources"""

    worker: WorkerId
    run: str
    endpoint: str
    host: str


class GetSources(Message, frozen=True, kw_only=True):
    """A reader on another host than the parameter server asks where it gets its bytes. -> Sources"""

    worker: WorkerId
    host: str


class Sources(Message, frozen=True, kw_only=True):
    """Endpoints of relays, the best first. The parameter server itself is always the last to try."""

    endpoints: list[str]
