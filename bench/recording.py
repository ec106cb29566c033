"""Record the screens of ``staleflow top`` for a finished run, as one animated picture.

    python -m bench.recording runs/quickstart-... docs/recordings/top.svg --frames 24

The screens are the monitor's own, drawn from the run's trace at evenly spaced times. Parts common to all screens are in
the file once. The picture loads no font or other resource. A viewer with ``prefers-reduced-motion`` sees the middle of
the run without motion.
"""

import argparse
import io
import re
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from staleflow.configs.loading.load import read_run
from staleflow.monitor.history import History
from staleflow.monitor.look import Look
from staleflow.monitor.model import board
from staleflow.monitor.screen import dashboard
from staleflow.monitor.sources import Replay

WIDTH, HEIGHT = 110, 26
LOOKS = 10
"""Polls of the run between two frames: sparklines need history."""
FRAME_S = 0.8
_DRAWN = re.compile(r"<rect [^>]*?/>|<text [^>]*>[^<]*</text>")
_RULE = re.compile(r"\.top-(r\d+) \{(.*?)\}")
_SCREEN = '<g class="top-matrix">'


def screens(run_dir: Path, frames: int) -> list[str]:
    """SVG of the screen at up to ``frames`` moments of the run, without moments that have no engines."""
    trace, config = run_dir / "trace.jsonl", read_run(run_dir)
    whole = Replay(trace)
    whole.to_the_end()
    replay, history, drawn = Replay(trace, config.trainer.steps), History(), list[str]()
    for _ in range(frames):
        for _ in range(LOOKS):
            replay.advance(whole.at_s / (frames * LOOKS))
            history.see(replay.snapshot())
        shown = board(config.name, replay.snapshot(), history)
        if not shown.instances:
            continue  # before the first engine came, or after the last one left
        console = Console(record=True, width=WIDTH, height=HEIGHT, file=io.StringIO(), force_terminal=True)
        console.print(dashboard(shown, Look(), WIDTH, HEIGHT))
        plain = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
        plain = re.sub(r"<!--.*?-->", "", plain).replace("Fira Code", "DejaVu Sans Mono")
        drawn.append(console.export_svg(title="staleflow top", code_format=plain, unique_id="top"))
    return drawn


def film(drawn: list[str]) -> str:
    """One SVG of many: a group for each screen, shown in turn, over the common parts."""
    names = dict[str, str]()
    """Style of a word -> its class; every screen numbers its styles from the start."""
    frames = list[list[str]]()
    for svg in drawn:
        rules = dict(_RULE.findall(svg))
        classes = {old: names.setdefault(rule.strip(), f"s{len(names)}") for old, rule in rules.items()}
        content = svg[svg.index('<g transform="translate(9, 41)"') :]
        for old, new in classes.items():
            content = content.replace(f'class="top-{old}"', f'class="{new}"')
        frames.append([one for one in _DRAWN.findall(content) if not one.endswith(">\n</text>")])
    common = set(frames[0]).intersection(*frames[1:])
    middle, turn_s = len(frames) // 2, len(frames) * FRAME_S
    style = [f".{name} {{ {rule} }}" for rule, name in names.items()]
    style += [
        f".f {{ opacity: 0; animation: turn {turn_s:g}s step-end infinite; }}",
        f"@keyframes turn {{ 0% {{ opacity: 1; }} {100 / len(frames):.6f}%, 100% {{ opacity: 0; }} }}",
        "@media (prefers-reduced-motion) { .f { animation: none; } .f.m { opacity: 1; } }",
    ]
    moving = list[str]()
    for number, frame in enumerate(frames):
        own = "".join(one for one in frame if one not in common)
        still = " m" if number == middle else ""
        moving.append(f'<g class="f{still}" style="animation-delay:{number * FRAME_S:.3g}s">{own}</g>')
    first = drawn[0]
    head, foot = first[: first.index(_SCREEN)], first[first.rindex("</g>\n    </g>") :]
    head = _RULE.sub("", head).replace("</style>", "\n".join(style) + "\n</style>")
    head = re.sub(r'(clip-path="url\(#top-clip-terminal\)">).*', r"\1", head, flags=re.DOTALL)
    return head + _SCREEN + "".join(one for one in frames[0] if one in common) + "\n".join(moving) + foot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--frames", type=int, default=24)
    given = parser.parse_args()
    given.picture.write_text(film(screens(given.run_dir, given.frames)))


if __name__ == "__main__":
    main()
