"""A reader's way to the mirror of a run: parts of a version into its memory, verified by their digests.

The manifest comes from the parameter server. A version that does not arrive or does not match it is not used.
"""

import asyncio
import logging

import numpy as np

from staleflow.clients.weights.remote import CorruptWeights, verify
from staleflow.configs.schema import Config
from staleflow.protocols.wire.messages import GetManifest, Manifest
from staleflow.store.mirror import MirroredVersion, parts, url_of
from staleflow.store.objects import Objects, StoreError, at_once

log = logging.getLogger(__name__)

LANES = 8
"""Parts in flight at once: a stream from an object store of another region is slow, several together are not."""
COOLDOWN_S = 60.0
"""Time for which a reader avoids a store that has failed."""


def mirror_url(config: Config, run: str) -> str:
    """Return the URL from which a rollout worker with this configuration reads the versions of ``run``; "" if it reads
    from the parameter server."""
    return url_of(config.parameters.mirror, run) if config.rollout.weights_from == "mirror" else ""


class MirrorReader:
    """The mirror as one reader of the run uses it."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._until_s = 0.0
        self._failing = False

    def is_usable(self) -> bool:
        """Return False for a while after the store has failed."""
        return asyncio.get_running_loop().time() >= self._until_s

    async def fetch(self, asked: GetManifest, manifest: Manifest, target: memoryview) -> bool:
        """Fill ``target`` with the bytes of the manifest; return False, and log why, if that fails."""
        mirrored = MirroredVersion(
            lineage=asked.lineage, version=asked.version, sha=manifest.sha, nbytes=manifest.nbytes
        )
        try:
            await fetch(self._objects, mirrored, manifest, target)
        except CorruptWeights as error:
            log.warning("version %d in the mirror is damaged: %s", asked.version, error)
            return False
        except StoreError as error:
            self._until_s = asyncio.get_running_loop().time() + COOLDOWN_S
            if not self._failing:
                log.warning("version %d does not come from the mirror: %s", asked.version, error)
            self._failing = True
            return False
        self._failing = False
        return True


async def fetch(objects: Objects, mirrored: MirroredVersion, manifest: Manifest, target: memoryview) -> None:
    """Fill ``target`` with the verified bytes of a version. Raise ``StoreError`` or ``CorruptWeights``."""

    async def part(name: str, offset: int, nbytes: int) -> None:
        data = await objects.get(f"{mirrored.folder}/{name}")
        if data.nbytes != nbytes:
            raise CorruptWeights(f"{objects.url}/{mirrored.folder}/{name} has {data.nbytes} bytes in place of {nbytes}")
        await asyncio.to_thread(_copy, data, target[offset : offset + nbytes])

    await at_once((part(*place) for place in parts(mirrored.nbytes)), LANES)
    await asyncio.to_thread(verify, manifest, target)


def _copy(data: memoryview, target: memoryview) -> None:
    """Copy bytes; other threads continue meanwhile."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(data, np.uint8))
