"""Recommend a number of engines, or another split of the GPUs, from measured shares of time.

A step takes ``seconds``. The trainer trains for a part of it, and otherwise waits: for groups that are being generated
(*starved*), for older groups that must be in its batch (*pinned*), or for stages, prompts and loads of weights. More
engines shorten only the starved part. With an engine that decodes in a share ``busy`` of the time, and ``g`` times the
decoding speed of the fleet, the step takes

    max(seconds - starved, busy * seconds / g + (1 - busy) * seconds)

The time without decoding remains, because the bound admits nothing then: with ``max_staleness`` 0 the engines wait
while the trainer trains. ``g`` follows from the cost models that the scheduler fits to the reports of each engine.
Where engines have free places although the trainer waits, the same samples are divided among more engines, which then
decode faster only as far as a step of fewer samples is shorter. Fewer engines must decode the same tokens; a step takes
``max(seconds, tokens / (HEADROOM * rate))``.

StreamRL (2504.15930) adjusts its generation units when the times of generation and training differ. Here the measured
rate of each fleet size is the last word: a size that was tried and brought nothing is not recommended again.

No clock or IO in this module.
"""

import math
from collections.abc import Sequence
from enum import StrEnum
from statistics import fmean, stdev

import msgspec

from staleflow.protocols.coordination.view import Cost

MIN_STEPS = 12
"""Minimum number of measured steps."""
BLOCK = 4
"""Number of steps whose mean is one observation: a slow step is often followed by a fast one."""
MIN_REPEATS = 3
"""Number of steps in a row after which the same action is recommended."""
STARVED = 0.10
"""Share of time starved from which more engines are considered."""
FED = 0.05
"""Share of time starved up to which fewer engines, or more GPUs for the trainer, are considered."""
CONFIDENCE = 2.0
"""Standard errors by which a share must exceed its threshold."""
MIN_GAIN = 0.05
"""Minimum predicted gain of a change, as a share of a step. A smaller one is within the error of the prediction."""
HEADROOM = 0.85
"""Maximum load of the engines that remain after a removal. Between it and ``STARVED`` nothing changes."""
SATURATED = 0.75
"""Share of its slots from which an engine counts as full: the last samples of a group leave places free."""
MAX_SPREAD = 2.0
"""Largest multiple of the measured number of samples for which a cost model is used: it was fitted to smaller ones."""
SLOW = 0.5
"""Speed of a sample, as a share of the fastest engine's, below which the trainer waits for the groups of an engine."""
SAME, BETTER = 0.97, 1.05
"""Rates of two fleet sizes, relative to each other: at least ``SAME``: as fast; at least ``BETTER``: faster."""
MAX_PREDICTIONS = 16
"""Approximate number of fleet sizes that are predicted after each step."""
KNOWN_STEPS = 200
"""Number of steps for which a measured rate of a fleet size counts: lengths change while a model learns."""


class Action(StrEnum):
    """Recommended change."""

    KEEP = "keep"
    ADD = "add"
    REMOVE = "remove"
    TO_TRAINING = "to_training"
    TO_ROLLOUT = "to_rollout"


