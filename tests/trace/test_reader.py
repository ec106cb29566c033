"""Every trace line is validated when it is read, and additions of a newer staleflow are accepted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from staleflow.configs.errors import ConfigError
from staleflow.trace.reader import as_written, read_events, read_lines, typed
from tests.report.traces import PLAIN, event, save

SEAL = next(line for line in PLAIN if line["ev"] == "seal")


def test_fields_and_kinds_that_are_not_known_stay_readable(tmp_path: Path) -> None:
    newer = [*PLAIN, SEAL | {"colour": "red"}, event("tomorrow", 13, anything=[1])]
    trace = save(tmp_path, newer)
    assert list(read_events(trace)) == newer
    lines = list(read_lines(trace))
    assert [line.ev for line in lines] == [line["ev"] for line in newer]
    assert [line.seq for line in lines if line.event is None] == [newer[-1]["seq"]]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"step": None}, r"Expected `int`, got `null` - at `\$.step`"),
        ({"step": 2**50 + 1}, r"Expected `int` <= .* - at `\$.step`"),
        ({"members": [{"group": 1}]}, r"missing required field `lease` - at `\$.members\[0\]`"),
        ({"t": 2**63}, r"Expected `int` <= .* - at `\$.t`"),
        ({"m": -1}, r"Expected `int` >= 0 - at `\$.m`"),
        ({"run": 5}, r"Expected `str`, got `int` - at `\$.run`"),
        ({"ev": "tomorrow", "seq": "x"}, r"Expected `int`, got `str` - at `\$.seq`"),
        ({"ev": ["seal"]}, r"Expected `str`, got `array` - at `\$.ev`"),
    ],
)
def test_a_line_that_is_no_event_is_named_with_its_field(tmp_path: Path, change: dict[str, Any], what: str) -> None:
    trace = save(tmp_path, [*PLAIN[:3], SEAL | change])
    with pytest.raises(ConfigError, match=f"line 4 is not an event: .*{what}"):
        list(read_events(trace))


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff", b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"])
@pytest.mark.parametrize("decode", [typed, as_written])
def test_whatever_the_bytes_there_is_one_kind_of_error(raw: bytes, decode: Callable[[bytes], object]) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(raw)
