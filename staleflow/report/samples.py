"""Select samples of the model's output from ``samples.jsonl``, from the first to the last step."""

from pathlib import Path

import msgspec

from staleflow.process.sanitize import printable_lines

MAX_STEPS = 5
MAX_TEXT = 1_000
"""Maximum characters shown: the last ones of a prompt and the first ones of a completion."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """The fields used here of a line: one trajectory of a step."""

    lineage: int
    step: int
    version: int
    reward: float
    tokens: int
    prompt: str
    completion: str


_decode = msgspec.json.Decoder(Sample).decode


def samples(path: Path) -> list[Sample]:
    """Return the samples of ``MAX_STEPS`` evenly spread steps, including both ends; skip malformed lines.

    A step that was trained again after a rollback appears with its last samples. The file is read line by line, twice,
    to bound the memory.
    """
    places: dict[int, tuple[int, list[int]]] = {}
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return []
    with file:
        place = 0
        for line in file:
            if (sample := _read(line)) is not None:
                lineage, earlier = places.get(sample.step, (sample.lineage, []))
                places[sample.step] = sample.lineage, [*earlier, place] if lineage == sample.lineage else [place]
            place += len(line)
        result: list[Sample] = []
        for step in _spread(sorted(places)):
            for place in places[step][1]:
                file.seek(place)
                if (sample := _read(file.readline())) is not None:
                    result.append(_short(sample))
    return result


def _spread(steps: list[int]) -> list[int]:
    """Return evenly spread steps that include the first and the last."""
    count = min(MAX_STEPS, len(steps))
    return [steps[round(at * (len(steps) - 1) / max(1, count - 1))] for at in range(count)]


def _read(line: bytes) -> Sample | None:
    try:
        return _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _short(sample: Sample) -> Sample:
    prompt, completion = (printable_lines(text) for text in (sample.prompt, sample.completion))
    before, after = len(prompt) - MAX_TEXT, len(completion) - MAX_TEXT
    return msgspec.structs.replace(
        sample,
        prompt=f"({before:,} characters) … {prompt[before:]}" if before > 0 else prompt,
        completion=f"{completion[:MAX_TEXT]} … ({after:,} characters)" if after > 0 else completion,
    )
