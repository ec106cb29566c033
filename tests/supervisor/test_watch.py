"""What is new in a file that grows."""

from pathlib import Path

from staleflow.supervisor.watch import NewLines


def test_each_whole_line_is_taken_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    new = NewLines(path)
    assert new.take() == ()
    path.write_text('{"step": 0}\n{"step": 1}\n{"st')
    assert new.take() == ({"step": 0}, {"step": 1})
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert new.take() == ({"step": 2},)
    assert new.take() == ()
