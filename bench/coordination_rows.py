"""The rows of targets that one kind of run covers: the simulations for each, and the resulting lines."""

from collections.abc import Callable, Sequence
from statistics import fmean

from bench import coordination_bounds as bounds
from bench.coordination_table import Line, Mean, Table
from bench.coordination_world import COSTS, DISPATCH, FILL, LEARNED, Job, Publish, Runs, Size, lengths, world
from staleflow.configs.schema import Config
from staleflow.sim.cost import StepCost
from staleflow.sim.result import Result

ETAS = (1, 2, 3)
TOKEN = ("staleness.bound=token",)
NOISE = 0.5
"""Standard deviation of the unpredictable part of a length's logarithm; the total is 0.9."""
TAILED = ("lognormal", "power law", "bimodal")


class Bench:
    """All rows except the ledger and the largest fleet, at one size, cost model and moment of publication."""

    def __init__(self, runs: Runs, size: Size, cost: str, publish: Publish) -> None:
        self._runs = runs
        self._size = size
        self._cost = cost
        self._publish: Publish = publish
        self._early = publish == "start"

    def token(self) -> Table:
        """The token bound trains at full speed and loses little more than it must."""
        kinds = lengths(self._size)
        return self._table("Token bound", [self._token(kind, kinds[kind], eta) for kind in TAILED for eta in ETAS])

    def _token(self, kind: str, chosen: Sequence[str], eta: int) -> Line:
        configs = self._worlds(eta, *chosen, *TOKEN, *DISPATCH)
        results = self._results(configs)
        share = fmean(result.steps_per_min / result.trainer_limit for result in results)
        masked = fmean(result.masked for result in results)
        step_s = fmean(60.0 / result.steps_per_min for result in results)
        floor, unknown, volume = self._least(configs, eta, step_s)
        violations = sum(result.violations for result in results)
        discarded = max(result.discarded for result in results)
        return Line(
            what=f"{kind}, η {eta}",
            target="≥ 0.97 of the trainer limit, 0 violations, 0 discarded, masked ≤ 1.25 x floor",
            measured=f"{share:.3f} of the limit, {violations} violations, {discarded:.3%} discarded, "
            f"masked {masked:.3f} = {masked / floor:.2f} x floor, {masked / unknown:.2f} x that of unknown lengths",
            bound=f"masked ≥ {floor:.3f}; at full speed, lengths unknown: {unknown:.3f}, {unknown / floor:.2f} x; "
            f"≤ {volume:.3f} of the limit by volume",
            met=share >= 0.97 and not violations and not discarded and masked <= 1.25 * floor,
            possible=unknown <= 1.25 * floor and volume >= 0.97,
            values={"share": share, "masked": masked, "floor": floor, "violations": violations, "discarded": discarded},
        )

    def _least(self, configs: Sequence[Config], eta: int, step_s: float) -> tuple[float, float, float]:
        """Minimum masked share at steps of ``step_s``; the same at full speed with unknown lengths; share of the
        trainer's limit that the volume admits."""
        one_s, train_s = bounds.token_s(configs[0]), configs[0].trainer.simulated_step_s
        window_s, least_s = (bounds.window_s(s, train_s, eta, early=self._early) for s in (step_s, train_s))
        drawn = [self._drawn(config) for config in configs]
        floor = fmean(bounds.masked_floor(some, one_s, window_s) for some in drawn)
        unknown = fmean(bounds.masked_floor_unknown(some, one_s, least_s, train_s) for some in drawn)
        limit = fmean(bounds.volume_limit(some, one_s, eta + self._early) for some in drawn)
        return floor, unknown, min(1.0, limit * train_s / 60)

    def trajectory(self) -> Table:
        """Strict and iid: the gain from dispatch alone."""
        return self._table("Trajectory bound, wait, iid", [line for eta in ETAS for line in self._trajectory(eta)])

    def _trajectory(self, eta: int) -> list[Line]:
        configs = self._worlds(eta)
        psrl = self._speeds(configs, "psrl")
        one_s, train_s = bounds.token_s(configs[0]), configs[0].trainer.simulated_step_s
        longest = [bounds.batches(self._drawn(config), self._size.batch, eta) for config in configs]
        bound = fmean(bounds.batch_bound(some, one_s, train_s, eta, early=self._early) for some in longest)
        best = fmean(bounds.batch_optimum(some, one_s, train_s, eta, early=self._early) for some in longest)
        message = f"a batch a version: ≤ {bound:.3f}, optimum {best:.3f}"

        def line(what: str, speeds: Sequence[float], results: Sequence[Result], factor: float | None) -> Line:
            mean, ratio = Mean.of(speeds), Mean.of([a / b for a, b in zip(speeds, psrl, strict=True)])
            return Line(
                what=f"η {eta}, {what}",
                target="" if factor is None else f"≥ {factor:.2f} x PSRL",
                measured=f"{mean} steps/min = {ratio} x PSRL, {mean.value / bound:.2f} of the bound, "
                f"{mean.value / best:.2f} of the optimum",
                bound=message,
                met=None if factor is None else ratio.value >= factor,
                values={"ratio": ratio.value, "of_optimum": mean.value / best, **_sums(results)},
            )

        lines = [line("PSRL preset", psrl, [], None)]
        for what, chosen, factor in (("fill, least loaded", FILL, None), ("just in time, cost model", DISPATCH, 1.05)):
            results = self._results(self._worlds(eta, *chosen))
            lines.append(line(what, [result.steps_per_min for result in results], results, factor))
        return lines

    def clustered(self) -> Table:
        """Strict, with prompts of similar length in the same steps; max_staleness 1. Twice the steps of other runs,
        since the ranker knows nothing at first."""
        block, share = self._size.lookahead, 1.0 - (NOISE / 0.9) ** 2
        known = ("coordination.composition=length_clustered", "simulation.known_lengths=true")
        cases = (
            ("known lengths", known, 1.0, "PSRL", 2.4),
            (f"learned ranker, noise of log-sd {NOISE}", LEARNED, share, "PSRL", 1.9),
            ("learned ranker, unpredictable", LEARNED, 0.0, "iid", 1.0),
        )
        longer = (f"trainer.steps={2 * self._size.steps - 4}",)
        lines: list[Line] = []
        for what, chosen, sent, beside, factor in cases:
            workload = (f"rollout.simulated.prompt_share={sent!r}", *longer)
            lookahead = f"coordination.lookahead={block}"
            results = self._results(self._worlds(1, *workload, *DISPATCH, *chosen, lookahead))
            other = self._worlds(1, *workload, *DISPATCH) if beside == "iid" else self._worlds(1, *workload)
            speeds = self._speeds(other, "" if beside == "iid" else "psrl")
            lines.append(self._clustered(what, results, speeds, beside, factor, sent))
        return self._table("Trajectory bound, wait, length-clustered, η 1", lines)

    def _clustered(
        self, what: str, results: Sequence[Result], others: Sequence[float], beside: str, factor: float, told: float
    ) -> Line:
        speeds = [result.steps_per_min for result in results]
        mean, ratio = Mean.of(speeds), Mean.of([a / b for a, b in zip(speeds, others, strict=True)])
        bias = max((result.length_bias for result in results), key=lambda bias: abs(bias - 1.0))
        # two runs of other lengths: a run counts as slower only beyond twice the error
        fast = ratio.value >= factor if told else ratio.value + 2 * ratio.error >= factor
        return Line(
            what=what,
            target=f"≥ {factor:.1f} x {beside}, length bias 1.00",
            measured=f"{mean} steps/min = {ratio} x {beside}, length bias {bias:.3f}",
            bound=self._sorted() if told == 1.0 else "",
            met=fast and round(bias, 2) == 1.0,
            values={"steps_per_min": mean.value, "ratio": ratio.value, "bias": bias, **_sums(results)},
        )

    def _sorted(self) -> str:
        size, configs = self._size, self._worlds(1)
        one_s, train_s = bounds.token_s(configs[0]), configs[0].trainer.simulated_step_s

        def best(block: int) -> float:
            longest = [
                bounds.batches(bounds.clustered(self._drawn(config), block * size.batch), size.batch, 1)
                for config in configs
            ]
            return fmean(bounds.batch_optimum(some, one_s, train_s, 1, early=self._early) for some in longest)

        return (
            f"a batch a version, in order: optimum {best(size.lookahead):.3f}, all in one order {best(size.steps):.3f}"
        )

    def staleness(self) -> Table:
        """No unnecessary staleness at equal throughput."""
        kinds = lengths(self._size)
        cases: tuple[tuple[str, tuple[str, ...], bool], ...] = (
            ("trajectory bound, even lengths", kinds["even"], True),
            ("token bound, lognormal", TOKEN, False),
            ("trajectory bound, lognormal", (), False),
        )
        lines = [self._staleness(f"{what}, η {eta}", given, eta, fed) for what, given, fed in cases for eta in ETAS[1:]]
        return self._table("Staleness at equal throughput", lines)

    def _staleness(self, what: str, chosen: Sequence[str], eta: int, fed: bool) -> Line:
        """``fed``: whole groups are trained by a trainer that need not wait; otherwise no simple bound is known."""
        worlds = self._worlds(eta, *chosen, *DISPATCH)
        fill, other = self._results(self._worlds(eta, *chosen, *FILL)), self._results(worlds)
        speeds = [_mean(results, _speed) for results in (fill, other)]
        ages = [_mean(results, lambda result: result.staleness_mean) for results in (fill, other)]
        less = 1.0 - ages[1] / ages[0]
        one_s, train_s = bounds.token_s(worlds[0]), worlds[0].trainer.simulated_step_s
        least = bounds.freshest(self._drawn(worlds[0]), one_s, train_s, early=self._early) if fed else 0.0
        return Line(
            what=what,
            target="mean staleness ≥ 25 % below fill, at ≥ 0.97 of its speed",
            measured=f"{ages[0]:.2f} -> {ages[1]:.2f} ({-less:+.0%}) at {speeds[0]:.3f} -> {speeds[1]:.3f} steps/min",
            bound=f"at full speed ≥ {least:.2f} ({least / ages[0] - 1:+.0%})" if fed else "",
            met=less >= 0.25 and speeds[1] >= 0.97 * speeds[0],
            possible=least <= 0.75 * ages[0],
            values={
                "less": less,
                "age": ages[1],
                "least": least,
                "speed": speeds[1] / speeds[0],
                **_sums([*fill, *other]),
            },
        )

    def asynchronous(self) -> Table:
        """The paper's shape; a step trains in the time in which the engines, all slots in use, write a batch."""
        engines, batch, group, steps, few = self._size.big
        shape = (f"rollout.workers={engines}", f"trainer.batch_size={batch}", f"rollout.group_size={group}")
        first = self._crowded(*shape, f"trainer.steps={steps}")
        lengths_drawn = self._drawn(first)
        write_s = _write_s(first, lengths_drawn)

        def result(peer: str, steps: int, *chosen: str) -> Result:
            given = (*shape, f"trainer.simulated_step_s={write_s!r}", f"trainer.steps={steps}")
            return self._results([self._crowded(*given, *chosen)], peer)[0]

        synchronous = result("sync", few)
        longest = bounds.batches(lengths_drawn, batch, 3)
        best = bounds.batch_bound(longest, bounds.token_s(first), write_s, 3, early=self._early)
        step_s = 60.0 / synchronous.steps_per_min
        lines = [
            Line(
                what="synchronous",
                measured=f"{synchronous.steps_per_min:.3f} steps/min: {step_s - write_s:.0f} s of rollout, then "
                f"{write_s:.0f} s of training",
            )
        ]
        for what, chosen, bound in (
            ("trajectory bound, wait, iid", (), best),
            ("token bound", TOKEN, 60.0 / write_s),
        ):
            run = result("", steps, *DISPATCH, *chosen)
            ratio = run.steps_per_min / synchronous.steps_per_min
            lines.append(
                Line(
                    what=f"η 3, {what}",
                    target="≥ 2.68 x synchronous",
                    measured=f"{run.steps_per_min:.3f} steps/min = {ratio:.2f} x synchronous, "
                    f"{run.violations} violations, {run.masked:.1%} masked",
                    bound=f"≤ {bound:.3f} steps/min = {bound / synchronous.steps_per_min:.2f} x synchronous",
                    met=ratio >= 2.68,
                    values={"ratio": ratio, **_sums([run])},
                )
            )
        return self._table(f"Asynchronous beside synchronous: {engines} engines, {batch} groups of {group}", lines)

    def _crowded(self, *overrides: str) -> Config:
        """A fleet with enough samples per engine that the cost matters, whatever the cost model of the other rows."""
        costs = [f"rollout.simulated.{one}" for one in COSTS["moe"]]
        return self._world(3, 0, *costs, "rollout.simulated.prompt_share=0.5", *overrides)

    # --- runs ------------------------------------------------------------------------------------------------

    def _world(self, eta: int, seed: int, *overrides: str) -> Config:
        return world(self._size, self._cost, self._publish, *overrides, eta=eta, seed=seed)

    def _worlds(self, eta: int, *overrides: str) -> list[Config]:
        return [self._world(eta, seed, *overrides) for seed in range(self._size.seeds)]

    def _results(self, configs: Sequence[Config], peer: str = "") -> list[Result]:
        return self._runs.of([Job(config, peer) for config in configs])

    def _speeds(self, configs: Sequence[Config], peer: str = "") -> list[float]:
        return [result.steps_per_min for result in self._results(configs, peer)]

    def _drawn(self, config: Config) -> bounds.Floats:
        return bounds.drawn(config, config.trainer.batch_size * config.trainer.steps)

    def _table(self, title: str, lines: Sequence[Line]) -> Table:
        when = "with the batch of its step" if self._early else "after its step"
        return Table(title=f"{title}; a version is out {when}", lines=lines, judged=self._early and self._size.full)


def _write_s(config: Config, lengths: bounds.Floats) -> float:
    """Seconds in which the engines, each with its share of a batch running all the time, write a batch."""
    engines, trainer = config.rollout.workers, config.trainer
    running = trainer.batch_size * config.rollout.group_size // engines
    context = float((lengths**2).mean() / (2 * lengths.mean()))
    rate = engines * StepCost.of(config.rollout.simulated).tokens_per_s(running, round(running * context))
    return round(float(lengths.mean()) * running * engines / rate, 1)


def _speed(result: Result) -> float:
    return result.steps_per_min


def _mean(results: Sequence[Result], of: Callable[[Result], float]) -> float:
    return fmean(map(of, results))


def _sums(results: Sequence[Result]) -> dict[str, float]:
    """Counters that must be 0 in every run."""
    return {
        "violations": sum(result.violations for result in results),
        "discarded": max((result.discarded for result in results), default=0.0),
    }
