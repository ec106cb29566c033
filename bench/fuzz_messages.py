"""Malformed messages: a valid one, changed in its structure or in its bytes.

A header is a tree of lists and scalars on the wire, so one mutator serves all messages. It replaces a value by another,
mostly of its kind, drops, doubles, moves and nests pieces, and then perhaps changes the encoded bytes. Frames are cut,
swapped, doubled and filled with other bits.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random
from typing import Any, NamedTuple, cast

import msgspec

from staleflow.protocols.wire.codec import encode_request
from staleflow.protocols.wire.messages import Request

INTEGERS = (
    *(-(2**63), -(2**53), -(2**31) - 1, -(2**31), -2, -1, 0, 1, 2, 3, 7, 255, 256, 2**31 - 1, 2**31, 2**32, 2**40),
    *(2**53, 2**61, 2**61 + 1, 2**62, 2**62 + 3, 2**63 - 1, 2**63, 2**64 - 1),
)
"""Ends of ranges, and numbers with a special meaning in the ledger's store."""
FLOATS = (0.0, -1.5, 1e308, -1e308, 5e-324, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    *("", "x", "rollout-0", "reward", "trainer", "trajectories", "parameters", "stage", "stage/reward/reward", "\0"),
    *("\ud7ff" * 40, "a" * 300, "../../up", "float32", "bfloat16", "bool", "int64", "0" * 64, "token_ids", "segments"),
    *("expired", "aborted", "filtered", "surplus", "rollback", "overdue", "stage/reference/logprobs"),
)
SCALARS: tuple[Any, ...] = (None, True, False, b"", b"\xff\xfe", [], {}, [[]], {"a": 1}, 0, -1, 2**63, *FLOATS, *TEXTS)
MARKS = (0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xC0, 0xC1, 0xC4, 0xC7, 0xCA, 0xCB, 0xCF, 0xD3, 0xD9, 0xDB, 0xDD, 0xDF, 0xFF)
"""Bytes that begin a value in msgpack."""


class Said(NamedTuple):
    """A message and its sender."""

    peer: str
    body: Request
    frames: Sequence[bytes | memoryview] = ()


class Raw(NamedTuple):
    """The same message as bytes."""

    peer: str
    header: bytes
    frames: list[bytes]


class Mutator:
    """Changes messages; the same seed gives the same changes."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._changes: tuple[Callable[[list[Any], int], None], ...] = (
            *(self._replace,) * 12,
            self._drop,
            self._double,
            self._double,
            self._move,
            self._nest,
        )
        self.id = 0

    def plain(self, said: Said) -> Raw:
        """The message unchanged."""
        self.id += 1
        return Raw(said.peer, encode_request(self.id, said.body), [bytes(frame) for frame in said.frames])

    def changed(self, said: Said) -> Raw:
        """The message with one to four changes."""
        peer, header, frames = self.plain(said)
        random = self._random
        choice = random.random()
        if choice < 0.75:
            header = self._tree_changed(header)
        if choice > 0.65:
            header = self._bytes_changed(header)
        if frames and random.random() < 0.5:
            frames = self._frames_changed(frames)
        elif random.random() < 0.02:
            frames = [*frames, random.randbytes(random.randrange(40))]
        return Raw(peer, header, frames)

    def noise(self, peer: str) -> Raw:
        """Bytes that never were a message."""
        random = self._random
        return Raw(peer, bytes(random.choices(MARKS, k=random.randrange(30))), [])

    # --- structure -----------------------------------------------------------------------------------------------

    def _tree_changed(self, header: bytes) -> bytes:
        tree = msgspec.msgpack.decode(header)
        for _ in range(self._random.choice((1, 1, 1, 2, 3))):
            places = _places(tree[2:]) if self._random.random() < 0.95 else _places(tree)
            if places:
                self._random.choice(self._changes)(*self._random.choice(places))
        with suppress(RecursionError):  # nested deeper than the encoder could write it
            return msgspec.msgpack.encode(tree)
        return header

    def _replace(self, parent: list[Any], index: int) -> None:
        """Another value, mostly of the same kind."""
        random, old = self._random, parent[index]
        if random.random() < 0.1:
            parent[index] = random.choice(SCALARS)
        elif isinstance(old, bool):
            parent[index] = not old
        elif isinstance(old, int):
            near = max(-(2**63), min(old + random.choice((-1, 1, 2, 100)), 2**64 - 1))
            parent[index] = near if random.random() < 0.4 else random.choice(INTEGERS)
        elif isinstance(old, str):
            parent[index] = random.choice(TEXTS) if random.random() < 0.8 else old[:-1]
        elif isinstance(old, float):
            parent[index] = random.choice(FLOATS)
        elif isinstance(old, list) and old:
            items: list[Any] = cast("Any", old)
            parent[index] = random.sample(items, random.randrange(len(items) + 1))

    def _drop(self, parent: list[Any], index: int) -> None:
        del parent[index]

    def _double(self, parent: list[Any], index: int) -> None:
        parent[index:index] = [parent[index]] * self._random.choice((1, 1, 2, 30))

    def _move(self, parent: list[Any], index: int) -> None:
        other = self._random.randrange(len(parent))
        parent[index], parent[other] = parent[other], parent[index]

    def _nest(self, parent: list[Any], index: int) -> None:
        for _ in range(self._random.choice((1, 1, 5, 200))):
            parent[index] = [parent[index]]

    # --- bytes ---------------------------------------------------------------------------------------------------

    def _bytes_changed(self, header: bytes) -> bytes:
        data, random = bytearray(header), self._random
        for _ in range(random.choice((1, 1, 2, 4))):
            place = random.randrange(len(data) + 1)
            match random.randrange(5):
                case 0 if place < len(data):
                    data[place] ^= 1 << random.randrange(8)
                case 1 if place < len(data):
                    data[place] = random.choice(MARKS)
                case 2:
                    del data[place : place + random.choice((1, 1, 4, 1000))]
                case 3:
                    data[place:place] = bytes(random.choices(MARKS, k=random.choice((1, 2, 9))))
                case _:
                    data += data[place:]
        return bytes(data)

    def _frames_changed(self, frames: list[bytes]) -> list[bytes]:
        frames, random = list(frames), self._random
        index = random.randrange(len(frames))
        frame = bytearray(frames[index])
        match random.randrange(6):
            case 0:
                del frames[index]
            case 1:
                frames.insert(random.randrange(len(frames) + 1), bytes(frame))
            case 2:
                other = random.randrange(len(frames))
                frames[index], frames[other] = frames[other], frames[index]
            case 3:
                frames[index] = bytes(frame[: random.randrange(len(frame) + 1)])
            case 4 if frame:
                start = random.randrange(len(frame))
                bits = random.choice((b"\xff" * 8, b"\0" * 8, b"\0\0\xc0\x7f" * 2, random.randbytes(8)))
                frame[start : start + 8] = bits[: len(frame[start : start + 8])]
                frames[index] = bytes(frame)
            case _:
                frames[index] = bytes(frame) + random.randbytes(random.choice((1, 4, 8)))
        return frames


def _places(tree: object) -> list[tuple[list[Any], int]]:
    """Every position in a tree of lists; a map is treated as one value."""
    result: list[tuple[list[Any], int]] = []
    waiting: list[object] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            items: list[Any] = cast("Any", node)
            result += [(items, index) for index in range(len(items))]
            waiting += items
    return result
