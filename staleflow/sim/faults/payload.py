"""Payload that proves its origin: every byte is a function of the seed and of the payload's own description.

A receiver can compute the expected bytes, so no server can hand out wrong bytes undetected.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from staleflow.clients.rollout.main import text_bytes
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Version
from staleflow.protocols.wire.manifest import digest, lay_out
from staleflow.protocols.wire.messages import Manifest
from staleflow.protocols.wire.payload_digest import payload_digest
from staleflow.protocols.wire.stages import REFERENCE, REWARD, REWARD_COLUMN, STAGE
from staleflow.protocols.wire.tensors import Array, pieces
from staleflow.protocols.wire.trajectory import Finish, GroupPayload

ROWS: Final = 500
"""Prompt rows of every run."""
LONG: Final = 200
LONG_ROW, FAILING_ROW, UNTRAINABLE_ROW = 7, 13, 29
"""In every fifty rows, one has a prompt of ``LONG`` tokens more, one cannot be judged by any stage, and one cannot be
trained where the plan has such groups."""
VOCABULARY: Final = 256
"""Tokens are bytes, as those of the shipped simulated engine; 0 is never drawn."""

WEIGHT_WORDS = 64
TENSOR_WORDS = 16
HEAD_BYTES = 20
BAD_EVERY = 64
"""One batch in this many has a loss that is not finite."""
FROZEN = 2
"""Index of the tensor that is the same in every version."""
REFERENCE_COLUMN = f"{STAGE}{REFERENCE}/logprobs"
LENGTHS, ODD = "lengths", "odd"
"""Names of a user's stages."""
TENSOR = "weights"


def stream(*words: object, nbytes: int) -> bytes:
    """Return ``nbytes`` bytes, the same for the same words."""
    return hashlib.shake_128(repr(words).encode()).digest(nbytes)


