"""Messages to the parameter server: upload and download of versions."""

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
    """Hex xxh3-128 of the bytes: it detects damage, not malice."""


class Manifest(Part, frozen=True, kw_only=True):
    """Contents of a version. ``sha`` is the hex sha256 over the tensors' entries, including their digests."""

    tensors: list[TensorEntry]
    nbytes: int
    sha: str


class WrittenSpan(Part, frozen=True, kw_only=True):
    """Contiguous bytes of one tensor, written by one rank of a sharded trainer."""

    offset: int
    nbytes: int
    digest: str
    """Hex xxh3-128 of the bytes, computed by the rank that wrote them."""


class BeginPublish(Message, frozen=True, kw_only=True):
    """The trainer is about to publish (lineage, version). -> BeginPublishReply"""

    trainer_term: TrainerTerm
    lineage: Lineage
    version: Version
    batch: BatchId | None
    nbytes: int


class BeginPublishReply(Message, frozen=True, kw_only=True):
    """Destination of the bytes: the file at ``path`` if it is on the publisher's host, else chunks."""

    upload: int
    path: str
    host: str
    """Boot id of the server's host."""


class PublishChunk(Message, frozen=True, kw_only=True):
    """One frame of bytes at ``offset``. -> Done"""

    upload: int
    offset: int


class CommitPublish(Message, frozen=True, kw_only=True):
    """The upload is complete: verify it, make it visible, register it with the scheduler. -> RegisterVersionReply"""

    upload: int
    manifest: Manifest
    in_place: bool = False
    """The publisher wrote the file itself, in the pass that computed the digests: no second read is needed."""
    direct: str = ""
    """Address where the publisher serves the same bytes itself, ``tcp://host:port``; "" if it does not."""
    spans: list[WrittenSpan] | None = None
    """Parts in which the ranks of a sharded trainer wrote the version, in any order; None if one process wrote it.

    Together they are every byte of every tensor exactly once. The entries of the manifest have no digests: the server
    verifies each span and computes the digests of the tensors."""


class GetManifest(Message, frozen=True, kw_only=True):
    """Request the manifest of a version, and pin it for the worker until ``Unpin`` or its end. -> ManifestReply"""

    worker: WorkerId
    lineage: Lineage
    version: Version
    doubted: bool = False
    """The worker read bytes that do not match: verify every byte before the reply."""
    host: str = ""
    """Boot id of the reader's host. A relay on the same host replies once the file may be mapped, or after a while."""
    mirror: bool = False
    """The worker reads from the mirror unless it is on the server's host: reply once the mirror has the version, or
    will not have it soon."""


class ManifestReply(Message, frozen=True, kw_only=True):
    manifest: Manifest
    path: str
    """File of the version; "" from a relay that does not have the whole version yet."""
    host: str
    direct: str = ""
    """Address where the trainer serves these bytes itself; "" if it does not, or no longer."""
    mirrored: bool = False
    """The mirror has these bytes."""


class GetChunk(Message, frozen=True, kw_only=True):
    """Request bytes of a pinned version. A reader keeps a few requests in flight (credit). -> Chunk and one frame"""

    lineage: Lineage
    version: Version
    offset: int
    nbytes: int


class GetDelta(Message, frozen=True, kw_only=True):
    """Request the delta of one span of a pinned version against the base, which the reader has.

    -> Chunk and one frame
    """

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
    """The worker no longer reads the version. -> Done"""

    worker: WorkerId
    lineage: Lineage
    version: Version
    base: bool = False
    """The worker has the bytes and prefers the next version as a delta: keep this one while there is room."""


class JoinRelays(Message, frozen=True, kw_only=True):
    """A relay registers, and repeats it periodically to learn when its source has left. -> Sources"""

    worker: WorkerId
    run: str
    endpoint: str
    host: str


class GetSources(Message, frozen=True, kw_only=True):
    """A reader on another host than the parameter server requests the sources of its bytes. -> Sources"""

    worker: WorkerId
    host: str


class Sources(Message, frozen=True, kw_only=True):
    """Endpoints of relays, the best first. The parameter server itself is always the last resort."""

    endpoints: list[str]
