"""Layout of a mirror: the versions of one run in an object store, for readers that may not reach the run.

- ``<lineage>-<version>-<sha>/<number>.part``: the bytes in parts of ``PART_BYTES``. Each part is an object of its own,
  so parts are sent and fetched concurrently, and those of a killed upload are visible and reused.
- ``<lineage>-<version>-<sha>/manifest.json``: written once all parts exist.
- ``index.json``: the surviving versions with a manifest. Written after the manifest of a new version, and before
  anything of an old one is deleted.
"""

from collections.abc import Iterator

import msgspec

from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.codec import ProtocolError
from staleflow.protocols.wire.manifest import check
from staleflow.protocols.wire.messages import Manifest
from staleflow.store.objects import NoObject, Objects, StoreError

PART_BYTES = 16 << 20
INDEX = "index.json"
MANIFEST = "manifest.json"
FORMAT = 1


class MirroredVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version that the mirror has."""

    lineage: Lineage
    version: Version
    sha: str
    nbytes: int

    @property
    def folder(self) -> str:
        return f"{self.lineage}-{self.version}-{self.sha[:16]}"


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """The surviving versions of a run in its mirror, oldest first."""

    format: int = FORMAT
    run: str
    lineage: Lineage
    """Newest lineage of the run. It rises by one at each rollback of the trainer."""
    versions: tuple[MirroredVersion, ...] = ()


def url_of(mirror: str, run: str) -> str:
    """Return the URL of one run's mirror: runs that share ``parameters.mirror`` do not share a folder."""
    return f"{mirror.rstrip('/')}/{run}"


def parts(nbytes: int) -> Iterator[tuple[str, int, int]]:
    """Yield name, offset and size of each part of a version."""
    for number, offset in enumerate(range(0, nbytes, PART_BYTES)):
        yield f"{number:06}.part", offset, min(PART_BYTES, nbytes - offset)


async def read_index(objects: Objects) -> Index:
    """Return the index. Raise ``NoObject`` if there is none, ``StoreError`` if it is damaged."""
    try:
        index = msgspec.json.decode(await objects.get(INDEX), type=Index)
    except NoObject as error:
        runs = ", ".join(await objects.folders()) or "none"
        raise NoObject(f"{objects.url} has no {INDEX}; folders there: {runs}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreError(f"{objects.url}/{INDEX} is damaged: {error}") from error
    if index.format != FORMAT:
        raise StoreError(f"{objects.url}/{INDEX} has format {index.format}; this version of staleflow reads {FORMAT}")
    return index


async def read_manifest(objects: Objects, mirrored: MirroredVersion) -> Manifest:
    """Return the manifest of a version. Raise ``StoreError`` if it is damaged, or is not the one that the index
    names."""
    name = f"{mirrored.folder}/{MANIFEST}"
    try:
        manifest = msgspec.json.decode(await objects.get(name), type=Manifest)
        check(manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, ProtocolError) as error:
        raise StoreError(f"{objects.url}/{name} is damaged: {error}") from error
    if (manifest.sha, manifest.nbytes) != (mirrored.sha, mirrored.nbytes):
        raise StoreError(f"{objects.url}/{name} is of other weights than the index: {manifest.sha}")
    return manifest
