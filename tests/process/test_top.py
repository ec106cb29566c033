"""``staleflow top`` and the live view of ``staleflow run`` work in a real terminal and respond to keys."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from staleflow.configs.loading.load import addresses, read_run
from tests.monitor.test_replay import written
from tests.process.running import ROOT
from tests.process.terminal import ALTERNATE, MAIN, PROMPT, Terminal

SIMULATED = ROOT / "configs" / "simulated.toml"


def test_a_replay_is_driven_by_keys_and_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    with Terminal("top", written(tmp_path), "--replay", "--speed", "1000") as terminal:
        terminal.until("replay, the end")
        terminal.until(" 1000x ")
        assert "leaves" not in terminal.until("engine▲")
        terminal.press("5")
        terminal.until("ago  event")
        terminal.until("scheduler started: bound 1, batches of 1")
        terminal.press("/version 1\r")
        terminal.until("only 'version 1'")
        terminal.until_gone("scheduler started")
        terminal.press("g7\r")
        terminal.until("group 7: trained by step 0")
        terminal.until("trained: step 0 is done, version 1 exists")
        terminal.press("q")
        terminal.until("3:stages")
        terminal.press("?")
        terminal.until("the story of any group")
        terminal.press("x")
        terminal.until("3:stages")
        terminal.press("q")
        assert terminal.ended() == 0
        assert terminal.written.count(ALTERNATE) == terminal.written.count(MAIN) == 1
        assert terminal.modes_now == terminal.modes


def test_after_ctrl_z_and_fg_the_keys_are_heard_again(tmp_path: Path) -> None:
    with Terminal("top", written(tmp_path), "--replay", "--speed", "1000", shell=True) as terminal:
        terminal.until("replay, the end")
        terminal.press("\x1a")
        terminal.until_written(b"Stopped", 1)
        assert terminal.written.count(ALTERNATE) == terminal.written.count(MAIN) == 1, "the prompt has its own screen"
        terminal.press("fg\n")
        terminal.until_written(ALTERNATE, 2)
        terminal.press("?")
        terminal.until("the story of any group")
        terminal.press("\x1a")
        terminal.until_written(b"Stopped", 2)
        terminal.press("bg\n")
        terminal.until_written(PROMPT.encode(), 4)
        assert terminal.written.count(ALTERNATE) == 2, "in the background nothing is drawn"
        terminal.press("fg\n")
        terminal.until_written(ALTERNATE, 3)
        terminal.press("x")
        terminal.until("engine▲")
        terminal.press("q")
        terminal.until_written(MAIN, 3)
        terminal.press("echo code $?; exit\n")
        terminal.until("code 0")
        assert terminal.ended() == 0
        assert terminal.written.count(ALTERNATE) == terminal.written.count(MAIN) == 3
        assert terminal.modes_now == terminal.modes


@pytest.mark.parametrize(("columns", "rows"), [(200, 60), (60, 16)])
def test_it_fills_any_terminal(tmp_path: Path, columns: int, rows: int) -> None:
    with Terminal("top", written(tmp_path), "--replay", "--speed", "1000", columns=columns, rows=rows) as terminal:
        terminal.until("replay, the end" if columns > 100 else "replay")
        terminal.until("▓ staged")
        terminal.until(" q leave ")
        assert terminal.lines[0].startswith("staleflow ")
        assert " q leave " in terminal.lines[-1]
        terminal.press("\x03")
        assert terminal.ended() == 0


def test_a_terminal_that_cannot_be_drawn_on_gets_lines(tmp_path: Path) -> None:
    with Terminal("top", written(tmp_path), "--replay", "--speed", "1000", term="dumb") as top:
        assert top.ended() == 0
        assert "replay, the end" in top.text
        assert ALTERNATE not in top.written


@pytest.mark.xdist_group("machine")
def test_a_run_in_such_a_terminal_says_lines_too(run_dir: Path) -> None:
    short = ("trainer.steps=3", "rollout.simulated.k2=0.001", "trainer.simulated_step_s=0.02")
    with Terminal("run", SIMULATED, "--run-dir", run_dir, *short, term="dumb", rows=40) as run:
        assert run.ended() == 0
        assert b"  starting servers\r\n" in run.written
        assert "3 of 3" in run.text


@pytest.mark.xdist_group("machine")
def test_in_the_view_of_a_run_q_does_nothing_and_after_ctrl_z_its_keys_are_heard(run_dir: Path) -> None:
    longer = ("trainer.steps=100000", "trainer.simulated_step_s=0.05")
    with Terminal("run", SIMULATED, "--run-dir", run_dir, *longer, shell=True) as run:
        run.until("of 100,000")
        run.press("\x1a")
        run.until_written(PROMPT.encode(), 2)
        run.press("fg\n")
        run.until("6:processes")
        run.press("?")
        run.until("Ctrl-C         end the run")
        run.press("q")
        run.until("6:processes")
        run.press("q5")
        run.until("ago  event")
        run.press("\x03")
        run.until_written(PROMPT.encode(), 3)
        assert "interrupted" in run.text
        run.press("exit $?\n")
        assert run.ended() == 130
        assert run.modes_now == run.modes


@pytest.mark.xdist_group("machine")
def test_a_run_is_watched_from_beside_and_ended_from_within(run_dir: Path) -> None:
    longer = ("trainer.steps=100000", "trainer.simulated_step_s=0.05")
    with Terminal("run", SIMULATED, "--run-dir", run_dir, *longer) as run:
        run.until("of 100,000")
        run.press("5")
        run.until("published, ")
        with Terminal("top", run_dir, columns=200, rows=60) as top:
            top.until("versions")
            top.until("▓ staged")
            for words in ("2 engines", "rollout-1", "bound 2", "trainer", "stages", "events", "processes", "why "):
                top.until(words)
            top.press("q")
            assert top.ended() == 0
        address = addresses(read_run(run_dir), run_dir).scheduler
        from_afar = json.loads(_said("top", "--connect", address, "--once", "--json"))
        assert (from_afar["name"], from_afar["bound"]) == (run_dir.name, 2)
        assert from_afar["loss"] == 0.0, "the scheduler says where the curves are"
        run.press("\x03")
        assert run.ended() == 130
        assert "interrupted" in run.text
        assert run.modes_now == run.modes


def _said(*words: object) -> str:
    command = [sys.executable, "-m", "staleflow.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