def tokens_of(
    sample_seed: int, lineage: Lineage, version: Version, first: int, end: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the tokens ``first .. end - 1`` that this version writes for this seed, with their log-probabilities.

    The log-probabilities are exact 24-bit numbers: they prove the seed, the version and the position of every token.
    """
    raw = np.frombuffer(stream("tokens", sample_seed, lineage, version, nbytes=4 * end), np.uint32)[first:]
    return (1 + raw % (VOCABULARY - 1)).astype(np.int32), -(raw >> 8).astype(np.float32) / np.float32(2**20)


@lru_cache(maxsize=100_000)
def sample_seed(seed: int, group: GroupId, origin: LeaseId, sample: int) -> int:
    """Return the seed of one sample's draws, as rollout workers derive it."""
    return int(np.random.SeedSequence((seed, group, origin, sample)).generate_state(1, np.uint64)[0])


def group_payload(
    seed: int, group: GroupId, lease: LeaseId, written: tuple[Lineage, Version, int], samples: int
) -> GroupPayload:
    """Return a group as a worker of that lease writes it: (lineage, version, tokens of each sample)."""
    lineage, version, tokens = written
    drawn = [tokens_of(sample_seed(seed, group, lease, n), lineage, version, 0, tokens) for n in range(samples)]
    return GroupPayload(
        prompt_ids=prompt_ids(group),
        lengths=np.full(samples, tokens, np.int32),
        token_ids=np.concatenate([ids for ids, _ in drawn]),
        logprobs=np.concatenate([logprobs for _, logprobs in drawn]),
        loss_mask=np.ones(samples * tokens, np.uint8),
        segments=np.array([(n, *written) for n in range(samples)], np.int64),
        finish=np.full(samples, Finish.STOP, np.uint8),
    )


def other_bytes(payload: GroupPayload) -> GroupPayload:
    """Return the same group with other tokens, which no engine writes."""
    return replace(payload, token_ids=VOCABULARY - payload.token_ids)


def is_written(seed: int, group: GroupId, origins: Iterable[LeaseId], payload: GroupPayload, started: int) -> bool:
    """Return whether an engine wrote exactly this group, every sample under the same one of ``origins``.

    ``started``: samples that were started; those of the payload are some of them, in their order.
    """
    rows: list[list[int]] = payload.segments.tolist()
    return np.array_equal(payload.prompt_ids, prompt_ids(group)) and any(
        _is_of(seed, group, origin, payload, rows, started) for origin in origins
    )


def _is_of(
    seed: int, group: GroupId, origin: LeaseId, payload: GroupPayload, rows: list[list[int]], started: int
) -> bool:
    number, start = 0, 0
    for sample, length in enumerate(payload.lengths.tolist()):
        segments = [(row[1], row[2], row[3]) for row in rows if row[0] == sample]
        ids, logprobs = payload.token_ids[start : start + length], payload.logprobs[start : start + length]
        start += length
        while number < started and not _drawn(sample_seed(seed, group, origin, number), segments, ids, logprobs):
            number += 1
        if number == started:
            return False
        number += 1
    return True


def _drawn(seed: int, segments: list[tuple[int, int, int]], ids: Array, logprobs: Array) -> bool:
    """Return whether this seed and these segments give these tokens."""
    first = 0
    for lineage, version, count in segments:
        end = first + count
        expected = tokens_of(seed, Lineage(lineage), Version(version), first, end)
        if not (np.array_equal(ids[first:end], expected[0]) and np.array_equal(logprobs[first:end], expected[1])):
            return False
        first = end
    return first == len(ids)


def columns_of(stage: str, payload: GroupPayload) -> dict[str, Array]:
    """Return the columns that a stage makes of a group, by full name: a function of its tokens."""
    if stage == REWARD:
        return {REWARD_COLUMN: rewards_of(payload)}
    if stage == REFERENCE:
        return {REFERENCE_COLUMN: -(payload.token_ids % 89).astype(np.float32) / 64}
    if stage == LENGTHS:
        return {f"{STAGE}{LENGTHS}/count": payload.lengths.astype(np.float32)}
    return {f"{STAGE}{ODD}/odd:token": (payload.token_ids % 2).astype(np.float32)}


def rewards_of(payload: GroupPayload) -> Array:
    """Return the reward of each sample, 0 or 1: a function of the tokens of all of them."""
    raw = stream("reward", payload.token_ids.tobytes(), nbytes=payload.num_samples)
    return (np.frombuffer(raw, np.uint8) % 2).astype(np.float32)


def sha_of(payload: GroupPayload) -> str:
    """Return the sha by which a shard names the pushed group, without the columns of stages."""
    return payload_digest(pieces(replace(payload, stages={}).to_arrays()))


@dataclass(frozen=True, slots=True)
class Learned:
    """State of the model after the batches so far."""

    steps: int = 0
    mixed: bytes = bytes(16)
    """A hash chain over the digests of the trained batches."""
    bad: bool = False
    """True if the last batch gave a loss that is not finite."""

    def after(self, digest: str) -> tuple["Learned", bool]:
        """Return the state after one more batch, and whether the batch was bad and left the weights as they were."""
        if not self.bad and int(digest[:8], 16) % BAD_EVERY == 0:
            return replace(self, bad=True), True
        mixed = hashlib.sha256(self.mixed + digest.encode()).digest()[:16]
        return Learned(steps=self.steps + 1, mixed=mixed), False

    def to_bytes(self) -> bytes:
        return self.steps.to_bytes(4, "little") + self.mixed + bytes([self.bad])

    @classmethod
    def from_bytes(cls, data: bytes) -> "Learned":
        return cls(steps=int.from_bytes(data[:4], "little"), mixed=data[4:20], bad=bool(data[20:21] == b"\1"))


def weights_of(seed: int, learned: Learned) -> bytes:
    """Return the weights of that state. They begin with the state itself."""
    head = learned.to_bytes()[:HEAD_BYTES]
    words = np.frombuffer(head + stream("weights", seed, head, nbytes=4 * WEIGHT_WORDS - len(head)), np.uint32).copy()
    frozen = np.frombuffer(stream("frozen", seed, nbytes=4 * TENSOR_WORDS), np.uint32)
    words[FROZEN * TENSOR_WORDS : (FROZEN + 1) * TENSOR_WORDS] = frozen
    return words.tobytes()


def are_weights(seed: int, data: bytes) -> bool:
    """Return whether these are the whole weights of one state, and not a mixture of two."""
    return data == weights_of(seed, Learned.from_bytes(data[:HEAD_BYTES]))


def tensors_of(data: bytes) -> list[tuple[str, Array]]:
    """Return the weights as named tensors."""
    words = np.frombuffer(data, np.int32).reshape(-1, TENSOR_WORDS)
    return [(f"{TENSOR}.{number}", tensor) for number, tensor in enumerate(words)]


def manifest_of(data: bytes) -> Manifest:
    """Return the manifest of these weights."""
    return lay_out((name, "int32", tensor.shape, digest(tensor.tobytes())) for name, tensor in tensors_of(data))


@cache
def _prompt_ids(row: int) -> NDArray[np.int32]:
    return text_bytes(str(row_of(row)["prompt"]))


def prompt_ids(group: GroupId) -> NDArray[np.int32]:
    """Return the prompt of a group."""
    return _prompt_ids(group % ROWS)


def row_of(number: int) -> dict[str, object]:
    """Return a prompt row. Some prompts are longer than a small engine accepts."""
    padding = "." * LONG if number % 50 == LONG_ROW else ""
    return {"prompt": f"prompt {number}{padding}", "number": number}


def always_fails(group: GroupId) -> bool:
    """Return whether every stage worker fails at every group of this prompt row."""
    return group % 50 == FAILING_ROW


def is_untrainable(group: GroupId) -> bool:
    """Return whether a trainer's model may raise at every group of this prompt row."""
    return group % 50 == UNTRAINABLE_ROW


def rows(*, seed: int, count: int) -> Sequence[dict[str, object]]:
    """Return the prompt source of simulated runs."""
    return [row_of(number) for number in range(count)]
