"""Each of a hundred thousand malformed messages decodes or is rejected, and causes nothing else.

``bench/fuzz.py`` describes how the messages are made; ``bench/results`` has the long run of ten million.
"""

from pathlib import Path
from random import Random

import pytest

from bench.fuzz import SHARES, CodecTarget, Fuzzer, fuzz
from bench.fuzz_messages import Mutator, Raw, Said
from bench.fuzz_target import UNREADABLE, Finding, must_be_unchanged
from staleflow.protocols.consistency.effects import Code
from staleflow.protocols.wire.messages import GetStatus, Ping, Refusal

MESSAGES = 100_000
SEED = 0


@pytest.mark.parametrize("target", SHARES)
async def test_any_bytes_give_a_message_or_a_refusal_and_never_anything_else(target: str, tmp_path: Path) -> None:
    share = round(MESSAGES * SHARES[target])
    report = await fuzz(target, share, SEED, tmp_path / "run")
    assert report.messages == share
    assert share * 0.2 < report.outcomes[UNREADABLE] < share * 0.8  # messages were both readable and unreadable
    refused = {outcome for outcome in report.outcomes if any(f" {code}" in outcome for code in Code)}
    assert (len(refused) > 5) is (target != "codec")


async def test_the_same_seed_makes_the_same_messages(tmp_path: Path) -> None:
    first, second = [await fuzz("scheduler", 2_000, 3, tmp_path / name) for name in "ab"]
    assert first.lines == second.lines
    assert first.outcomes == second.outcomes


async def test_whatever_else_is_raised_is_a_finding_that_shows_the_bytes() -> None:
    class Broken(CodecTarget):
        def offer(self, raw: Raw) -> str:
            raise KeyError(raw.header[0])

    fuzzer = Fuzzer("codec", Broken([Said("x", Ping())]), Random(0))
    with pytest.raises(Finding, match=r"codec, message 1: KeyError\(.*\) at [0-9a-f]+"):
        await fuzzer.run(1)


def test_a_refusal_that_changed_something_is_a_finding() -> None:
    no = Refusal(code=Code.DENIED)
    must_be_unchanged(GetStatus(), no, "state", "state")
    with pytest.raises(Finding, match="was refused"):
        must_be_unchanged(GetStatus(), no, "state", "another")


def test_every_kind_of_change_is_made() -> None:
    mutator, random = Mutator(Random(0)), Random(1)
    whole = mutator.plain(Said("x", Refusal(code=Code.BUSY, detail="why", retry_after_ms=5), [b"frame"]))  # type: ignore[arg-type]
    assert whole.frames == [b"frame"]
    changed = [mutator.changed(Said("x", GetStatus(), [random.randbytes(8), b"b"])) for _ in range(500)]
    assert {len(raw.frames) for raw in changed} >= {1, 2, 3}
    assert len({raw.header for raw in changed}) > 250
