"""The expected content of every payload, reward and version, as a function of its names.

The actors write this content and the audit compares against it. The module imports nothing of the product. Bytes that
differ from this content were never sent by any actor.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

SAMPLES = 2
WEIGHT_BYTES = 4096
REWARD = "stage/reward/reward"

Array = NDArray[Any]


def _stream(nbytes: int, *names: object) -> bytes:
    return hashlib.shake_256(repr(names).encode()).digest(nbytes)


def payload(seed: int, group: int, lease: int, lineage: int, version: int) -> dict[str, Array]:
    """Return the group that ``lease`` wrote with the weights (lineage, version): 2 samples of 8 to 71 tokens each."""
    names = (seed, group, lease, lineage, version)
    lengths = 8 + np.frombuffer(_stream(SAMPLES, "lengths", *names), np.uint8).astype(np.int32) % 64
    tokens = int(lengths.sum())
    return {
        "prompt_ids": np.arange(3, dtype=np.int32),
        "lengths": lengths,
        "token_ids": np.frombuffer(_stream(4 * tokens, "tokens", *names), np.int32) & 0x7FFFFFFF,
        "logprobs": -np.frombuffer(_stream(tokens, "logprobs", *names), np.uint8).astype(np.float32) / 64,
        "loss_mask": np.ones(tokens, np.uint8),
        "segments": np.asarray(
            [(sample, lineage, version, length) for sample, length in enumerate(lengths.tolist())], np.int64
        ),
        "finish": np.zeros(SAMPLES, np.uint8),
    }


def rewards(seed: int, group: int, lease: int) -> Array:
    """float32 [2]: the rewards that the reward stage gives a group; never equal for both samples."""
    drawn = int.from_bytes(_stream(2, "reward", seed, group, lease), "big")
    return np.asarray([drawn / 65536, 1 + drawn / 65536], np.float32)


def weights(seed: int, lineage: int, version: int) -> dict[str, Array]:
    """Return the weights of a version; their bytes contain seed, lineage and version."""
    noise = np.frombuffer(_stream(WEIGHT_BYTES, "weights", seed, lineage, version), np.int32)
    return {"identity": np.asarray([seed, lineage, version], np.int64), "noise": noise}


def fingerprint(arrays: Mapping[str, Array]) -> str:
    """Return the hex sha256 of names, types, shapes and bytes, independent of the order of the mapping."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(repr((name, array.dtype.str, array.shape)).encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
