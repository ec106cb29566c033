# pyright: basic, reportMissingImports=false
"""Tasks of reasoning-gym as prompts, and its own scores as rewards.

Each row carries its whole reasoning-gym entry as JSON in the column ``entry``, because a score may need the metadata.
A checksum of its text alone decides whether a question is held out, so that training and held-out
rows never mix, whatever their seeds.
"""

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any, cast
from zlib import crc32

try:
    import reasoning_gym
except ImportError as error:
    raise ImportError(f"{error}; install the extra: pip install -e '.[reasoning-gym]'") from error

HELD_OUT_ONE_IN = 8
"""One in this number of questions is held out."""


def prompts(
    seed: int, *, dataset: str, size: int, template: str = "{question}", **options: Any
) -> Iterator[dict[str, str]]:
    """Yield the training rows among ``size`` generated questions.

    ``dataset`` and ``options`` are those of ``reasoning_gym.create_dataset``. ``template`` is the prompt: its
    ``{question}`` and the ``{names}`` of the question's metadata are replaced. It may contain special tokens of the
    model, such as those of its chat template.
    """
    return _rows(seed, dataset, size, template, options, held_out=False)


def held_out(
    seed: int, *, dataset: str, size: int, template: str = "{question}", **options: Any
) -> Iterator[dict[str, str]]:
    """Yield the held-out rows among the same questions; none of them is in ``prompts`` under any seed."""
    return _rows(seed, dataset, size, template, options, held_out=True)


def reward(prompt: str, completion: str, entry: str, **_: object) -> float:
    """Return the score of reasoning-gym for a completion without surrounding blanks, from 0 to 1."""
    question: dict[str, Any] = json.loads(entry)
    return float(_score(question["metadata"]["source_dataset"])(completion.strip(), question))


def is_held_out(question: str) -> bool:
    """Return True for the questions that no run trains on."""
    return crc32(question.encode()) % HELD_OUT_ONE_IN == 0


@functools.cache
def _score(dataset: str) -> Callable[[str, dict[str, Any]], float]:
    # annotated there as a function without arguments
    return cast(Callable[[str, dict[str, Any]], float], reasoning_gym.get_score_answer_fn(dataset))


def _rows(
    seed: int, dataset: str, size: int, template: str, options: dict[str, Any], *, held_out: bool
) -> Iterator[dict[str, str]]:
    for entry in reasoning_gym.create_dataset(dataset, seed=seed, size=size, **options):
        question = entry["question"]
        if is_held_out(question) == held_out:
            yield {"prompt": _filled(template, entry), "entry": json.dumps(entry)}


def _filled(template: str, entry: dict[str, Any]) -> str:
    fields = {**entry["metadata"], "question": entry["question"]}
    try:
        return template.format_map(fields)
    except (KeyError, IndexError, ValueError) as error:
        allowed = f"this dataset has {', '.join(f'{{{name}}}' for name in fields)}; a brace of the text is doubled"
        raise ValueError(f"template={template!r} ({type(error).__name__}: {error}); {allowed}") from error
