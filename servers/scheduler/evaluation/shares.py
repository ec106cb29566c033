"""One running evaluation: the shares of its prompts, and the scores that have arrived."""

import math
from dataclasses import dataclass, field

from staleflow.configs.evals import EvalSet
from staleflow.protocols.consistency.ids import WorkerId
from staleflow.protocols.wire.messages import PromptScores
from staleflow.servers.scheduler.evaluation.schedule import Due

MAX_NUMBERS, MAX_NAME = 1024, 200
"""Maximum number of a sample's numbers, and of characters of a name: each becomes a metric."""


@dataclass(slots=True, eq=False)
class Share:
    """Prompts that one worker plays."""

    prompts: dict[int, None]
    """Numbers of the prompts that have no scores yet."""
    worker: WorkerId | None = None
    ticket: int = 0
    """Ticket of the command; 0 while it is not ordered."""
    renewed_ms: int = 0
    """Time of the order, or of the worker's last report that named the ticket."""

    def release(self) -> None:
        """Make the share free for another worker."""
        self.worker, self.ticket = None, 0


@dataclass(slots=True, eq=False)
class Evaluation:
    """A running evaluation. It has no shares before the first worker has named the number of prompts."""

    due: Due
    given: EvalSet
    place: int
    """Number of the set in the configuration."""
    num_prompts: int = 0
    shares: list[Share] = field(default_factory=list[Share])
    scores: dict[int, PromptScores] = field(default_factory=dict[int, PromptScores])
    failures: int = 0
    failure: str = ""
    """Reason of the newest failure."""
    failed_workers: set[WorkerId] = field(default_factory=set[WorkerId])
    """Workers that failed or sent no report; others are preferred."""
    not_before_ms: int = 0
    """After a failure, the time of the next try."""
    started_ms: int = 0

    def split(self, num_prompts: int) -> None:
        """Divide the prompts into at most ``workers`` shares of about the same size."""
        self.num_prompts = num_prompts
        count = min(self.given.workers, num_prompts)
        self.shares = [Share(dict.fromkeys(range(first, num_prompts, count))) for first in range(count)]

    @property
    def is_finished(self) -> bool:
        return bool(self.shares) and not any(share.prompts for share in self.shares)

    def add(self, share: Share, scores: list[PromptScores]) -> None:
        """Add scores of prompts of a share; repeated ones have no effect."""
        for one in scores:
            if one.prompt in share.prompts:
                del share.prompts[one.prompt]
                self.scores[one.prompt] = one

    def all_scores(self) -> list[PromptScores]:
        """Return the scores of all prompts by number; every sample of a prompt that was not played counts as failed."""
        missing = PromptScores(prompt=0, rewards=[], failed=self.given.samples)
        return [self.scores.get(prompt, missing) for prompt in range(self.num_prompts)]

    def is_valid(self, scores: list[PromptScores]) -> bool:
        """Return whether the scores may be those of this set: finite, and of as many samples as it has."""
        return all(
            len(one.rewards) == len(one.lengths) <= self.given.samples - one.failed
            and len(one.numbers) <= MAX_NUMBERS
            and all(len(name) <= MAX_NAME and len(values) == len(one.rewards) for name, values in one.numbers.items())
            and all(math.isfinite(value) for values in (one.rewards, *one.numbers.values()) for value in values)
            for one in scores
        )
