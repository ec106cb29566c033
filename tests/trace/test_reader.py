"""Every trace line is validated when it is read, and additions of a newer staleflow are accepted."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from staleflow.configs.errors import ConfigError
from staleflow.trace.reader import decoded
from staleflow.trace.writer import read_events
from tests.report.traces import PLAIN, event, save

SEAL = next(line for line in PLAIN if line["ev"] == "seal")


def test_fields_and_kinds_that_are_not_known_stay_readable(tmp_path: Path) -> None:
    newer = [*PLAIN, SEAL | {"colour": "red"}, event("tomorrow", 13, anything=[1])]
    assert list(read_events(save(tmp_path, newer))) == newer


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
def test_whatever_the_bytes_there_is_one_kind_of_error(raw: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decoded(raw)
