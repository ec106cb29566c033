"""Payload that proves where it comes from: every byte is a function of the seed and of what the payload claims to be.

Whoever gets some can work out what it must be, and nobody can hand out the wrong bytes unseen.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, TrainerTerm, Version
from staleflow.protocols.wire.manifest import digest, lay_out
from staleflow.protocols.wire.messages import Manifest
from staleflow.protocols.wire.stages import REFERENCE, REWARD, REWARD_COLUMN, STAGE
from staleflow.protocols.wire.tensors import Array, pack
from staleflow.protocols.wire.trajectory import Finish, GroupPayload

Segments = tuple[tuple[Lineage, Version, int], ...]
"""(lineage, version, tokens) of each sample; every sample of a group has the same ones."""

WEIGHT_WORDS = 64
TENSOR_WORDS = 16
FROZEN = 2
"""Which tensor of the weights is the same in every version."""
REFERENCE_COLUMN = f"{STAGE}{REFERENCE}/logprobs"
LENGTHS, ODD = "lengths", "odd"
"""Stages of a user's."""
STAGES = (REWARD, REFERENCE, LENGTHS, ODD)
TENSOR = "weights"


def stream(*words: object, nbytes: int) -> bytes:
    """That many bytes, the same for the same words."""
    return hashlib.shake_128(repr(words).encode()).digest(nbytes)


def group_payload(
    seed: int, group: GroupId, lease: LeaseId, segments: Segments, samples: int, variant: int = 0
) -> GroupPayload:
    """What a worker of that lease writes with those weights; another ``variant`` is other bytes."""
    tokens = sum(count for _, _, count in segments)
    total = tokens * samples
    raw = stream("tokens", seed, group, lease, segments, variant, nbytes=4 * total)
    ids = (np.frombuffer(raw, np.uint32) >> 1).astype(np.int32)
    return GroupPayload(
        prompt_ids=np.array([group, lease, variant], np.int32),
        lengths=np.full(samples, tokens, np.int32),
        token_ids=ids,
        logprobs=-(ids % 97).astype(np.float32) / 64,
        loss_mask=np.ones(total, np.uint8),
        segments=np.array([(n, *segment) for n in range(samples) for segment in segments], np.int64).reshape(-1, 4),
        finish=np.full(samples, Finish.STOP, np.uint8),
    )


def segments_of(payload: GroupPayload) -> Segments:
    """The segments of its first sample."""
    rows = payload.segments.tolist()
    return tuple((Lineage(row[1]), Version(row[2]), row[3]) for row in rows if row[0] == 0)


def is_what_was_written(seed: int, group: GroupId, payload: GroupPayload, samples: int) -> bool:
    """True when these are exactly the bytes that a worker wrote of that group, and rewards that fit them."""
    if len(payload.prompt_ids) != 3:
        return False
    _, lease, variant = payload.prompt_ids.tolist()
    wanted = group_payload(seed, group, lease, segments_of(payload), samples, variant).to_arrays()
    same = all(np.array_equal(getattr(payload, name), column) for name, column in wanted.items())
    made = {name: column for stage in STAGES for name, column in made_by(stage, seed, group, payload).items()}
    return same and all(np.array_equal(column, made[name]) for name, column in payload.stages.items())


def made_by(stage: str, seed: int, group: GroupId, payload: GroupPayload) -> dict[str, Array]:
    """What a stage makes of a group, by full name: a function of its bytes."""
    if stage == REWARD:
        lease = LeaseId(int(payload.prompt_ids[1]))
        return {REWARD_COLUMN: rewards_of(seed, group, lease, payload.num_samples)}
    if stage == REFERENCE:
        return {REFERENCE_COLUMN: reference_of(payload)}
    if stage == LENGTHS:
        return {f"{STAGE}{LENGTHS}/count": payload.lengths.astype(np.float32)}
    return {f"{STAGE}{ODD}/odd:token": (payload.token_ids % 2).astype(np.float32)}


def rewards_of(seed: int, group: GroupId, lease: LeaseId, samples: int) -> Array:
    """What the reward stage makes of a group: 0 or 1 a sample."""
    return (np.frombuffer(stream("reward", seed, group, lease, nbytes=samples), np.uint8) % 2).astype(np.float32)


def reference_of(payload: GroupPayload) -> Array:
    """What the reference stage makes of it: a log-probability a token."""
    return -(payload.token_ids % 89).astype(np.float32) / 64


def sha_of(payload: GroupPayload) -> str:
    """What a shard calls it."""
    return hashlib.sha256(pack(payload.to_arrays())).hexdigest()


def weights_of(seed: int, lineage: Lineage, version: Version, term: TrainerTerm) -> bytes:
    """A version as that trainer publishes it. It begins with what it claims to be."""
    words = np.frombuffer(stream("weights", seed, lineage, version, term, nbytes=4 * WEIGHT_WORDS), np.uint32).copy()
    words[:3] = (lineage, version, term)
    frozen = np.frombuffer(stream("frozen", seed, nbytes=4 * TENSOR_WORDS), np.uint32)
    words[FROZEN * TENSOR_WORDS : (FROZEN + 1) * TENSOR_WORDS] = frozen
    return words.tobytes()


def are_weights(seed: int, data: bytes, lineage: Lineage, version: Version) -> bool:
    """True when some trainer published exactly these bytes as that version."""
    if len(data) != 4 * WEIGHT_WORDS:
        return False
    claimed = np.frombuffer(data, np.uint32)[:3].tolist()
    return claimed[:2] == [lineage, version] and data == weights_of(seed, lineage, version, TrainerTerm(claimed[2]))


def manifest_of(data: bytes) -> Manifest:
    """What describes these weights."""
    size = 4 * TENSOR_WORDS
    pieces = enumerate(data[start : start + size] for start in range(0, len(data), size))
    return lay_out((f"{TENSOR}.{number}", "int32", (TENSOR_WORDS,), digest(piece)) for number, piece in pieces)


def row_of(number: int) -> dict[str, object]:
    """A prompt row."""
    return {"prompt": f"prompt {number}", "number": number}


def rows(*, seed: int, count: int) -> Sequence[dict[str, object]]:
    """The prompt source of simulated runs."""
    return [row_of(number) for number in range(count)]
