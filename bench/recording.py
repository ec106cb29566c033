"""A picture of what ``staleflow top`` shows of a run that was, for pages that cannot move.

    python -m bench.recording runs/quickstart-... docs/recordings/top.svg --at 0.5

The screen is the monitor's own, drawn from the run's trace as it was at that share of its time. Whoever looks at it
fetches no font nor anything else.
"""

import argparse
import io
import re
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from staleflow.configs.load import read_run
from staleflow.monitor.history import History
from staleflow.monitor.look import Look
from staleflow.monitor.model import board
from staleflow.monitor.screen import dashboard
from staleflow.monitor.sources import Replay

WIDTH, HEIGHT = 110, 26
STEPS = 200
"""Looks at the run before the picture is drawn: sparklines have a past."""


def picture(run_dir: Path, share: float) -> str:
    """SVG of the screen at that share of the run."""
    trace = run_dir / "trace.jsonl"
    whole = Replay(trace)
    whole.to_the_end()
    replay, history = Replay(trace, read_run(run_dir).trainer.steps), History()
    snapshot = replay.snapshot()
    for _ in range(STEPS):
        history.see(snapshot)
        replay.advance(share * whole.at_s / STEPS)
        snapshot = replay.snapshot()
    history.see(snapshot)
    console = Console(record=True, width=WIDTH, height=HEIGHT, file=io.StringIO(), force_terminal=True)
    console.print(dashboard(board(read_run(run_dir).name, snapshot, history), Look(), WIDTH, HEIGHT))
    plain = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    plain = re.sub(r"<!--.*?-->", "", plain).replace("Fira Code", "DejaVu Sans Mono")
    return console.export_svg(title="staleflow top", code_format=plain, unique_id="top")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--at", type=float, default=0.5, help="share of the run's time, from 0 to 1")
    given = parser.parse_args()
    given.picture.write_text(picture(given.run_dir, given.at))


if __name__ == "__main__":
    main()
