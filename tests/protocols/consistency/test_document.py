"""docs/consistency.md matches the code: its table is generated here, and every test that it cites exists."""

import os
import re
from collections.abc import Callable
from pathlib import Path

from staleflow.protocols.consistency.effects import Effect, Rejected, ReleaseWhy
from staleflow.protocols.consistency.errors import TransitionError
from staleflow.protocols.consistency.events import Occupy, Push, Release
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Segment, Step, Version, WorkerId
from tests.protocols.consistency.scenes import Scene

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "consistency.md"
STATES = ("never seen", "released", "leased", "pushed", "occupied", "claimed", "sealed", "consumed", "retired")
GROUP = 1


def scene_in(state: str) -> Scene:
    """Return a ledger in which group 1 is in ``state``, under lease 2 if it has or had one."""
    scene = Scene(max_staleness=2, batch_size=2)
    scene.reserve(0)
    if state == "never seen":
        return scene
    scene.reserve(GROUP)
    steps: list[tuple[str, Callable[[], object]]] = [
        ("leased", lambda: scene.push(GROUP)),
        ("pushed", lambda: scene.occupy(GROUP)),
        ("claimed" if state == "claimed" else "occupied", lambda: scene.finish(0)),
        ("sealed", lambda: scene.train(0)),
        ("consumed", lambda: scene.checkpointed(1)),
    ]
    if state == "released":
        scene.release(GROUP)
        return scene
    for name, onward in steps:
        if name == state:
            break
        onward()
    if state == "claimed":
        scene.claim(GROUP, step=0)
    return scene


def under_current_lease(lease: int) -> list[tuple[str, Callable[[Scene], tuple[Effect, ...]]]]:
    group, number, worker = GroupId(GROUP), LeaseId(lease), WorkerId("w")
    segments = (Segment(Lineage(0), Version(0), 10),)
    push = Push(
        group=group,
        lease=number,
        worker=worker,
        shard=0,
        sha="sha-1-2",
        nbytes=1,
        truncated=False,
        segments=segments,
        sequence_tokens=1,
    )
    return [
        ("push", lambda scene: scene.apply(push)),
        ("occupy", lambda scene: scene.apply(Occupy(group=group, lease=number))),
        ("release", lambda scene: scene.apply(Release(group=group, lease=number, why=ReleaseWhy.ABORTED))),
    ]


def acts() -> list[tuple[str, Callable[[Scene], tuple[Effect, ...]]]]:
    return [
        ("reserve, same worker", lambda scene: scene.reserve(GROUP)),
        ("reserve, another", lambda scene: scene.reserve(GROUP, worker="x")),
        *under_current_lease(2),
        *((f"{name}, old lease", act) for name, act in under_current_lease(1)),
        ("claim", lambda scene: scene.claim(GROUP, step=scene.machine.next_step)),
        ("drop", lambda scene: scene.drop(GROUP)),
        ("quarantine", lambda scene: scene.quarantine(GROUP)),
    ]


def outcome(state: str, act: Callable[[Scene], tuple[Effect, ...]]) -> str:
    scene = scene_in(state)
    try:
        effects = act(scene)
    except TransitionError:
        return "*raises*"
    if isinstance(effects[0], Rejected):
        return effects[0].code.value
    return "**" + " ".join(type(effect).__name__.lower() for effect in effects) + "**"


def table() -> str:
    rows = [f"| | {' | '.join(STATES)} |", "|---" * (len(STATES) + 1) + "|"]
    rows += [f"| {name} | {' | '.join(outcome(state, act) for state in STATES)} |" for name, act in acts()]
    return "\n".join(rows)


def test_the_transition_table_is_what_the_code_does() -> None:
    page = PAGE.read_text()
    head, _, rest = page.partition("<!-- transitions -->\n")
    stored, _, tail = rest.partition("<!-- end -->")
    if os.environ.get("STALEFLOW_WRITE_DOCS"):
        PAGE.write_text(f"{head}<!-- transitions -->\n{table()}\n<!-- end -->{tail}")
        return
    assert stored.strip() == table()


def test_every_test_that_the_page_cites_exists() -> None:
    cited = set(re.findall(r"`(test_[a-z0-9_]+)`", PAGE.read_text()))
    sources = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert cited
    assert sorted(name for name in cited if f"def {name}(" not in sources) == []


def test_every_sentence_names_its_test() -> None:
    sentences = re.findall(r"^(\d+)\. (.*)$", PAGE.read_text(), re.MULTILINE)
    assert [int(number) for number, _ in sentences] == list(range(1, len(sentences) + 1))
    assert [number for number, text in sentences if "`test_" not in text] == []


def test_every_state_of_the_table_is_reached() -> None:
    assert scene_in("retired").machine.retired(GroupId(GROUP))
    assert scene_in("claimed").view(GROUP).claimed
    assert scene_in("sealed").machine.next_step == Step(1)
    assert scene_in("consumed").machine.version == Version(1)
