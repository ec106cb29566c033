"""Lines appended to a file are reported once, a whole line at a time."""

from pathlib import Path

from staleflow.launch.machine import Tail


def test_lines_are_told_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("of the process before\n")
    tail = Tail(path)
    assert tail.take() == []
    with path.open("a") as file:
        file.write("first\nsec")
    assert tail.take() == ["first"]
    with path.open("a") as file:
        file.write("ond\n")
    assert (tail.take(), tail.take()) == (["second"], [])


def test_a_file_that_is_not_there_yet_says_nothing(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "out")
    assert tail.take() == []
    (tmp_path / "out").write_bytes(b"\xff\n")
    assert tail.take() == ["�"]
