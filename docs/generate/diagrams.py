"""Diagrams of processes and of what passes between them, as pictures that need no script and no network."""

from collections.abc import Iterator, Sequence

from docs.generate.svg import box, picture, pointer, words

SMALL = "middle small"


def architecture() -> str:
    """The processes of a run and their messages."""
    return picture(1000, 560, _architecture(), "Rollout workers, servers, stage workers and the trainer of a run")


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
    yield from _node(20, 40, 150, 350, "rollout workers", "vLLM or transformers", "engine")
    yield from _node(830, 40, 150, 350, "trainer", "torch, FSDP2 or", "DeepSpeed ranks")
    yield from _node(420, 40, 210, 84, "scheduler", "ledger · strategies · trace", "(LMDB)")
    yield from _node(470, 170, 160, 84, "parameter server", "versions (files,", "mapped)")
    yield from _node(420, 306, 210, 84, "trajectory servers", "payload · stage queue", "(LMDB)")
    yield from _node(420, 456, 210, 84, "stage workers", "reward · reference · critic ·", "your own")
    yield from _across(416, 174, 66, "assign · pull · interrupt · abort")
    yield from _across(174, 416, 104, "reports")
    yield from _across(466, 174, 212, "weights")
    yield from _across(416, 174, 330, "prompt rows, samples that move")
    yield from _across(174, 416, 370, "finished groups, samples that move")
    yield from _across(634, 826, 82, "sealed batch (names)")
    yield from _across(826, 634, 212, "new version")
    yield from _across(634, 826, 348, "payload of the batch")
    yield pointer(550, 166, 550, 128)
    yield words(560, 152, "register version", "small")
    yield pointer(440, 302, 440, 128)
    yield words(448, 286, "register push · occupy · release", "small")
    yield pointer(480, 394, 480, 452)
    yield words(470, 428, "groups", "end small")
    yield pointer(570, 452, 570, 394)
    yield words(580, 428, "columns: rewards, values a token", "small")


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
    yield from _across(396, 244, 205, "weights, once a machine")
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
