"""Diagrams of processes and of what passes between them, as pictures that need no script and no network."""

from collections.abc import Iterator, Sequence

from docs.generate.svg import box, picture, pointer, words

SMALL = "middle small"


def architecture() -> str:
    """The processes of a run and their messages."""
    return picture(1000, 730, _architecture(), "Processes of a run and the requests that they send to each other")


def machines() -> str:
    """Which machine runs which process."""
    return picture(980, 320, _machines(), "Head, rollout machines and trainer machines of a run")


def stages() -> str:
    """The graph of ``configs/stages.toml``."""
    return picture(900, 190, _stages(), "Stages from the push of a group to the step that trains it")


def _node(x: float, y: float, width: float, height: float, title: str, *lines: str) -> Iterator[str]:
    """A box with a bold title and small lines below it, all centred."""
    yield box(x, y, width, height, "box")
    top = y + height / 2 - 8 * len(lines) + 5
    yield words(x + width / 2, top, title, "middle bold")
    for number, text in enumerate(lines, 1):
        yield words(x + width / 2, top + 16 * number, text, SMALL)


def _across(x1: float, x2: float, y: float, text: str) -> Iterator[str]:
    yield words((x1 + x2) / 2, y - 6, text, SMALL)
    yield pointer(x1, y, x2, y)


def _architecture() -> Iterator[str]:
    yield from _node(20, 40, 140, 540, "rollout workers", "one per engine", "(vLLM, transformers)")
    yield from _node(840, 40, 140, 540, "trainer", "one process per rank", "(torch, FSDP2,", "DeepSpeed)")
    yield from _node(415, 40, 200, 190, "scheduler", "ledger · strategies · trace", "(LMDB)")
    yield from _node(480, 290, 135, 80, "parameter server", "versions (files)")
    yield from _node(
        415, 440, 200, 140, "trajectory servers", "one process per shard", "payload · stage queue", "(LMDB, files)"
    )
    yield from _node(415, 650, 200, 70, "stage workers", "reward · reference · critic ·", "your own")
    for y, request, content in (
        (76, "Report", "reply: assign, pull, interrupt, abort, yield"),
        (134, "Operations", "release, yield"),
        (192, "Pulled", "loaded version"),
    ):
        yield from _request(164, 411, y, request, content, "dotted")
    for y, request, content in (
        (76, "Join", "version of its checkpoint; reply: trainer term"),
        (134, "GetBatch, GetClaims", "reply: names of the groups to train"),
        (192, "RegisterCheckpoint", "version"),
    ):
        yield from _request(836, 619, y, request, content, "dotted")
    yield from _request(164, 476, 330, "GetManifest, GetChunk", "reply: weights")
    yield from _request(836, 619, 330, "BeginPublish … CommitPublish", "new weights")
    yield from _request(164, 411, 466, "GetRows", "reply: prompt rows, samples that move")
    yield from _request(164, 411, 514, "PushGroups", "finished groups")
    yield from _request(164, 411, 562, "PutPartial", "samples that move")
    yield from _request(836, 619, 510, "GetGroups", "reply: payload of the batch")
    yield pointer(547, 286, 547, 234, "dotted")
    yield words(556, 257, "RegisterVersion", "small")
    yield words(556, 272, "GetRetainedVersions", "small")
    yield pointer(440, 436, 440, 234, "dotted")
    yield words(448, 390, "Operations", "small")
    yield words(448, 405, "register push, occupy, release, quarantine", "small")
    yield words(448, 425, "GetRetained (reply: groups to keep)", "small")
    yield pointer(470, 646, 470, 584)
    yield words(462, 612, "GetStageWork", "end small")
    yield words(462, 627, "reply: groups", "end small")
    yield pointer(560, 646, 560, 584)
    yield words(568, 612, "PutStageResults", "small")
    yield words(568, 627, "columns, such as rewards", "small")
    yield pointer(20, 670, 70, 670, "dotted")
    yield words(80, 674, "request and reply carry names and numbers", "small")
    yield pointer(20, 700, 70, 700)
    yield words(80, 704, "request or reply carries payload or weights", "small")


def _request(x1: float, x2: float, y: float, request: str, content: str, kind: str = "line") -> Iterator[str]:
    """An arrow from the process that sends the request, with the request above and the content below it."""
    yield words((x1 + x2) / 2, y - 6, request, SMALL)
    yield words((x1 + x2) / 2, y + 15, content, SMALL)
    yield pointer(x1, y, x2, y, kind)


def _machines() -> Iterator[str]:
    for x, width, title in ((20, 240, "rollout machines"), (380, 240, "head"), (740, 220, "trainer machines")):
        yield box(x, 30, width, 280, "empty")
        yield words(x + width / 2, 22, title, "middle bold")
    yield from _node(40, 115, 90, 50, "engine")
    yield from _node(150, 115, 90, 50, "engine")
    yield from _node(40, 180, 200, 50, "relay")
    yield from _node(400, 50, 200, 50, "scheduler")
    yield from _node(400, 115, 200, 50, "trajectory servers")
    yield from _node(400, 180, 200, 50, "parameter server")
    yield from _node(400, 245, 200, 50, "stages without a model", "the reward, for example")
    yield from _node(760, 115, 180, 115, "ranks of the trainer")
    yield from _node(760, 245, 180, 50, "stages with a model")
    yield from _across(244, 396, 140, "groups")
    yield from _across(396, 244, 205, "weights, once per machine")
    yield from _across(604, 756, 140, "sealed batch")
    yield from _across(756, 604, 205, "new version")


def _stages() -> Iterator[str]:
    nodes: Sequence[tuple[float, float, str]] = (
        (20, 75, "push"),
        (180, 30, "length"),
        (180, 120, "repeats"),
        (400, 30, "reward"),
        (600, 75, "credit"),
        (780, 75, "train"),
    )
    for x, y, name in nodes:
        yield from _node(x, y, 100, 40, name)
    yield pointer(124, 88, 176, 54)
    yield pointer(124, 102, 176, 136)
    yield from _across(284, 396, 44, "closeness")
    yield pointer(284, 134, 396, 62)
    yield words(322, 96, "share", "end small")
    yield pointer(504, 50, 596, 86)
    yield words(560, 60, "reward", "small")
    yield pointer(284, 144, 596, 104)
    yield words(440, 142, "seen", SMALL)
    yield pointer(704, 95, 776, 95)