class Advice(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One recommendation."""

    action: Action | None = None
    """None before enough steps were measured."""
    count: int = 0
    """Number of engines or GPUs."""
    reason: str = ""
    steps_per_min: float = 0.0
    """Measured steps a minute."""
    expected_steps_per_min: float = 0.0
    """Predicted steps a minute after the change."""

    @property
    def sentence(self) -> str:
        """The change, its reason and its effect; the reason alone for ``keep``; empty before the first."""
        moved = "a GPU" if self.count == 1 else f"{self.count} GPUs"
        match self.action:
            case None:
                return ""
            case Action.KEEP:
                return f"keep all engines: {self.reason}"
            case Action.ADD | Action.REMOVE:
                change = f"{self.action.value} {_engines(self.count)}"
            case Action.TO_TRAINING:
                change = f"move {moved} from rollout to training at the next checkpoint"
            case Action.TO_ROLLOUT:
                change = f"move {moved} from training to rollout at the next checkpoint"
        return f"{change}: {self.reason}; {self.steps_per_min:.3g} -> {self.expected_steps_per_min:.3g} steps/min"


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One engine over the measured steps."""

    name: str
    busy: float
    """Share of the time with at least one running sample."""
    running: float
    """Mean number of running samples in that time."""
    slots: int = 0
    """Number of samples that it decodes at once; 0: unknown."""
    tokens_per_s: float = 0.0
    """Over the whole time."""
    kv: float = 0.0
    """Tokens in the KV cache for each running sample."""
    cost: Cost | None = None

    def rate(self, running: float) -> float:
        """Return the tokens a second with ``running`` samples; without a cost model those measured while it was
        busy."""
        if self.cost is None:
            return self.tokens_per_s / self.busy if self.busy else 0.0
        return self.cost.rate(running, running * self.kv)

    @property
    def speed(self) -> float:
        """Tokens a second of each of its samples."""
        running = max(self.running, 1.0)
        return self.rate(running) / running

    @property
    def places(self) -> float:
        """Number of samples up to which its rate can be predicted."""
        most = MAX_SPREAD * max(self.running, 1.0)
        return min(self.slots, most) if self.slots else most


class StepTimes(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The time from one version to the next, in seconds."""

    seconds: float
    starved: float
    """The trainer waited, and more of its groups were being generated than in stages."""
    blocked: float = 0.0
    """The trainer waited for stages, prompts or loads of weights."""
    pinned: float = 0.0
    """The trainer had enough groups, and waited for older ones."""


class Measured(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The last steps of a run whose engines did not change meanwhile."""

    version: int
    steps: tuple[StepTimes, ...]
    engines: tuple[EngineLoad, ...]
    batch_samples: int
    """Number of samples that are generated for a step."""
    max_staleness: int
    min_engines: int = 1
    max_engines: int = 0
    """Limit of the user; 0: none is known."""
    train_s: float = 0.0
    """Mean seconds of a step that ranks of the trainer divide among them."""
    ranks: int = 1
    reshards: bool = False
    """Another number of ranks can read the trainer's checkpoints."""

    def mean(self, name: str) -> float:
        """Return the mean of a field of the steps."""
        return fmean(getattr(step, name) for step in self.steps)

    def share(self, name: str) -> float:
        """Return the time of a field as a share of the whole time."""
        return self.mean(name) / self.mean("seconds")

    @property
    def admitted(self) -> float:
        """Number of samples that the engines can have at once while the trainer trains a batch."""
        return max(self.max_staleness, 1) * self.batch_samples


class Advisor:
    """Advices of one run. They change only when several steps in a row agree."""

    def __init__(self) -> None:
        self.newest = Advice()
        """The stable recommendation; it has no action before the first."""
        self._known: dict[int, tuple[float, int]] = {}
        """By number of engines: steps a minute, and the version at which they were measured."""
        self._last: tuple[Action | None, int] = None, 0
        self._repeats = 0

    def forget(self) -> None:
        """Discard the recommendation, not the known rates: the engines have changed."""
        self.newest, self._last, self._repeats = Advice(), (None, 0), 0

    def update(self, measured: Measured) -> Advice:
        """Take the measurement after another step into account."""
        if len(measured.steps) < MIN_STEPS or not measured.engines:
            return self.newest
        rate = 60.0 / measured.mean("seconds")
        oldest = measured.version - KNOWN_STEPS
        self._known = {n: known for n, known in self._known.items() if known[1] > oldest}
        if not slow_engines(measured.engines):  # with a slow engine, the number of engines does not determine the rate
            self._known[len(measured.engines)] = rate, measured.version
        now = recommend(measured, {n: known for n, (known, _) in self._known.items()})
        self._repeats = self._repeats + 1 if (now.action, now.count) == self._last else 1
        self._last = now.action, now.count
        if self._repeats >= MIN_REPEATS or (now.action, now.count) == (self.newest.action, self.newest.count):
            self.newest = now
        return self.newest


def recommend(measured: Measured, known: dict[int, float] | None = None) -> Advice:
    """Return what the measurement suggests. ``known``: measured steps a minute of other numbers of engines."""
    known, count, rate = known or {}, len(measured.engines), 60.0 / measured.mean("seconds")
    least = max(measured.min_engines, 1)
    if as_fast := [n for n, other in known.items() if least <= n < count and other >= SAME * rate]:
        reason = f"steps were as fast with {_engines(min(as_fast))}"
        return _change(Action.REMOVE, count - min(as_fast), rate, known[min(as_fast)], reason)
    larger = {n: other for n, other in known.items() if n > count}
    faster = {n: other for n, other in larger.items() if other >= BETTER * rate and _allows(measured, n)}
    if faster:
        best = max(faster, key=faster.__getitem__)
        return _change(Action.ADD, best - count, rate, faster[best], f"steps were faster with {_engines(best)}")
    slow, fed_s = _without_slow(measured)
    if slow and count - slow >= least and fed_s <= (1 - MIN_GAIN) * measured.mean("seconds"):
        behind = f"less than {SLOW:.0%} of the others' speed"
        waits = f"the trainer waits for the groups of {_engines(slow)} with {behind}"
        return _change(Action.REMOVE, slow, rate, 60.0 / fed_s, waits)
    if _surely(measured.steps, STARVED):
        if larger:
            return _keep(rate, f"{_starved(measured)}, but steps were no faster with {_engines(min(larger))}")
        return _more(measured, rate)
    if measured.share("starved") <= FED:
        slower = [n for n, other in known.items() if n < count and other < SAME * rate]
        return _fewer(measured, rate, max([least, *(n + 1 for n in slower)]))
    return _keep(rate, f"{_starved(measured)}, too little or too varied for another engine")


# --- more engines -------------------------------------------------------------------------------------------------


def _more(measured: Measured, rate: float) -> Advice:
    count, seconds = len(measured.engines), measured.mean("seconds")
    room = measured.max_engines - count if measured.max_engines else count
    numbers = {*range(_stride(count), count + 1, _stride(count)), room}
    times = {more: _seconds_with_more(measured, more) for more in sorted(numbers) if 0 < more <= min(room, count)}
    best_s = min(times.values(), default=seconds)
    if best_s <= (1 - MIN_GAIN) * seconds:
        more = next(more for more, step_s in times.items() if step_s <= best_s * (1 + MIN_GAIN / 2))
        return _change(Action.ADD, more, rate, 60.0 / times[more], _starved(measured))
    if measured.reshards and measured.ranks > 1:
        slower_s = measured.train_s * (1 / (1 - 1 / measured.ranks) - 1)
        moved_s = _seconds_with_more(measured, 1, slower_s)
        if moved_s <= (1 - MIN_GAIN) * seconds:
            return _change(Action.TO_ROLLOUT, 1, rate, 60.0 / moved_s, _starved(measured))
    if not times:
        return _keep(rate, f"{_starved(measured)}, and rollout.elastic allows no more engines")
    limit = "the engines have free places: staleness.max_staleness and the batch limit the samples in progress"
    return _keep(rate, f"{_starved(measured)}, but {limit}")


def _seconds_with_more(measured: Measured, more: int, slower_s: float = 0.0) -> float:
    """Return the seconds of a step with more engines, and a trainer that is ``slower_s`` slower."""
    engines, seconds = list(measured.engines), measured.mean("seconds")
    running = sum(engine.running for engine in engines)
    before = sum(engine.rate(engine.running) for engine in engines)
    typical = sorted(engines, key=lambda engine: engine.rate(engine.running))[len(engines) // 2]
    # Engines without a free place decode less than the bound admits.
    saturated = running >= SATURATED * sum(engine.slots for engine in engines)
    samples = max(running, measured.admitted) if saturated else running
    speedup = _rate([*engines, *[typical] * more], samples) / before if before else 1.0
    busy = fmean(engine.busy for engine in engines)
    produce_s = busy * seconds / max(speedup, 1.0) + (1 - busy) * seconds
    # Engines decode while the trainer trains, unless the bound lets them take turns.
    idle_s = slower_s if not measured.max_staleness else 0.0
    return max(seconds - measured.mean("starved") + slower_s, produce_s + idle_s)


def _without_slow(measured: Measured) -> tuple[int, float]:
    """Return the number of slow engines, and the seconds of a step without them: the trainer waits for no engine, or
    the others decode all tokens."""
    slow = len(slow_engines(measured.engines))
    busy_s = measured.mean("seconds") - measured.mean("starved") - measured.mean("pinned")
    return slow, max(busy_s, _tokens_s(measured, len(measured.engines) - slow), 1e-9)


def slow_engines(engines: Sequence[EngineLoad]) -> list[EngineLoad]:
    """Return the engines that are too slow beside the fastest one."""
    fastest = max((engine.speed for engine in engines), default=0.0)
    return [engine for engine in engines if engine.speed < SLOW * fastest]


# --- fewer engines ------------------------------------------------------------------------------------------------


def _fewer(measured: Measured, rate: float, least: int) -> Advice:
    count, seconds = len(measured.engines), measured.mean("seconds")
    loaded = f"engines run at {_load(measured):.0%} of their rate and the trainer waits {measured.share('starved'):.0%}"
    if measured.reshards and count > least:
        faster_s = measured.train_s * (1 - measured.ranks / (measured.ranks + 1))
        moved_s = max(seconds - faster_s, _tokens_s(measured, count - 1))
        if moved_s <= (1 - MIN_GAIN) * seconds:
            ranks = f"trainer.nproc {measured.ranks} to {measured.ranks + 1}"
            return _change(Action.TO_TRAINING, 1, rate, 60.0 / moved_s, f"{loaded}; {ranks}")
    fewest = max(least, math.ceil(count / 2))
    enough = (fewer for fewer in range(fewest, count, _stride(count)) if _tokens_s(measured, fewer) <= seconds)
    if (fewer := next(enough, count)) < count:
        return _change(Action.REMOVE, count - fewer, rate, rate, loaded)
    return _keep(rate, f"balanced: {loaded}")


def _tokens_s(measured: Measured, count: int) -> float:
    """Return the seconds in which the ``count`` fastest engines decode the tokens of a step, at ``HEADROOM``."""
    tokens = sum(engine.tokens_per_s for engine in measured.engines) * measured.mean("seconds")
    fastest = sorted(measured.engines, key=lambda engine: -engine.rate(engine.places))[:count]
    rate = _rate(fastest, measured.admitted)
    return tokens / (HEADROOM * rate) if rate else math.inf


def _load(measured: Measured) -> float:
    rate = _rate(measured.engines, measured.admitted)
    return sum(engine.tokens_per_s for engine in measured.engines) / rate if rate else 1.0


def _rate(engines: Sequence[EngineLoad], samples: float) -> float:
    """Return the tokens a second of engines that have ``samples`` samples together, as evenly as they have places."""
    total, left = 0.0, samples
    ordered = sorted(engines, key=lambda engine: engine.places)
    for position, engine in enumerate(ordered):
        running = min(engine.places, left / (len(ordered) - position))
        total += engine.rate(running)
        left -= running
    return total


# --- evidence -----------------------------------------------------------------------------------------------------


def _surely(steps: Sequence[StepTimes], threshold: float) -> bool:
    """Return whether the share of time starved exceeds a threshold by more than the noise of the steps."""
    blocks = [steps[at : at + BLOCK] for at in range(0, len(steps) - BLOCK + 1, BLOCK)]
    shares = [sum(step.starved for step in block) / sum(step.seconds for step in block) for block in blocks]
    error = stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else math.inf
    return fmean(shares) - CONFIDENCE * error > threshold


def _stride(count: int) -> int:
    """Return the difference of two considered numbers of engines: a prediction takes milliseconds with a thousand."""
    return max(1, count // MAX_PREDICTIONS)


def _allows(measured: Measured, count: int) -> bool:
    return not measured.max_engines or count <= measured.max_engines


def _starved(measured: Measured) -> str:
    return f"the trainer waits {measured.share('starved'):.0%} of the time for groups that are being generated"


def _engines(count: int) -> str:
    return f"{count} engine{'s' if count != 1 else ''}"


def _change(action: Action, count: int, rate: float, expected: float, reason: str) -> Advice:
    return Advice(action=action, count=count, reason=reason, steps_per_min=rate, expected_steps_per_min=expected)


def _keep(rate: float, reason: str) -> Advice:
    return _change(Action.KEEP, 0, rate, rate, reason)
