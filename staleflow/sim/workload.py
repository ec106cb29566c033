"""The trajectories of a simulated run: the same prompt, lease and place in the group give the same sample."""

import math

from staleflow.clients.rollout.engines.simulated_lengths import SimulatedLengths, mixed, share
from staleflow.configs.schema import Config
from staleflow.sim.sample import Sample


class Workload:
    """Creates samples, and knows the cost of a group before it is written."""

    def __init__(self, config: Config) -> None:
        rollout, simulation = config.rollout, config.simulation
        self.group_size = rollout.group_size
        self.started = math.ceil(rollout.group_size * rollout.redundancy.samples)
        """Samples started per group; those beyond ``group_size`` are discarded."""
        self.rows = simulation.rows
        self._seed = config.seed
        self._simulation = simulation
        self._lengths = SimulatedLengths(rollout.simulated, config.seed)
        self._longest = rollout.max_new_tokens

    def samples(self, group: int, draw: int) -> list[Sample]:
        """Return the samples of a group; another ``draw`` (such as its lease) gives other trajectories of the same
        prompt."""
        prompt = group % self.rows
        return [self._sample(prompt, mixed(self._seed, group, draw, place), place) for place in range(self.started)]

    def _sample(self, prompt: int, seed: int, place: int) -> Sample:
        simulation = self._simulation
        tokens = self._lengths.tokens(prompt, seed, self._longest)
        turns = min(simulation.turns, tokens)
        each, more = divmod(tokens, turns)
        written = tuple(each + (turn < more) for turn in range(turns))
        tools = tuple(-simulation.tool_s * math.log(share(seed, turn)) for turn in range(1, turns))
        return Sample(place, simulation.prompt_tokens, written, tools)

    def filtered(self, group: int, draw: int) -> bool:
        """Return whether the filter releases the group after its reward."""
        part = self._simulation.filter_share
        return bool(part) and share(self._seed + 2, group, draw) < part

    def expected(self, group: int) -> float:
        """Return the expected tokens of a sample of the group, as far as they can be known beforehand."""
        return self._lengths.expected(group % self.rows, self._longest)

    def deviate(self, group: int) -> float:
        """Return the predictable part of a group's lengths, as a standard normal deviate."""
        return self._lengths.deviate(group % self.rows)
