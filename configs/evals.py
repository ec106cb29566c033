"""``[[eval]]``: sets of held-out prompts that rollout workers play at a pinned version while training continues."""

from typing import Annotated, Any

from msgspec import Meta, field

from staleflow.configs.section import (
    MOST,
    NonNegative,
    NonNegativeFloat,
    Positive,
    Processes,
    Section,
    Share,
    Text,
)

MAX_SAMPLES = 1024
"""Maximum number of samples of one prompt."""


class EvalSet(Section, frozen=True, kw_only=True):
    """A set of held-out prompts. Rollout workers play it at the exact version that is due, with the environment, the
    reward and the stages that the reward needs, while training continues. Nothing of it is trained, and it takes no
    place in the staleness window. Set exactly one of ``path`` and ``source``.
    """

    name: Text
    """Name in the metrics ``eval/NAME/...``: lower-case letters, digits, ``.``, ``_`` and ``-``."""
    path: Text = ""
    """A .jsonl or .parquet file, or ``hf://ORGANIZATION/NAME``, as ``prompts.path``. Each machine with a rollout worker
    needs it."""
    source: Text = ""
    """Import path of a callable, as ``prompts.source``."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of ``source``."""
    prompts: Positive = 256
    """Number of prompts: the first ones of the source, or all if it has fewer."""
    samples: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] = 1
    """Number of completions of each prompt, n of avg@n; pass@k is reported for k = 1, 2, 4, ... up to n. More than one
    needs a ``temperature`` above 0."""
    every: NonNegative = 0
    """Number of train steps between evaluations; 0: version 0 and the last version only, which are always evaluated."""
    pass_reward: Annotated[float, Meta(ge=-MOST, le=MOST)] = 1.0
    """Reward from which a completion passes, for avg@n and pass@k."""
    workers: Processes = 1
    """Maximum number of rollout workers that play the set at the same time, each a share of its prompts. A worker
    loads no newer version until its share is finished; it generates groups for the trainer meanwhile as far as the
    staleness bound admits."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 takes the most likely token. With vLLM 0, or at least 0.01."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Sample from the smallest set of most likely tokens whose probabilities add up to at least this; 1: from all."""
    top_k: NonNegative = 0
    """Sample from this number of most likely tokens; 0: from all."""
    min_p: Share = 0.0
    """Sample from tokens that are at least this share as likely as the most likely token; 0: from all."""
    max_new_tokens: NonNegative = 0
    """Maximum length of a completion in tokens; 0: ``rollout.max_new_tokens``. The penalties of ``rollout`` and
    ``rollout.stop`` apply as in training."""
